"""From a compressed network to its page."""

import json
import re
from base64 import b64decode

import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import InvalidInputError, InvalidSettingError, OutputError


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)).eval()
    inputs = torch.rand(40, 1, 6, 6)
    return cn.compress(
        model, inputs, torch.arange(40) % 4, units=0.3, effort="quick", compensate="none", seed=3, onnx=False
    )


def read(path):
    """The data inside a page."""
    link = re.search(r'href="data:application/json;base64,([^"]+)"', path.read_text(encoding="utf-8"))
    return json.loads(b64decode(link[1]))


def test_all_that_compress_found(found, tmp_path):
    found.report(tmp_path / "report.html", class_names=["a", "b", "c", "d"])
    data = read(tmp_path / "report.html")
    assert data["call"] == (
        "cn.compress(model, inputs, labels, units=0.3, compensate='none', effort='quick', seed=3, onnx=False)"
    )
    changed = [each.row for each in found.comparison.answers.changes]
    assert changed
    assert [each["row"] for each in data["answered"]["changes"]] == changed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('src="data:image/png') == len(changed)
    found.report(tmp_path / "again.html", class_names=["a", "b", "c", "d"])
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_answers_agree_with_the_accuracies(found):
    answers, comparison = found.comparison.answers, found.comparison
    assert len(answers.changes) == round((1 - comparison.agreement) * comparison.inputs)
    for which in ("before", "after"):
        right = sum(getattr(each, which) for each in answers.classes)
        assert right == round(getattr(comparison, which).accuracy * comparison.inputs)


def test_inputs_that_are_no_images(found, tmp_path):
    cn.report(tmp_path / "report.html", comparison=found.comparison, inputs=torch.rand(40, 36))
    assert "data:image/png" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_large_images_become_small(found, tmp_path):
    cn.report(tmp_path / "report.html", comparison=found.comparison, inputs=torch.rand(40, 3, 200, 150))
    first = re.search(r'src="data:image/png;base64,([^"]+)"', (tmp_path / "report.html").read_text(encoding="utf-8"))
    header = b64decode(first[1])[16:24]
    assert (int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")) == (37, 50)


def test_pictures_show_what_the_inputs_are(tmp_path):
    image = pytest.importorskip("PIL.Image")
    import io

    import numpy as np

    from critical_neurons.reports.pictures import draw_pictures

    levels = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 7))
    levels[0, 0, 0, :2] = 0, 255
    for each, picture in zip(levels, draw_pictures(levels / 40 - 3), strict=True):
        read_back = np.asarray(image.open(io.BytesIO(b64decode(picture.partition(",")[2]))))
        assert np.array_equal(read_back.transpose(2, 0, 1), each)


def test_bad_input(found, tmp_path):
    path = tmp_path / "report.html"
    with pytest.raises(InvalidSettingError, match="plan: found Scores"):
        cn.report(path, plan=found.scores)
    with pytest.raises(InvalidSettingError, match="nothing to report"):
        cn.report(path)
    with pytest.raises(InvalidSettingError, match="class_names: found one text"):
        found.report(path, class_names="abcd")
    with pytest.raises(InvalidInputError, match="inputs: found 3, the comparison was made on 40"):
        cn.report(path, comparison=found.comparison, inputs=torch.rand(3, 1, 6, 6))
    with pytest.raises(OutputError, match="does not exist"):
        found.report(tmp_path / "nowhere" / "report.html")
    assert not path.exists()
