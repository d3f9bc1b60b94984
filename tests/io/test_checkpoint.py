import hashlib
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import (
    InvalidFileError,
    InvalidInputError,
    InvalidSettingError,
    OutputError,
    PlanMismatchError,
)
from critical_neurons.io.checkpoint import FILES, MODEL, PLAN, PROVENANCE, digest_content

INPUTS = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))


def build(hidden=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 3)).eval()


@pytest.fixture(scope="module")
def plan():
    return cn.plan(cn.score(build(), INPUTS, threads=1, formulation="linearised"), units=0.5)


@pytest.fixture
def smaller(plan):
    return cn.prune(build(), plan, INPUTS)


@pytest.fixture
def saved(smaller, plan, tmp_path):
    cn.save(smaller, tmp_path / "out", plan=plan)
    return tmp_path / "out"


def forge(folder, **changes):
    """Change the provenance and make its digest fit: what only somebody who means to can do."""
    content = json.loads((folder / PROVENANCE).read_bytes())
    del content["digest"]
    content |= changes
    content["digest"] = digest_content(content)
    (folder / PROVENANCE).write_text(json.dumps(content))


def replace_tensors(folder, tensors):
    data = save(tensors)
    (folder / MODEL).write_bytes(data)
    sums = json.loads((folder / PROVENANCE).read_bytes())["sha256"]
    forge(folder, sha256={**sums, MODEL: hashlib.sha256(data).hexdigest()})


def run(model, inputs=INPUTS):
    with torch.no_grad():
        return model(inputs)


class TestSave:
    def test_what_is_written(self, saved, smaller, plan):
        assert sorted(os.listdir(saved)) == sorted(FILES)
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
        assert all((saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in FILES)

    def test_an_existing_folder_is_replaced_on_request_alone(self, saved, smaller, plan):
        before = (saved / MODEL).read_bytes()
        with torch.no_grad():
            smaller[0].bias += 1
        with pytest.raises(OutputError, match="overwrite=True"):
            cn.save(smaller, saved, plan=plan)
        assert (saved / MODEL).read_bytes() == before
        cn.save(smaller, saved, plan=plan, overwrite=True)
        assert torch.equal(run(cn.load(saved, build)), run(smaller))

    def test_a_full_disk_leaves_nothing(self, smaller, plan, tmp_path, monkeypatch):
        def fail(_descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OutputError, match="No space left on device"):
            cn.save(smaller, tmp_path / "out", plan=plan)
        assert os.listdir(tmp_path) == []

    def test_a_plan_the_model_was_not_pruned_by(self, plan, tmp_path):
        for model in (build(), cn.mask(build(), plan)):
            with pytest.raises(PlanMismatchError, match=r"0: the plan keeps 4 units of it, the model has 8\."):
                cn.save(model, tmp_path / "out", plan=plan)
        with pytest.raises(PlanMismatchError, match="the model has no"):
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
            assert torch.equal(run(loaded), run(smaller))
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
        again = cn.plan(cn.score(loaded, INPUTS, threads=1, formulation="linearised"), units=0.5)
        smallest = cn.prune(loaded, again, INPUTS)
        cn.save(smallest, tmp_path / "again", plan=again)
        assert torch.equal(run(cn.load(tmp_path / "again", loaded)), run(smallest))

    def test_a_depthwise_convolution_that_loses_inputs_or_outputs(self, tmp_path):
        """Four channels of one input channel each: two groups of two, or four of one? The shapes do not tell."""

        def factory():
            torch.manual_seed(0)
            return nn.Sequential(
                *(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1, groups=4), nn.ReLU()),
                *(nn.Flatten(), nn.Linear(8, 2)),
            ).eval()

        images = torch.rand(4, 1, 1, 1)
        plan = cn.plan(cn.score(factory(), images, threads=1, formulation="linearised"), units=0.5)
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
        plan = cn.plan(cn.score(model, INPUTS, threads=1, formulation="linearised"), units=0.5)
        smaller = cn.prune(model, plan, INPUTS)
        cn.save(smaller, tmp_path / "out", plan=plan)
        loaded = cn.load(tmp_path / "out", Aliased)
        for each in (smaller, loaded):
            assert each.alias is each.hidden
            assert each.alias.weight.shape == (4, 6)
            assert each.one.weight is each.other.weight
            assert each.one.bias is not each.other.bias
        assert torch.equal(run(loaded), run(smaller))


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
        plan = cn.plan(cn.score(model, INPUTS, threads=1, formulation="linearised"), units=0.5)
        cn.save(cn.prune(model, plan, INPUTS), tmp_path / "other", plan=plan)
        for name in (MODEL, PLAN):
            original = (saved / name).read_bytes()
            (saved / name).write_bytes((tmp_path / "other" / name).read_bytes())
            self.refuse(saved, f"{name}: damaged, or changed after it was saved")
            (saved / name).write_bytes(original)
        cn.load(saved, build)

    def test_a_later_format(self, saved):
        forge(saved, version=2)
        self.refuse(saved, "format version 2; this release reads version 1")

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
        "sizes",
        [
            {"in_features": 6, "out_features": 10**12},
            {"in_features": 6, "out_features": 0},
            {"in_features": 6},
            {"in_features": 6, "out_features": 4, "training": 1},
            {"in_channels": 6, "out_channels": 4, "groups": 1},
        ],
    )
    def test_forged_sizes(self, saved, sizes):
        forge(saved, sizes={**json.loads((saved / PROVENANCE).read_bytes())["sizes"], "0": sizes})
        self.refuse(saved, r"provenance\.json: 0 cannot have the sizes")

    @pytest.mark.parametrize("sizes", [{"0": {"in_features": 6.0, "out_features": 4}}, {"0": 3}, [], {}])
    def test_sizes_of_another_kind(self, saved, sizes):
        forge(saved, sizes=sizes)
        self.refuse(saved, r"provenance\.json: ")

    @pytest.mark.parametrize("shared", [[["0.weight", "3.weight"]], [["0.weight", "gone"]], [[3]], 3])
    def test_forged_sharing(self, saved, shared):
        forge(saved, shared=shared)
        self.refuse(saved, r"provenance\.json: ")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: {**t, "more": torch.zeros(1)}, "more is unexpected"),
            (lambda t: {name: t[name] for name in list(t)[1:]}, "is missing"),
            (lambda t: {**t, "0.weight": torch.zeros(5, 6)}, r"0\.weight is torch\.float32 \(5, 6\) in place of"),
            (lambda t: {**t, "1.num_batches_tracked": torch.zeros(())}, "num_batches_tracked is torch.float32"),
            (lambda t: {**t, "0.weight": t["0.weight"].half()}, r"0\.weight is torch\.float16"),
        ],
    )
    def test_forged_tensors(self, saved, change, message):
        replace_tensors(saved, change(load_file(saved / MODEL)))
        self.refuse(saved, rf"model\.safetensors: does not fit the network: .*{message}")

    def test_no_safetensors_at_all(self, saved):
        data = np.random.default_rng(0).bytes(100)
        (saved / MODEL).write_bytes(data)
        sums = json.loads((saved / PROVENANCE).read_bytes())["sha256"]
        forge(saved, sha256={**sums, MODEL: hashlib.sha256(data).hexdigest()})
        self.refuse(saved, r"model\.safetensors: cannot be read as safetensors")


def test_exports_are_told_by_their_ending(tmp_path):
    with pytest.raises(InvalidSettingError, match=r"model\.h5: its ending says the format\. Accepted: \.onnx, \.pt2"):
        cn.export(build(), tmp_path / "model.h5", INPUTS)
