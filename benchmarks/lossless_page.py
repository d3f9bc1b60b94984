"""The page docs/lossless.md: its table from the stored results, the newest line of every case."""

from __future__ import annotations

import json
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "lossless.md"
HEAD = (
    "| network | L1 | test accuracy | off | on | unstable | undecided | units removed | parameters left "
    "| programs | processor seconds |"
)


def write_page(results: Path) -> None:
    """The rows of the table in place of those that are there."""
    before, _, after = PAGE.read_text().partition(HEAD)
    rest = after[after.index("\n\n") :]
    PAGE.write_text("\n".join([before + HEAD, "|---" * (HEAD.count("|") - 1) + "|", *lay_out(results)]) + rest)


def lay_out(results: Path) -> list[str]:
    records = [json.loads(line) for line in results.read_text().splitlines()]
    newest = {(record["case"], record["penalty"]): record for record in records}
    return [
        f"| {case.replace('mnist', 'MNIST').replace('cifar10', 'CIFAR-10')} | {penalty:g} "
        f"| {record['test_accuracy'][0]:.1%} | {record['off']} | {record['on']} | {record['unstable']} "
        f"| {record['undecided']} | {record['removed']} of {record['units']} "
        f"| {record['parameters'][1] / record['parameters'][0]:.1%} | {record['programs']} "
        f"| {record['processor_seconds']:.1f} |"
        for (case, penalty), record in newest.items()
    ]
