import os
from dataclasses import replace

import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import InvalidSettingError
from critical_neurons.io.checkpoint import CARD

huggingface_hub = pytest.importorskip("huggingface_hub")
INPUTS = torch.rand(12, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3
HOSTILE = "<script>alert(1)</script>|`*\n---\nlicense: mit"


def build(first="first"):
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, layer in ((first, nn.Linear(6, 8)), ("relu", nn.ReLU()), ("last", nn.Linear(8, 3))):
        model.add_module(name, layer)
    return model.eval()


def compress(model):
    return cn.compress(model, INPUTS, LABELS, units=0.5, effort="quick", onnx=False)


@pytest.fixture(scope="module")
def found():
    return compress(build())


def save(folder, found, **options):
    cn.save(found.model, folder, plan=found.plan, **{"comparison": found.comparison, **options})
    return (folder / CARD).read_text()


def test_the_hub_reads_the_header(tmp_path, found):
    text = save(tmp_path / "out", found, base_model="someone/a-network_1.0")
    data = huggingface_hub.ModelCard(text).data
    assert data.base_model == "someone/a-network_1.0"
    assert data.library_name == "critical_neurons"
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", found.comparison.after.accuracy)
    assert "calibration" in result.metric_name  # the inputs had a part in making the network


def test_the_body_says_sizes_and_how_to_load(tmp_path, found):
    text = save(tmp_path / "out", found)
    assert f"| parameters | {found.comparison.before.parameters} | {found.comparison.after.parameters} |" in text
    assert "| first | 8 | 4 |" in text
    assert "cn.load(" in text
    assert huggingface_hub.ModelCard(text).data.base_model is None


def test_without_a_comparison_nothing_is_claimed_about_accuracy(tmp_path, found):
    text = save(tmp_path / "out", found, comparison=None)
    assert f"{4 * 7 + 3 * 5:,} of {8 * 7 + 3 * 9:,} parameters" in text
    assert "accuracy" not in text
    assert huggingface_hub.ModelCard(text).data.eval_results is None


def test_names_stay_text(tmp_path, found):
    text = save(tmp_path / "out", compress(build(HOSTILE)))
    assert "<script" not in text
    header, body = text.split("\n---\n", 1)
    assert "license" not in header
    assert "\n---\n" not in body
    row = next(line for line in body.splitlines() if "script" in line)
    assert row.count("|") == 4


def test_notes_stay_text(tmp_path, found):
    comparison = replace(found.comparison, notes=(HOSTILE,))
    assert "<script" not in save(tmp_path / "out", found, comparison=comparison)


@pytest.mark.parametrize("name", ["", "a/b/c", "a b", 'x"\nlicense: mit', "<script>", "ä/b", 3])
def test_other_names_of_base_models_are_refused(tmp_path, found, name):
    with pytest.raises(InvalidSettingError, match=r"base_model: found .* on the Hugging Face hub"):
        save(tmp_path / "out", found, base_model=name)
    assert os.listdir(tmp_path) == []


def test_what_is_no_comparison_is_refused(tmp_path, found):
    with pytest.raises(InvalidSettingError, match="comparison: found dict"):
        save(tmp_path / "out", found, comparison={})


@pytest.mark.parametrize("change", [lambda card: card.unlink(), lambda card: card.write_text("edited")])
def test_loading_does_not_look_at_it(tmp_path, found, change):
    save(tmp_path / "out", found)
    change(tmp_path / "out" / CARD)
    assert torch.equal(cn.load(tmp_path / "out", build)(INPUTS), found.model(INPUTS))
    cn.save(found.model, tmp_path / "out", plan=found.plan, overwrite=True)
