"""Tables: small ones as they come out in full; the paper's own."""

from __future__ import annotations

import csv
import io

import pytest

from critical_neurons.errors import InvalidSettingError
from critical_neurons_reproduction.published_values import TABLES
from critical_neurons_reproduction.result_tables import Figure, Published, Row, Table, set_beside, summarise

PUBLISHED = Published(
    "Small_table: λ = 5 & more",
    ("data", "network"),
    ("Ref", "Ours"),
    {
        ("MNIST", "FC-3"): {"Ref": Figure(98.1, 0.1), "Ours": Figure(80, 2.7)},
        ("MNIST", "A|B"): {"Ref": Figure(55)},
        ("CIFAR-10", "VGG-16"): {"Ref": Figure(83.9, 0.04), "Ours": None},
    },
    ("50 % of it is a note.",),
)

TABLE = set_beside(
    PUBLISHED,
    {
        ("MNIST", "FC-3"): {"Ref": [97.0, 98.0, 99.0], "Ours": [90.0, 91.0], "units": [50.126]},
        ("MNIST", "A|B"): {"Ref": []},
        ("CIFAR-10", "VGG-16"): {"Ref": [70.0, 70.0, 70.0], "Ours": None},
    },
    seeds=3,
    schedules={("CIFAR-10", "VGG-16"): "1 of 30 epochs"},
    further=("units",),
)

MARKDOWN = r"""**Small_table: λ = 5 & more**

| data | network | Ref | Ref, paper | Ours | Ours, paper | units | schedule |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
| MNIST | FC-3 | 98.00 ± 1.00 | 98.1 ± 0.1 | 90.50 ± 0.71 (2 of 3 seeds) | 80 ± 2.7 | 50.13 (1 of 3 seeds) |  |
| MNIST | A\|B | missing | 55 | n/a |  | missing |  |
| CIFAR-10 | VGG-16 | 70.00 ± 0.00 | 83.9 ± 0.04 | n/a | n/a | missing | 1 of 30 epochs |

50 % of it is a note.
"""

LATEX = r"""\begin{table}
  \caption{Small\_table: $\lambda$ = 5 \& more}
  \begin{tabular}{llrrrrrr}
    \toprule
    data & network & Ref & Ref, paper & Ours & Ours, paper & units & schedule \\
    \midrule
    MNIST & FC-3 & 98.00 $\pm$ 1.00 & 98.1 $\pm$ 0.1 & 90.50 $\pm$ 0.71 (2 of 3 seeds) & 80 $\pm$ 2.7 & 50.13 (1 of 3 seeds) &  \\
    MNIST & A|B & missing & 55 & n/a &  & missing &  \\
    CIFAR-10 & VGG-16 & 70.00 $\pm$ 0.00 & 83.9 $\pm$ 0.04 & n/a & n/a & missing & 1 of 30 epochs \\
    \bottomrule
  \end{tabular}
  \par 50 \% of it is a note.
\end{table}
"""  # noqa: E501  the rows of a table are one line each


def test_markdown():
    assert TABLE.to_markdown() == MARKDOWN


def test_latex():
    assert TABLE.to_latex() == LATEX


def test_csv_is_unrounded():
    rows = list(csv.DictReader(io.StringIO(TABLE.to_csv())))
    assert rows[0] == {
        "data": "MNIST",
        "network": "FC-3",
        "Ref mean": "98.0",
        "Ref deviation": "1.0",
        "Ref seeds": "3",
        "Ref mean, paper": "98.1",
        "Ref deviation, paper": "0.1",
        "Ours mean": "90.5",
        "Ours deviation": "0.7071067811865476",
        "Ours seeds": "2",
        "Ours mean, paper": "80",
        "Ours deviation, paper": "2.7",
        "units mean": "50.126",
        "units deviation": "",
        "units seeds": "1",
        "schedule": "",
    }
    assert [rows[1][name] for name in ("Ref mean", "Ours mean", "Ours mean, paper")] == ["missing", "n/a", ""]
    assert [rows[2][name] for name in ("Ours mean", "Ours mean, paper", "schedule")] == [
        "n/a",
        "n/a",
        "1 of 30 epochs",
    ]


def test_nothing_of_the_paper_and_nothing_shortened_takes_no_column():
    table = Table("Own", ("data",), ("accuracy",), (Row(("digits",), {"accuracy": Figure(97.5, None, 1)}),), 1)
    assert table.to_markdown() == "**Own**\n\n| data | accuracy |\n| --- | ---: |\n| digits | 97.50 |\n"
    assert table.to_csv() == "data,accuracy mean,accuracy deviation,accuracy seeds\ndigits,97.5,,1\n"


def test_summaries():
    assert summarise([]) is None
    assert summarise([3.5]) == Figure(3.5, None, 1)
    assert summarise([1.0, 2.0, 3.0]) == Figure(2.0, 1.0, 3)
    with pytest.raises(InvalidSettingError, match="Accepted: finite numbers"):
        summarise([1.0, float("nan")])


def test_rows_and_columns_that_are_not_there():
    with pytest.raises(InvalidSettingError, match=r"no row MNIST, FC-5. Rows: MNIST, FC-3; MNIST, A"):
        set_beside(PUBLISHED, {("MNIST", "FC-5"): {}}, seeds=3)
    with pytest.raises(InvalidSettingError, match=r"MNIST, FC-3: no column Other. Columns: Ref, Ours"):
        set_beside(PUBLISHED, {("MNIST", "FC-3"): {"Other": [1.0]}}, seeds=3)
    with pytest.raises(InvalidSettingError, match=r"labelled \('digits',\). Accepted: one label for each"):
        Table("Own", ("data", "network"), (), (Row(("digits",), {}),), 1)


def test_the_papers_tables():
    assert {name: len(table.figures) for name, table in TABLES.items()} == {
        "table-1": 8,
        "table-1-appendix": 10,
        "table-2": 8,
        "table-3": 4,
        "snip": 2,
        "snip-transfer": 4,
        "rescale": 6,
    }
    assert TABLES["table-2"].figures["MNIST", "FC-3", "0.1"]["Ours"] == Figure(95.9, 0.87)
    assert TABLES["table-2"].figures["CIFAR-10", "VGG-16", "0.3"]["Ours"] is None
    assert "prune" not in TABLES["table-1"].figures["MNIST", "Ref"]
    assert TABLES["snip"].figures[("SNIP",)]["prune"] == Figure(55.0)
    for name in ("table-1", "table-1-appendix"):
        assert set(TABLES[name].figures["MNIST", "Ref", *([""] if name == "table-1-appendix" else [])]) == {
            "accuracy"
        }


@pytest.mark.parametrize("row", [row for row in TABLES["table-1"].figures if row[1] in ("IDP", "SIM")])
def test_the_appendix_repeats_table_1(row):
    assert TABLES["table-1-appendix"].figures[*row, "0.01"] == TABLES["table-1"].figures[row]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_set_before_anything_was_run(name):
    published = TABLES[name]
    table = set_beside(published, {}, seeds=3)
    cells = sum(map(len, published.figures.values()))
    assert table.to_markdown().count("missing") == cells
    assert table.to_latex().count("missing") == cells
    assert len(table.to_csv().splitlines()) == 1 + len(published.figures)
