"""Models and inputs that make no structure: what is said then; and odd ones that do."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import critical_neurons as cn
from critical_neurons.errors import CriticalNeuronsError, InvalidInputError, InvalidSettingError, UnreadableModelError
from critical_neurons.structure import find_structure
from tests.structure.checks import inspect_twice, train_looks
from tests.structure.idioms import ROWS, Written


def build():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


class Remembering(nn.Module):
    """Gives all that it was ever given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.past = nn.Linear(4, 3), []

    def forward(self, x: Tensor) -> Tensor:
        self.past.append(self.linear(x))
        return torch.cat(self.past, 1)


class Counting(nn.Module):
    """Counts its calls in a buffer that its outputs do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.inner(x)
        self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y


class Caching(nn.Module):
    """Makes a buffer in its first run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(1), persistent=False)
        return self.inner(x) * self.scale


class Ending(nn.Module):
    """Runs twice, with other outputs, and then no more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = build(), 0
        self.register_buffer("scales", torch.tensor([1.0, 2.0]))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.last.fill_(self.calls)
        self.calls += 1
        return self.inner(x) * self.scales[self.calls - 1]


def test_a_buffer_made_in_the_first_run():
    assert len(find_structure(Caching().double(), ROWS).removable) == 1


def test_no_third_run():
    with pytest.raises(UnreadableModelError, match="it changes itself while it runs"):
        find_structure(Ending().double(), ROWS)


def test_not_a_module():
    with pytest.raises(UnreadableModelError, match=r"found function, expected a torch\.nn\.Module"):
        find_structure(lambda x: x, ROWS)


def test_it_does_not_run_on_the_inputs():
    with pytest.raises(
        InvalidInputError, match=r"does not run on \(2, 4\): mat1 and mat2 .*Give inputs as the model"
    ):
        find_structure(nn.Linear(5, 2).double(), ROWS)


def test_the_line_that_fails_is_named():
    model = Written(lambda m, x: x.view(3, 5), a=nn.Linear(4, 2))
    with pytest.raises(InvalidInputError, match=r"test_bad_input\.py:\d+"):
        find_structure(model, ROWS)


class Deep(nn.Module):
    """Its outputs grow with what an object of its own keeps, three references away."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.notes = nn.Linear(4, 3), SimpleNamespace()
        self.notes.by_name = {"seen": deque()}

    def forward(self, x: Tensor) -> Tensor:
        seen = self.notes.by_name["seen"]
        seen.append(len(x))
        return self.linear(x).repeat(1, len(seen))


class Numbering(nn.Module):
    """What it keeps cannot be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.numbers = nn.Linear(4, 3), itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).repeat(1, next(self.numbers))


@pytest.mark.parametrize("kind", [Remembering, Deep, Numbering])
def test_other_shapes_on_a_second_run(kind):
    with pytest.raises(UnreadableModelError, match="a second run on the same inputs gives outputs of other shapes"):
        find_structure(kind().double(), ROWS)


def test_how_often_a_model_is_run():
    """With labels; smaller and masked; and both again, with more units removed. Not again if it keeps nothing."""
    calls = []

    def run(model, x):
        calls.append(len(x))
        return model.b(model.a(x).relu())

    find_structure(Written(run, a=nn.Linear(4, 6), b=nn.Linear(6, 2)).double(), ROWS)
    assert calls == [2, 1, 1, 1, 1]


def test_no_tensor_among_the_outputs():
    with pytest.raises(UnreadableModelError, match="its outputs hold no tensor"):
        find_structure(Written(lambda m, x: float(m.a(x).sum()), a=nn.Linear(4, 2).double()), ROWS)


def test_no_rows():
    with pytest.raises(InvalidInputError, match="no rows"):
        find_structure(build().double(), ROWS[:0])


def test_meta_device():
    with torch.device("meta"):
        model = build()
    with pytest.raises(UnreadableModelError, match=r"0\.weight: on the meta device.*Load the weights first"):
        find_structure(model, ROWS)


def test_not_initialised():
    with pytest.raises(UnreadableModelError, match=r"weight: not initialised yet.*Run the model once"):
        find_structure(nn.LazyLinear(3), ROWS)


def test_scripted():
    with warnings.catch_warnings(action="ignore"):  # torch advises against TorchScript
        scripted = torch.jit.script(build())
    with pytest.raises(UnreadableModelError, match=r"a TorchScript module cannot be read.*Give the nn\.Module"):
        find_structure(scripted, ROWS)


def test_quantised():
    with warnings.catch_warnings(action="ignore"):  # and against its own way of quantising
        quantised = torch.ao.quantization.quantize_dynamic(build(), {nn.Linear})
    with pytest.raises(UnreadableModelError, match=r"0: a quantised module cannot be read.*as it was before"):
        find_structure(quantised, ROWS.float())


def test_compiled():
    """The wrapper is taken off."""
    assert find_structure(torch.compile(build().double()), ROWS).unit_count == 6


@pytest.mark.slow
def test_compiled_inside_or_in_place():
    inner = Written(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 6), b=torch.compile(nn.Linear(6, 2), backend="eager"))
    assert find_structure(inner.double(), ROWS).unit_count == 6
    model = build().double()
    model.compile(backend="eager")
    assert find_structure(model, ROWS).unit_count == 6


def test_compiled_forward():
    model = build().double()
    model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(UnreadableModelError, match=r"model: its forward was replaced by a compiled one"):
        find_structure(model, ROWS)


def test_data_parallel():
    assert find_structure(nn.DataParallel(build().double()), ROWS).unit_count == 6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(value):
    model = build().double()
    with torch.no_grad():
        model[2].weight[0, 3] = value
    with pytest.raises(InvalidInputError, match=r"2\.weight: the model has NaN or infinite weights"):
        find_structure(model, ROWS)


def test_unknown_layer_to_ignore():
    with pytest.raises(InvalidSettingError, match=r"ignore: no layer is called first\. Layers: 0, 2"):
        find_structure(build().double(), ROWS, ignore=["first"])


def test_ignored_layers_stay():
    structure = find_structure(build().double(), ROWS, ignore=["0"])
    assert structure.unit_count == 0
    assert structure.layers[0].reason == "ignored, as asked"


def test_activations_kept_as_attributes():
    """Results of an earlier run are copied without their history. What cannot be copied at all is named."""
    model = build().double()
    model.seen = [model(ROWS)]
    assert find_structure(model, ROWS).unit_count == 6
    assert model.seen[0].grad_fn is not None
    model.lock = threading.Lock()
    with pytest.raises(UnreadableModelError, match=r"it cannot be copied.*lock.*attributes"):
        find_structure(model, ROWS)


def test_buffers_that_change_while_running():
    """Only those of the copy do."""
    model = train_looks(Counting())
    with torch.no_grad():
        model.calls.zero_()
    assert inspect_twice(model, ROWS).unit_count == 6
    assert model.calls == 0


class Drifting(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.calls


def test_buffers_written_to_unnoticed_by_autograd():
    def run(model, x):
        model.scale.data.mul_(2.0)
        return model.b(model.a(x)) * model.scale

    model = Written(run, a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    model.register_buffer("scale", torch.ones(1))
    with pytest.raises(UnreadableModelError, match=r"Written: it changes itself while it runs \(scale\)"):
        find_structure(model.double(), ROWS)


def test_outputs_that_change_with_buffers():
    with pytest.raises(UnreadableModelError, match=r"Drifting: it changes itself while it runs \(calls, mean\)"):
        find_structure(Drifting().double(), ROWS)


def test_exported():
    exported = torch.export.export(build(), (ROWS.float(),)).module()
    with pytest.raises(UnreadableModelError, match=r"a program of torch\.export .*Give the nn\.Module"):
        find_structure(exported, ROWS.float())


def make_meta():
    return build().to("meta")


def make_quantised():
    return torch.ao.quantization.quantize_dynamic(build(), {nn.Linear})


def make_scripted():
    return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.ReLU())), nn.Linear(6, 2))


VERBS = {
    "search": lambda model, inputs: cn.search(model, inputs, units=0.5, effort="quick"),
    "compress": lambda model, inputs: cn.compress(model, inputs, LABELS, units=0.5, effort="quick", onnx=False),
    "score": lambda model, inputs: cn.score(model, inputs, LABELS, formulation="linearised"),
}
LABELS = [0, 1] * 4
REFUSED = {
    "meta": (make_meta, "on the meta device.*Load the weights first"),
    "quantised": (make_quantised, "a quantised module.*as it was before"),
    "scripted inside": (make_scripted, "0: a TorchScript module.*Give the nn.Module"),
    "other inputs": (lambda: nn.Linear(5, 2), "does not run on.*Give inputs as the model takes them"),
    "remembering": (Remembering, "a second run on the same inputs gives outputs of other shapes"),
    "drifting": (Drifting, "it changes itself while it runs|gives other logits than the model"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("case", REFUSED)
def test_every_verb_says_so(case, verb):
    make, said = REFUSED[case]
    with pytest.raises(CriticalNeuronsError, match=said):
        VERBS[verb](make(), torch.rand(8, 4))


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_changes_buffers(verb):
    model = Counting()
    VERBS[verb](model, torch.rand(8, 4))
    assert model.calls == 0
    assert not model.mean.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounder_types(dtype):
    structure = find_structure(build().to(dtype), ROWS.to(dtype))
    assert structure.unit_count == 6


def test_types_changed_inside():
    """In double precision such a forward does not run; it is tried as it is."""
    model = Written(lambda m, x: m.b(m.a(x.float()).float()), a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    assert find_structure(model, ROWS.float()).unit_count == 6


def test_autocast_inside():
    def run(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.b(model.a(x).relu())

    model = Written(run, a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    assert find_structure(model, ROWS.float()).unit_count == 6


def test_channels_last():
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1))
    model = train_looks(model).to(memory_format=torch.channels_last)
    images = torch.rand(2, 2, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert inspect_twice(model, images).unit_count == 6


def test_rows_that_belong_together():
    """Nodes of a graph and the matrix of its edges: two of them alone do not run."""
    nodes, edges = torch.rand(5, 4, dtype=torch.float64), torch.rand(5, 5, dtype=torch.float64)
    model = Written(lambda m, x, edges: m.b(edges @ m.a(x).relu()), a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    assert inspect_twice(train_looks(model), (nodes, edges)).unit_count == 6


def test_tensors_in_any_nesting():
    """Texts one behind the other with offsets beside them, and a mapping of options that are no tensors."""

    def run(model, tokens, more):
        bags = model.words(tokens, more["offsets"][0])
        return model.out(bags.relu() if more["rectified"] else bags)

    tokens, offsets = torch.randint(9, (7,), generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3])
    model = train_looks(Written(run, words=nn.EmbeddingBag(9, 6), out=nn.Linear(6, 2)))
    assert inspect_twice(model, (tokens, {"offsets": [offsets], "rectified": True})).unit_count == 6


def test_large_images_are_cut():
    """Unless the forward knows how large they are."""
    images = torch.rand(2, 1, 100, 100, dtype=torch.float64)
    layers = [nn.Conv2d(1, 4, 5, stride=5), nn.ReLU(), nn.Conv2d(4, 2, 5, stride=5), nn.ReLU()]
    free = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    fixed = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * 4 * 4, 3))
    for model in (free, fixed):
        assert inspect_twice(train_looks(model), images).unit_count == 6


def test_a_mistake_that_only_some_counts_show():
    """Two layers that must lose as many each, which no label says: the trial finds out."""

    def run(model, x):
        one, other = model.a(x), model.c(x)
        return model.b(one[:, : other.shape[1]]) + model.d(other[:, : one.shape[1]])

    parts = {"a": nn.Linear(4, 6), "c": nn.Linear(4, 6), "b": nn.Linear(6, 2), "d": nn.Linear(6, 2)}
    structure = inspect_twice(train_looks(Written(run, **parts)), ROWS)
    assert structure.unit_count in (0, 6)


def test_a_mistake_that_only_the_full_width_shows():
    """Smaller models agree with each other, not with the given one."""

    def run(model, x):
        x = model.a(x)
        return model.b(2 * x if x.shape[1] == 12 else x)

    structure = find_structure(train_looks(Written(run, a=nn.Linear(4, 12), b=nn.Linear(12, 2))), ROWS)
    assert structure.unit_count == 0
    assert "the smaller model gives other outputs" in structure.layers[0].reason


def test_constants_without_a_bias_removed_twice():
    """The first removal adds a bias to the reader, and the second one has to slice it."""

    def run(model, x):
        return model.c(model.b(model.a(x).sigmoid()).relu())

    parts = {"a": nn.Linear(4, 12), "b": nn.Linear(12, 12, bias=False), "c": nn.Linear(12, 2)}
    assert inspect_twice(train_looks(Written(run, **parts)), ROWS).unit_count == 24
