"""Every kind of file that is read: how to write one, and what loading it gives."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from safetensors.torch import save_file
from torch import nn

import critical_neurons as cn
from critical_neurons.core.curve import Curve, CurvePoint
from critical_neurons.errors import InvalidFileError
from critical_neurons.io.checkpoint import read_results
from critical_neurons.io.data import load_batch
from critical_neurons.io.models import load_model
from critical_neurons.removal.rows import find_tensors
from critical_neurons_reproduction.datasets import _digest, _read_cache
from critical_neurons_reproduction.decoupled import decouple, train_parts
from critical_neurons_reproduction.recipes import Recipe
from critical_neurons_reproduction.store import Cell, Store
from tests.core.test_comparison import make as make_comparison
from tests.drawing import draw_plan, draw_scores, make_scores
from tests.zoo import share_case

NAME = "nest"


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def write_plan(folder):
    path = folder / "plan.json"
    draw_plan(share_case(NAME).network.structure).save(path)
    return path, lambda: cn.Plan.load(path).to_dict()


def write_scores(folder):
    path = folder / "scores.json"
    draw_scores(NAME).save(path)
    return path, lambda: cn.Scores.load(path).to_dict()


def write_comparison(folder):
    path = folder / "comparison.json"
    make_comparison().save(path)
    return path, lambda: cn.Comparison.load(path).to_dict()


def write_curve(folder):
    path = folder / "curve.json"
    Curve("macs", (CurvePoint("search", 0.5, make_comparison(), 1.5),), {"seed": 0}).save(path)
    return path, lambda: cn.Curve.load(path).to_dict()


def write_stability(folder):
    path = folder / "stability.json"
    cn.lossless(build(), (0.0, 1.0), inputs=torch.rand(3, 4), time_limit=5.0, record=path)
    return path, lambda: cn.Stability.load(path).to_dict()


def write_folder(name):
    def write(folder):
        inputs = torch.rand(3, 4)
        structure = cn.inspect(build(), inputs)
        plan, scores = draw_plan(structure, seed=1), make_scores(structure, np.linspace(0, 1, structure.unit_count))
        smaller = cn.prune(build(), plan, inputs)
        cn.save(smaller, folder / "smaller", plan=plan, scores=scores, comparison=make_comparison())

        def load():
            weights = [each.tolist() for each in cn.load(folder / "smaller", build).parameters()]
            results = read_results(folder / "smaller")
            documents = (results.plan, results.scores, results.comparison)
            return weights, [each and each.to_dict() for each in documents]

        return folder / "smaller" / name, load

    return write


def write_line(folder):
    path = folder / "table.jsonl"
    Store(folder).add(Cell("table", "fc3", {"seed": 0}), {"accuracy": 0.9})
    return path, lambda: [record.result for record in Store(folder).find_all("table")] or refuse()


def refuse():
    raise InvalidFileError("no result is left.")


def write_npz(folder):
    path = folder / "data.npz"
    np.savez_compressed(path, inputs=np.random.default_rng(0).random((6, 4)), labels=np.arange(6))
    return path, lambda: [each.tolist() for each in find_tensors(load_batch(str(path)))]


def write_tensors(folder):
    path = folder / "data.safetensors"
    save_file({"inputs": torch.rand(6, 4), "labels": torch.arange(6)}, path)
    return path, lambda: check_finite(find_tensors(load_batch(str(path))))


def check_finite(tensors):
    """A format without checksums: what is read need not be what was written, but it can be computed with."""
    assert all(each.isfinite().all() for each in tensors)


def write_weights(folder):
    path = folder / "weights.pt"
    torch.save(build().state_dict(), path)
    return path, lambda: [each.tolist() for each in load_model(f"{__name__}:build", path).parameters()]


def write_old_weights(folder):
    path = folder / "weights.pt"
    torch.save(build().state_dict(), path, _use_new_zipfile_serialization=False)
    return path, lambda: check_finite(load_model(f"{__name__}:build", path).parameters())


def write_weight_tensors(folder):
    path = folder / "weights.safetensors"
    save_file(build().state_dict(), path)
    return path, lambda: check_finite(load_model(f"{__name__}:build", path).parameters())


def write_onnx(folder):
    path, tensors = folder / "model.onnx", build().state_dict()
    weights = [onnx.numpy_helper.from_array(value.numpy(), name) for name, value in tensors.items()]
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "0.weight", "0.bias"], ["a"], transB=1),
        onnx.helper.make_node("Relu", ["a"], ["b"]),
        onnx.helper.make_node("Gemm", ["b", "2.weight", "2.bias"], ["y"], transB=1),
    ]
    ends = [onnx.helper.make_tensor_value_info(name, 1, ["batch", size]) for name, size in (("x", 4), ("y", 3))]
    graph = onnx.helper.make_graph(nodes, "model", ends[:1], ends[1:], weights)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), path)
    return path, lambda: check_finite(cn.from_onnx(path).parameters())


def write_training(folder):
    """The checkpoint of a training of the reproduction."""
    path = folder / "training.pt"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    inputs, labels = torch.rand(4, 1, 6, 6), torch.arange(4) % 2

    def train():
        decoupled = decouple(model, inputs, hidden=2)
        losses = train_parts(decoupled, inputs, labels, Recipe("sgd", 0.1, epochs=1, batch_size=4), checkpoint=path)
        return losses, [each.tolist() for part in decoupled.parts for each in part.network.state_dict().values()]

    train()
    return path, train


def write_pictures(folder):
    """What the reproduction keeps of a data set: anything damaged is read from the source again."""
    path, tensors = folder / "pictures.safetensors", {"train_images": torch.arange(12, dtype=torch.uint8)}
    save_file({**tensors, "digest": _digest(tensors)}, path)

    def load():
        found = _read_cache(path)
        return refuse() if found is None else {name: each.tolist() for name, each in found.items()}

    return path, load


WRITERS = {
    "plan": write_plan,
    "scores": write_scores,
    "comparison": write_comparison,
    "curve of a sweep": write_curve,
    "record of lossless": write_stability,
    "plan of a folder": write_folder("plan.json"),
    "scores of a folder": write_folder("scores.json"),
    "comparison of a folder": write_folder("comparison.json"),
    "provenance of a folder": write_folder("provenance.json"),
    "weights of a folder": write_folder("model.safetensors"),
    "results line": write_line,
    "npz": write_npz,
    "safetensors": write_tensors,
    "torch checkpoint": write_weights,
    "old torch checkpoint": write_old_weights,
    "weights as safetensors": write_weight_tensors,
    "onnx": write_onnx,
    "training": write_training,
    "pictures": write_pictures,
}
