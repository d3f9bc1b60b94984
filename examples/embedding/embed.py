"""A network embedded in an optimisation problem, before and after pruning: seconds, nodes, optimum.

A regression network is the surrogate of a process whose cost is only known from measurements. SCIP minimises the cost
over the settings; PySCIPOpt-ML adds the constraints of every ReLU to the program.

pip install 'critical_neurons[embedding]'
python examples/embedding/embed.py [--width 24] [--seeds 0 1 2] [--networks lossless] [--seconds 300] [--store FILE]
python examples/embedding/embed.py --page FILE     the table of docs/embedding.md from stored results
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import critical_neurons as cn
from critical_neurons.core.markdown import format_table, replace_table

INPUTS = 5
SETTINGS_AT_MOST = 2.0
"""Upper bound on the sum of all settings, each in [0, 1]."""
PENALTY = 2e-5
PAGE = Path(__file__).parents[2] / "docs" / "embedding.md"
HEADER = (
    *("width", "problem", "network", "hidden units", "error", "optimum", "true cost there", "nodes"),
    "seconds of SCIP",
)
NETWORKS = ("as trained", "lossless", "half the units", "half the units, lossless", "a quarter of the units")


def measure(settings: Tensor) -> Tensor:
    """The true process, which in practice has no formula to put into a program."""
    return (torch.sin(7 * settings).sum(1) + (settings[:, :-1] * settings[:, 1:]).sum(1))[:, None]


def train(width: int, steps: int = 4000) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    )
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        settings = torch.rand(256, INPUTS)
        size = sum(values.abs().sum() for values in model.parameters() if values.ndim > 1)
        optimiser.zero_grad()
        (nn.functional.mse_loss(model(settings), measure(settings)) + PENALTY * size).backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def make_smaller(model: nn.Sequential) -> dict[str, nn.Sequential]:
    """The networks by name; lossless ones compute the same function on [0, 1]^n."""
    box = np.zeros(INPUTS), np.ones(INPUTS)
    points = torch.rand(2000, INPUTS, generator=torch.Generator().manual_seed(1))
    half, quarter = (cn.compress(model, points, units=share, onnx=False).model for share in (0.5, 0.25))
    smaller = [drop_identities(cn.lossless(each, box).model) for each in (model, half)]
    return dict(zip(NETWORKS, (model, smaller[0], half, smaller[1], quarter), strict=True))


def draw_prices(seed: int) -> Tensor:
    """Additional linear costs of the settings: a different problem for every seed, zero for seed 0."""
    drawn = torch.rand(INPUTS, generator=torch.Generator().manual_seed(seed)) - 0.5
    return drawn if seed else torch.zeros(INPUTS)


def drop_identities(model: nn.Module) -> nn.Sequential:
    """Remove the nn.Identity layers that merged layers leave behind."""
    return nn.Sequential(*(layer for layer in model.children() if not isinstance(layer, nn.Identity)))


def optimise(model: nn.Sequential, prices: Tensor, seconds: float) -> dict[str, Any]:
    """Minimise the network's cost with SCIP, on one thread."""
    from pyscipopt import Model, quicksum
    from pyscipopt_ml.add_predictor import add_predictor_constr

    program = Model()
    program.hideOutput()
    program.setParam("limits/time", seconds)
    program.setParam("timing/clocktype", 1)  # processor time, not wall clock, as other work may be running
    settings = np.array([[program.addVar(f"setting_{at}", lb=0.0, ub=1.0) for at in range(INPUTS)]])
    cost = np.array([[program.addVar("cost", lb=None, ub=None)]])
    program.addCons(quicksum(settings[0]) <= SETTINGS_AT_MOST)
    add_predictor_constr(program, model, settings, cost, unique_naming_prefix="net_")
    paid = quicksum(float(price) * each for price, each in zip(prices, settings[0], strict=True))
    program.setObjective(cost[0, 0] + paid, "minimize")
    program.optimize()
    found = torch.tensor([[program.getVal(each) for each in settings[0]]]).clamp(0.0, 1.0)
    return {
        "status": program.getStatus(),
        "optimum": program.getObjVal(),
        "bound": program.getDualbound(),
        "nodes": int(program.getNTotalNodes()),
        "seconds": round(program.getSolvingTime(), 2),
        "true_cost": float(measure(found) + found @ prices),
    }


def judge(model: nn.Sequential, prices: Tensor, seconds: float) -> dict[str, Any]:
    points = torch.rand(5000, INPUTS, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        error = float((model(points) - measure(points)).square().mean().sqrt())
    units = sum(layer.out_features for layer in list(model)[:-1] if isinstance(layer, nn.Linear))
    return {"units": units, "error": error, **optimise(model, prices, seconds)}


def lay_out(records: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    newest = {(each["width"], each.get("seed", 0), each["network"]): each for each in records}
    order = {name: place for place, name in enumerate(NETWORKS)}
    return [
        (
            *(
                width,
                seed,
                name,
                each["units"],
                f"{each['error']:.4f}",
                f"{each['optimum']:.5f}",
                f"{each['true_cost']:.4f}",
            ),
            f"{each['nodes']:,}",
            f"{each['seconds']:.1f}{'' if each['status'] == 'optimal' else ', stopped'}",
        )
        for (width, seed, name), each in sorted(newest.items(), key=lambda item: (*item[0][:2], order[item[0][2]]))
    ]


def write_page(results: Path) -> None:
    records = [json.loads(line) for line in results.read_text().splitlines()]
    PAGE.write_text(replace_table(PAGE.read_text(), HEADER, lay_out(records)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=24, help="units of both hidden layers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the prices, one problem each")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of SCIP for every network")
    parser.add_argument("--store", type=Path, help="append a JSON line for every network")
    parser.add_argument("--page", type=Path, help="write docs/embedding.md from these stored lines")
    arguments = parser.parse_args()
    if arguments.page:
        write_page(arguments.page)
        return
    torch.set_num_threads(1)
    model, records = train(arguments.width), []
    smaller = make_smaller(model)
    for seed, name in product(arguments.seeds, arguments.networks):
        found = judge(smaller[name], draw_prices(seed), arguments.seconds)
        records.append({"network": name, "width": arguments.width, "seed": seed, **found})
        if arguments.store:
            line = {"date": time.strftime("%Y-%m-%d"), **records[-1]}
            with arguments.store.open("a") as file:
                file.write(json.dumps(line) + "\n")
    print("\n".join(format_table(HEADER, lay_out(records))))


if __name__ == "__main__":
    main()
