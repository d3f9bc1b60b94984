"""The page docs/lossless.md: its table from the stored results, the newest line of every case."""

from __future__ import annotations

import json
from pathlib import Path

from critical_neurons.core.markdown import replace_table

PAGE = Path(__file__).parent.parent / "docs" / "lossless.md"
HEADER = (
    *("network", "L1", "test accuracy", "off", "on", "unstable", "undecided", "units removed", "parameters left"),
    *("programs", "processor seconds"),
)


def write_page(results: Path) -> None:
    """Replace the table in the page."""
    PAGE.write_text(replace_table(PAGE.read_text(), HEADER, lay_out(results)))


def lay_out(results: Path) -> list[tuple[object, ...]]:
    records = [json.loads(line) for line in results.read_text().splitlines()]
    newest = {(record["case"], record["penalty"]): record for record in records}
    return [
        (
            case.replace("mnist", "MNIST").replace("cifar10", "CIFAR-10"),
            f"{penalty:g}",
            f"{record['test_accuracy'][0]:.1%}",
            *(record[state] for state in ("off", "on", "unstable", "undecided")),
            f"{record['removed']} of {record['units']}",
            f"{record['parameters'][1] / record['parameters'][0]:.1%}",
            record["programs"],
            f"{record['processor_seconds']:.1f}",
        )
        for (case, penalty), record in newest.items()
    ]
