"""The whole way once, with whatever extras there are: a script, so that it needs no packages for tests."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import MissingExtraError


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    inputs = torch.rand(24, 6)
    labels = model(inputs).argmax(1)
    assert cn.score(model, inputs[:3], labels[:3]).status is cn.Status.OPTIMAL
    found = cn.compress(model, inputs, labels, units=0.5, effort="quick")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found.save(folder / "smaller")
        found.report(folder / "report.html")
        again = cn.load(folder / "smaller", model)
        assert torch.equal(again(inputs), found.model(inputs))
        for path in ("smaller.pt2", "smaller.onnx"):
            with suppress(MissingExtraError):
                cn.export(found.model, folder / path, inputs)
    for solver in ("cvxpy:CLARABEL", "scip"):
        with suppress(MissingExtraError):
            cn.score(model, inputs[:3], labels[:3], solver=solver)


if __name__ == "__main__":
    main()
