import hashlib
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

import critical_neurons as cn
from critical_neurons.core.structure import SIZE
from critical_neurons.errors import (
    InvalidFileError,
    InvalidInputError,
    InvalidSettingError,
    OutputError,
    PlanMismatchError,
)
from critical_neurons.io.checkpoint import CARD, FILES, MODEL, PLAN, PROVENANCE
from tests.any_models import build_any, halve, make_inputs, run
from tests.forging import forge

INPUTS = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))


def build(hidden=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 3)).eval()


@pytest.fixture(scope="module")
def plan():
    return cn.plan(cn.score(build(), INPUTS, formulation="linearised", solver=cn.Solver(threads=1)), units=0.5)


@pytest.fixture
def smaller(plan):
    return cn.prune(build(), plan, INPUTS)


@pytest.fixture
def saved(smaller, plan, tmp_path):
    cn.save(smaller, tmp_path / "out", plan=plan)
    return tmp_path / "out"


def forge_provenance(folder, **changes):
    path = folder / PROVENANCE
    path.write_text(forge(path.read_text(), lambda data: data.update(changes)))


def replace_tensors(folder, tensors):
    data = save(tensors)
    (folder / MODEL).write_bytes(data)
    sums = json.loads((folder / PROVENANCE).read_bytes())["sha256"]
    forge_provenance(folder, sha256={**sums, MODEL: hashlib.sha256(data).hexdigest()})


class TestSave:
    def test_what_is_written(self, saved, smaller, plan):
        assert sorted(os.listdir(saved)) == sorted([*FILES, CARD])
        assert load_file(saved / MODEL).keys() == smaller.state_dict().keys()
        assert cn.Plan.load(saved / PLAN).to_dict() == plan.to_dict()
        provenance = json.loads((saved / PROVENANCE).read_bytes())
        assert provenance["scores"] == json.loads(json.dumps(plan.provenance))
        assert provenance["scores"]["status"] == "optimal"
        assert provenance["source"] == vars(cn.inspect(build(), INPUTS).fingerprint)
        assert provenance["rule"] == plan.rule
        assert provenance["versions"].keys() == {"python", "critical_neurons", "torch", "safetensors"}
        for name in (MODEL, PLAN):
            assert provenance["sha256"][name] == hashlib.sha256((saved / name).read_bytes()).hexdigest()

    def test_the_same_again_is_the_same_bytes(self, saved, smaller, plan, tmp_path):
        cn.save(smaller, tmp_path / "again", plan=plan)
        assert all((saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in (*FILES, CARD))

    def test_an_existing_folder_is_replaced_on_request_alone(self, saved, smaller, plan):
        before = (saved / MODEL).read_bytes()
        with torch.no_grad():
            smaller[0].bias += 1
        with pytest.raises(OutputError, match="overwrite=True"):
            cn.save(smaller, saved, plan=plan)
        assert (saved / MODEL).read_bytes() == before
        cn.save(smaller, saved, plan=plan, overwrite=True)
        assert torch.equal(run(cn.load(saved, build), INPUTS), run(smaller, INPUTS))

    def test_a_full_disk_leaves_nothing(self, smaller, plan, tmp_path, monkeypatch):
        def fail(_descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OutputError, match="No space left on device"):
            cn.save(smaller, tmp_path / "out", plan=plan)
        assert os.listdir(tmp_path) == []

    def test_a_plan_the_model_was_not_pruned_by(self, plan, tmp_path):
        for model in (build(), cn.mask(build(), plan)):
            with pytest.raises(
                PlanMismatchError, match=r"0\.weight: the plan keeps 4 of its 8 channels, the model has 8\."
            ):
                cn.save(model, tmp_path / "out", plan=plan)
        with pytest.raises(PlanMismatchError, match=r"0\.weight: .*, the model has no such\."):
            cn.save(nn.Sequential(), tmp_path / "out", plan=plan)
        assert os.listdir(tmp_path) == []

    def test_state_that_is_no_tensor(self, smaller, plan, tmp_path):
        class Stateful(nn.Identity):
            def get_extra_state(self):
                return {"steps": 3}

        smaller[2] = Stateful()
        with pytest.raises(InvalidInputError, match=r"2\._extra_state: the model keeps state that is no tensor"):
            cn.save(smaller, tmp_path / "out", plan=plan)


class TestLoad:
    def test_from_a_function_a_class_or_a_model(self, saved, smaller):
        model = build(hidden=8).train()
        for factory in (build, model, lambda: nn.DataParallel(build())):
            loaded = cn.load(saved, factory)
            assert torch.equal(run(loaded, INPUTS), run(smaller, INPUTS))
            assert not any(module.training for module in loaded.modules())
            assert repr(loaded) == repr(smaller)
        assert model.training
        assert model[0].out_features == 8

    def test_the_type_is_that_of_the_file(self, smaller, plan, tmp_path):
        cn.save(smaller.double(), tmp_path / "out", plan=plan)
        loaded = cn.load(tmp_path / "out", build)
        assert loaded[0].weight.dtype == torch.float64
        assert loaded[1].num_batches_tracked.dtype == torch.int64
        assert torch.equal(run(loaded, INPUTS.double()), run(smaller, INPUTS.double()))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_in_part(self, smaller, plan, dtype, tmp_path):
        """As mixed precision leaves a model: the norms are not converted."""
        smaller[0].to(dtype)
        smaller[3].to(dtype)
        cn.save(smaller, tmp_path / "out", plan=plan)
        loaded = cn.load(tmp_path / "out", build)
        assert [values.dtype for values in loaded.parameters()] == [values.dtype for values in smaller.parameters()]
        assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), smaller.parameters(), strict=True))

    def test_it_trains(self, saved):
        def factory():
            model = build()
            model[0].weight.requires_grad_(False)
            return model

        loaded = cn.load(saved, factory).train()
        loaded(INPUTS).sum().backward()
        assert loaded[0].weight.grad is None
        assert loaded[3].weight.grad is not None

    def test_it_can_be_pruned_and_saved_again(self, saved, tmp_path):
        loaded = cn.load(saved, build)
        again = cn.plan(cn.score(loaded, INPUTS, formulation="linearised", solver=cn.Solver(threads=1)), units=0.5)
        smallest = cn.prune(loaded, again, INPUTS)
        cn.save(smallest, tmp_path / "again", plan=again)
        assert torch.equal(run(cn.load(tmp_path / "again", loaded), INPUTS), run(smallest, INPUTS))

    def test_a_depthwise_convolution_that_loses_inputs_or_outputs(self, tmp_path):
        """Four channels of one input channel each: two groups of two, or four of one? The shapes do not tell."""

        def factory():
            torch.manual_seed(0)
            return nn.Sequential(
                *(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1, groups=4), nn.ReLU()),
                *(nn.Flatten(), nn.Linear(8, 2)),
            ).eval()

        images = torch.rand(4, 1, 1, 1)
        plan = cn.plan(cn.score(factory(), images, formulation="linearised", solver=cn.Solver(threads=1)), units=0.5)
        smaller = cn.prune(factory(), plan, images)
        cn.save(smaller, tmp_path / "out", plan=plan)
        loaded = cn.load(tmp_path / "out", factory)
        assert loaded[2].groups == smaller[2].groups
        assert torch.equal(run(loaded, images), run(smaller, images))

    def test_what_has_several_names_stays_one(self, tmp_path):
        class Aliased(nn.Module):
            """A layer under two names, and two that are not called and share a weight."""

            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
                self.alias = self.hidden
                self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
                self.other.weight = self.one.weight

            def forward(self, x):
                return self.head(torch.relu(self.hidden(x)))

        model = Aliased().eval()
        plan = cn.plan(cn.score(model, INPUTS, formulation="linearised", solver=cn.Solver(threads=1)), units=0.5)
        smaller = cn.prune(model, plan, INPUTS)
        cn.save(smaller, tmp_path / "out", plan=plan)
        loaded = cn.load(tmp_path / "out", Aliased)
        for each in (smaller, loaded):
            assert each.alias is each.hidden
            assert each.alias.weight.shape == (4, 6)
            assert each.one.weight is each.other.weight
            assert each.one.bias is not each.other.bias
        assert torch.equal(run(loaded, INPUTS), run(smaller, INPUTS))


class TestAnything:
    def save_and_load(self, name, tmp_path, folder="out", **settings):
        model, inputs = build_any(name), make_inputs(name)
        plan = halve(model, inputs)
        smaller = cn.prune(model, plan, inputs, **settings)
        cn.save(smaller, tmp_path / folder, plan=plan)
        return smaller, cn.load(tmp_path / folder, lambda: build_any(name, seed=7))

    def test_tied_tensors_stay_tied(self, tmp_path):
        for each in self.save_and_load("tied", tmp_path):
            assert each.head.weight is each.look_up.weight
            assert each.alias is each.hidden
            assert each.look_up.weight.shape == (12, 4)
            assert each.look_up.embedding_dim == each.head.in_features == 4

    def test_a_weight_that_is_no_longer_shared(self, tmp_path):
        model, inputs = build_any("tied"), make_inputs("tied")
        plan = halve(model, inputs)
        smaller = cn.prune(model, plan, inputs)
        smaller.head.weight = nn.Parameter(2 * smaller.head.weight.detach())
        cn.save(smaller, tmp_path / "out", plan=plan)
        loaded = cn.load(tmp_path / "out", lambda: build_any("tied"))
        assert torch.equal(loaded.head.weight, 2 * loaded.look_up.weight)
        assert torch.equal(run(loaded, inputs), run(smaller, inputs))

    def test_sizes_beside_the_tensors(self, tmp_path):
        for each in self.save_and_load("u-net", tmp_path):
            assert (each.deep[1].num_groups, each.deep[1].num_channels) == (3, 6)
            assert (each.down[1].num_features, each.down[2].num_parameters) == (4, 4)
            assert (each.up.in_channels, each.up.out_channels) == (6, 4)
        for each in self.save_and_load("grouped", tmp_path, folder="again"):
            assert [each.body[at].groups for at in (3, 6, 8)] == [4, 2, 2]
            assert (each.body[1].num_features, each.body[8].in_channels, each.body[8].out_channels) == (4, 6, 4)

    def test_a_bias_that_removal_adds(self, tmp_path):
        for each in self.save_and_load("regression", tmp_path):
            assert each.layers[3].bias.shape == (1,)
            assert each.layers[3].bias.requires_grad

    def test_a_bias_that_refitting_adds(self, tmp_path):
        pair = self.save_and_load("u-net", tmp_path, compensate="least_squares")
        assert torch.equal(pair[0].up.bias, pair[1].up.bias)
        assert len(pair[1].up.bias) == pair[1].up.out_channels == 4

    def test_buffers_that_are_not_saved(self, tmp_path):
        smaller, loaded = self.save_and_load("raw parameters", tmp_path)
        assert torch.equal(loaded.shift, smaller.shift)
        assert loaded.shift.shape == (4,)

    def test_a_recurrent_layer_computes_with_its_own_weights(self, tmp_path):
        for each in self.save_and_load("recurrent", tmp_path):
            with torch.no_grad():
                each.body.weight_ih_l0.zero_()
                each.body.bias_ih_l0.zero_()
                each.body.bias_hh_l0.zero_()
            assert not run(each, make_inputs("recurrent"))[1].any()

    def test_a_plan_of_raw_parameters_the_model_was_not_pruned_by(self, tmp_path):
        model, inputs = build_any("raw parameters"), make_inputs("raw parameters")
        with pytest.raises(PlanMismatchError, match="first: the plan keeps 4 of its 8 channels, the model has 8"):
            cn.save(model, tmp_path / "out", plan=halve(model, inputs))


class TestRefusals:
    def refuse(self, folder, match, factory=build, error=InvalidFileError):
        with pytest.raises(error, match=match):
            cn.load(folder, factory)

    @pytest.mark.parametrize("name", FILES)
    def test_a_flipped_byte(self, saved, name):
        data = bytearray((saved / name).read_bytes())
        data[len(data) // 2] ^= 1
        (saved / name).write_bytes(bytes(data))
        self.refuse(saved, rf"{name}: (damaged|not a)")

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("share", [0, 0.5, 0.99])
    def test_a_truncated_file(self, saved, name, share):
        data = (saved / name).read_bytes()
        (saved / name).write_bytes(data[: int(share * len(data))])
        self.refuse(saved, rf"{name}: (damaged|not a)")

    @pytest.mark.parametrize("name", FILES)
    def test_a_missing_file(self, saved, name):
        (saved / name).unlink()
        self.refuse(saved, rf"out: no {name} there\. Accepted: a folder that cn\.save wrote")

    def test_a_missing_folder(self, tmp_path):
        self.refuse(tmp_path / "gone", "gone: no model.safetensors and no plan.json")

    def test_files_of_two_saves(self, saved, tmp_path):
        model = build()
        with torch.no_grad():
            model[0].weight.neg_()
        plan = cn.plan(cn.score(model, INPUTS, formulation="linearised", solver=cn.Solver(threads=1)), units=0.5)
        cn.save(cn.prune(model, plan, INPUTS), tmp_path / "other", plan=plan)
        for name in (MODEL, PLAN):
            original = (saved / name).read_bytes()
            (saved / name).write_bytes((tmp_path / "other" / name).read_bytes())
            self.refuse(saved, f"{name}: damaged, or changed after it was saved")
            (saved / name).write_bytes(original)
        cn.load(saved, build)

    def test_a_later_format(self, saved):
        forge_provenance(saved, version=3)
        self.refuse(saved, "format version 3, of another release; this one reads version 2")

    def test_another_network(self, saved):
        self.refuse(saved, "the factory makes another network", lambda: build(7), PlanMismatchError)
        self.refuse(saved, "the factory makes another network", lambda: cn.load(saved, build), PlanMismatchError)

    @pytest.mark.parametrize("factory", [None, 3, lambda: "model", dict])
    def test_no_factory(self, saved, factory):
        self.refuse(saved, r"factory: found .*\. Accepted: a torch\.nn\.Module", factory, InvalidSettingError)

    def test_a_factory_of_lazy_layers(self, saved):
        lazy = nn.Sequential(nn.LazyLinear(8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.refuse(saved, r"0\.weight: not initialised yet", lazy, InvalidInputError)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda each: each.update(tensor="gone.weight"), r"it slices gone\.weight in another way"),
            (lambda each: each.update(tensor="0.training"), r"it slices 0\.training in another way"),
            (lambda each: each.update(axis=5), r"it slices 0\.weight in another way"),
            (lambda each: each.update(axis=SIZE), r"it slices 0\.weight in another way"),
            (lambda each: each.update(units=[[0, 1, 7]]), r"it slices 0\.weight in another way"),
            (lambda each: each.update(units=[[[0, 1, 8]]] * 3), r"it slices 0\.weight in another way"),
        ],
    )
    def test_forged_slices(self, saved, change, message):
        self.forge_plan(saved, lambda plan: change(plan["structure"]["slices"][0]))
        self.refuse(saved, rf"plan\.json: {message}")

    def test_forged_wirings(self, saved):
        """A constant that would go to a module that is not there."""

        def change(plan):
            plan["structure"]["wirings"][-1].update(module="gone", constants=[1.0] * 8)

        self.forge_plan(saved, change)
        self.refuse(saved, r"plan\.json: does not fit this network")

    def forge_plan(self, folder, change):
        data = forge((folder / PLAN).read_text(), change).encode()
        (folder / PLAN).write_bytes(data)
        sums = json.loads((folder / PROVENANCE).read_bytes())["sha256"]
        forge_provenance(folder, sha256={**sums, PLAN: hashlib.sha256(data).hexdigest()})

    @pytest.mark.parametrize("shared", [[["0.weight", "3.weight"]], [["0.weight", "gone"]], [[3]], 3])
    def test_forged_sharing(self, saved, shared):
        forge_provenance(saved, shared=shared)
        self.refuse(saved, r"provenance\.json: ")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: {**t, "more": torch.zeros(1)}, "more is unexpected"),
            (lambda t: {name: t[name] for name in list(t)[1:]}, "is missing"),
            (lambda t: {**t, "0.weight": torch.zeros(5, 6)}, r"0\.weight is torch\.float32 \(5, 6\) in place of"),
            (lambda t: {**t, "1.num_batches_tracked": torch.zeros(())}, "num_batches_tracked is torch.float32"),
            (lambda t: {**t, "0.weight": t["0.weight"].int()}, r"0\.weight is torch\.int32"),
        ],
    )
    def test_forged_tensors(self, saved, change, message):
        replace_tensors(saved, change(load_file(saved / MODEL)))
        self.refuse(saved, rf"model\.safetensors: does not fit the network: .*{message}")

    def test_no_safetensors_at_all(self, saved):
        data = np.random.default_rng(0).bytes(100)
        (saved / MODEL).write_bytes(data)
        sums = json.loads((saved / PROVENANCE).read_bytes())["sha256"]
        forge_provenance(saved, sha256={**sums, MODEL: hashlib.sha256(data).hexdigest()})
        self.refuse(saved, r"model\.safetensors: cannot be read as safetensors")


def test_exports_are_recognised_by_their_ending(tmp_path):
    with pytest.raises(InvalidSettingError, match=r"model\.h5: its ending says the format\. Accepted: \.onnx, \.pt2"):
        cn.export(build(), tmp_path / "model.h5", INPUTS)


class Joined(nn.Module):
    """Two layers of three channels beside each other, read by a convolution of two groups."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1)
        self.branch, self.grouped, self.last = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 4, 1, groups=2), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        joined = torch.cat([self.one(x), self.other(x)], 1).relu()
        return self.last(self.grouped(joined + self.branch(joined)).relu())


def test_a_layer_may_be_one_block_of_its_group(tmp_path):
    inputs = torch.rand(8, 2, 3, 3)
    plan = cn.plan(cn.search(Joined(), inputs, units=0.5, effort="quick"))
    smaller = cn.prune(Joined(), plan, inputs)
    cn.save(smaller, tmp_path / "smaller", plan=plan)
    assert torch.equal(cn.load(tmp_path / "smaller", Joined)(inputs), smaller(inputs))
