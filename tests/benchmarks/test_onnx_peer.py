"""benchmarks/onnx_peer.py: every cell is stored once, and the page shows the stored results."""

from front_page import README, RESULTS_PAGE
from onnx_peer import METHODS, TABLE, list_cells, name_cell, read_lines, tabulate

LINES = read_lines()


def test_every_cell_is_stored_once():
    assert sorted(map(name_cell, LINES)) == sorted(map(name_cell, list_cells()))


def test_the_table_is_current():
    shown = TABLE.search(RESULTS_PAGE.read_text())[0]
    assert shown.splitlines() == tabulate(LINES), "run: python benchmarks/onnx_peer.py page"


def test_what_the_page_says_of_refitting_convolutions():
    """onnxsim refits linear layers alone; in a ResNet the only one keeps its inputs, so that nothing changes."""
    for line in LINES:
        if line["network"] == "resnet20":
            pruned, refitted = (line["accuracy"][method] for method in METHODS[1:3])
            assert abs(pruned - refitted) < 0.01


def test_what_the_readme_says():
    (line,) = (line for line in LINES if (line["network"], line["kept"]) == ("resnet20", 0.75))
    theirs, ours = (f"{100 * line['accuracy'][method]:.1f} %" for method in METHODS[2:])
    text = " ".join(README.read_text().split())
    assert f"refitted on the same images keeps {ours} here, {theirs} with onnxsim" in text
