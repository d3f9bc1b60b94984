"""ONNX files to networks and back: whole networks, and files that are damaged or mean harm."""

from __future__ import annotations

import copy
import os
import sys
from contextlib import suppress

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import fx, nn

import critical_neurons as cn
from critical_neurons.errors import ConversionError, InvalidFileError, InvalidInputError, MissingExtraError
from critical_neurons.removal.metrics import count_parameters
from critical_neurons.structure import fingerprint
from tests.zoo import build_model, draw_inputs, first_or_slow

TOLERANCE = 1e-5

ROUND_TRIPS = (
    *("resnet", "vgg", "mobilenet", "convolution in one dimension", "softmax"),
    *("nest", "densenet", "normalised input", "zeros around positions", "mlp with batch norm and dropout"),
    "concatenation",
)


class Shuffled(nn.Module):
    """A grouped convolution, its channels shuffled as in ShuffleNet, a gate as in squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.stem, self.grouped = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm, self.squeeze, self.excite = nn.GroupNorm(2, 8), nn.Linear(8, 3), nn.Linear(3, 8)
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        x = self.grouped(torch.relu(self.stem(x)))
        x = x.view(x.size(0), 2, -1, x.size(2), x.size(3)).transpose(1, 2).flatten(1, 2)
        x = nn.functional.silu(self.norm(x))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3))))))
        x = self.up(x * gate[:, :, None, None])
        x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
        return self.head(nn.functional.gelu(x))


class Transformer(nn.Module):
    """One block of attention, which multiplies values with each other."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.two(nn.functional.gelu(self.one(x)))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An ONNX file of a small network, and inputs."""
    path, inputs = tmp_path_factory.mktemp("onnx") / "model.onnx", torch.rand(4, 1, 6, 6)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 2))
    cn.export(model.eval(), path, inputs)
    return path, inputs


def build_linear(path, *, weight=None, name="w", node="node", operator="MatMul", shape=("batch", 3), domain=""):
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", name], ["y"], name=node, domain=domain)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weight or numpy_helper.from_array(np.ones((3, 2), np.float32), name)],
    )
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
    return path


class TestRoundTrip:
    @pytest.mark.parametrize("name", first_or_slow(*ROUND_TRIPS, first=2))
    def test_the_same_outputs_and_layers(self, tmp_path, name):
        model, inputs = build_model(name).float(), draw_inputs(name, 5).float()
        cn.export(model, tmp_path / "model.onnx", inputs)
        module = cn.from_onnx(tmp_path / "model.onnx")
        with torch.no_grad():
            assert torch.allclose(module(inputs), model(inputs), atol=TOLERANCE)
        read, expected = (cn.inspect(each, inputs) for each in (module, model))
        assert [(layer.name, layer.kind, layer.removable) for layer in read.layers] == [
            (layer.name, layer.kind, layer.removable) for layer in expected.layers
        ]

    @pytest.mark.parametrize(
        ("build", "shape"), [(Transformer, (5, 8)), pytest.param(Shuffled, (1, 6, 6), marks=pytest.mark.slow)]
    )
    def test_networks_that_no_program_reads(self, tmp_path, build, shape):
        torch.manual_seed(0)
        model, inputs = build().eval(), torch.rand(4, *shape)
        cn.export(model, tmp_path / "model.onnx", inputs)
        with torch.no_grad():
            assert torch.allclose(cn.from_onnx(tmp_path / "model.onnx")(inputs), model(inputs), atol=TOLERANCE)

    @pytest.mark.filterwarnings("ignore")
    def test_the_older_exporter_of_torch(self, tmp_path):
        """It writes shapes out operator by operator, and names nodes by their modules."""
        torch.manual_seed(0)
        model, inputs = Shuffled().eval(), torch.rand(4, 1, 6, 6)
        axes = {"x": {0: "batch"}}
        torch.onnx.export(model, (inputs,), tmp_path / "m.onnx", dynamo=False, input_names=["x"], dynamic_axes=axes)
        module = cn.from_onnx(tmp_path / "m.onnx")
        with torch.no_grad():
            assert torch.allclose(module(inputs), model(inputs), atol=TOLERANCE)
        assert type(module.get_submodule("stem")) is nn.Conv2d

    def test_it_is_an_ordinary_module(self, source):
        path, inputs = source
        torch.manual_seed(7)
        expected = torch.rand(1)
        torch.manual_seed(7)
        module = cn.from_onnx(path)
        assert torch.equal(torch.rand(1), expected)  # no random numbers are drawn
        assert [name for name, _ in module.named_parameters()] == [
            f"{layer}.{part}" for layer in ("0", "3", "5") for part in ("weight", "bias")
        ]
        copied = copy.deepcopy(module).double()
        assert torch.allclose(copied(inputs.double()), module(inputs).double(), atol=TOLERANCE)
        again = cn.from_onnx(path)
        again.load_state_dict({name: values * 2 for name, values in module.state_dict().items()})
        assert not torch.equal(again(inputs), module(inputs))
        assert fingerprint(module) == fingerprint(cn.from_onnx(path))

    def test_smaller_and_onnx_again_under_the_same_names(self, tmp_path, source):
        inputs = source[1]
        content = onnx.load(source[0])
        for values, old, new in ((content.graph.input, "input", "data"), (content.graph.output, "output", "prob")):
            values[0].name = new
            for node in content.graph.node:
                for names in (node.input, node.output):
                    names[:] = [new if name == old else name for name in names]
        onnx.save(content, tmp_path / "model.onnx")
        module = cn.from_onnx(tmp_path / "model.onnx")
        relaxed = cn.Paper(integer=False)
        scores = cn.score(
            module, inputs, torch.tensor([0, 1, 0, 1]), formulation=relaxed, solver=cn.Solver(threads=1)
        )
        plan = cn.plan(scores, units=0.5)
        smaller = cn.prune(module, plan, inputs)
        assert smaller.get_submodule("0").out_channels == 2
        cn.export(smaller, tmp_path / "smaller.onnx", inputs)
        session = onnxruntime.InferenceSession(tmp_path / "smaller.onnx", providers=["CPUExecutionProvider"])
        (found,) = session.run(["prob"], {"data": inputs.numpy()})
        assert np.allclose(found, smaller(inputs).detach(), atol=TOLERANCE)
        assert count_parameters(cn.from_onnx(tmp_path / "smaller.onnx")) == count_parameters(smaller)

    def test_open_sizes_are_asked_for(self, tmp_path):
        path = build_linear(tmp_path / "model.onnx", shape=("batch", "length", 3))
        with pytest.raises(InvalidInputError, match=r"leaves the shape of an input open: \(\?, 3\)\. Give it"):
            cn.from_onnx(path)
        assert cn.from_onnx(path, input_shape=(5, 3))(torch.ones(2, 7, 3)).shape == (2, 7, 2)
        for wrong in ((5, 4), (3,)):
            with pytest.raises(InvalidInputError, match=r"reads inputs of shape \(\?, 3\), not"):
                cn.from_onnx(path, input_shape=wrong)

    def test_weights_in_a_file_of_their_own(self, tmp_path, source):
        onnx.save(
            onnx.load(source[0]),
            tmp_path / "model.onnx",
            save_as_external_data=True,
            location="weights.bin",
            size_threshold=100,
        )
        inputs = source[1]
        assert torch.equal(cn.from_onnx(tmp_path / "model.onnx")(inputs), cn.from_onnx(source[0])(inputs))


class TestNames:
    @pytest.mark.parametrize(
        ("name", "node", "found"),
        [
            ("features.0.weight", "n", "features.0"),
            ("w", "/block/fc/MatMul", "block.fc.MatMul"),
            ("w", "class", "class_"),
            ("forward.weight", "n", "forward_"),
            ("w", "training", "training_"),
            ("w", "", "y"),
            ("w", "__graph", "graph_"),
            (
                "w",
                'x"), __import__("os").remove("kept"), getattr(self, "x',
                "x___import___os.remove_kept_getattr_self_x",
            ),
            ("w", "Größe", "Gr_e"),
        ],
    )
    def test_of_weights_or_nodes_and_never_code(self, tmp_path, monkeypatch, name, node, found):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "kept").touch()
        module = cn.from_onnx(build_linear(tmp_path / "model.onnx", name=name, node=node))
        assert [path for path, each in module.named_modules() if isinstance(each, nn.Linear)] == [found]
        assert (tmp_path / "kept").exists()

    def test_layers_never_share_a_name_or_lie_in_each_other(self, tmp_path):
        weights = {
            name: numpy_helper.from_array(np.eye(3, dtype=np.float32), name) for name in ("a.weight", "a.b.weight")
        }
        graph = helper.make_graph(
            [
                helper.make_node("MatMul", ["x", "a.weight"], ["p"]),
                helper.make_node("MatMul", ["p", "a.b.weight"], ["q"]),
                helper.make_node("MatMul", ["q", "a.weight"], ["y"]),
            ],
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            list(weights.values()),
        )
        opsets = [helper.make_opsetid("", 17)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "model.onnx")
        module = cn.from_onnx(tmp_path / "model.onnx")
        assert [path for path, each in module.named_modules() if type(each) is nn.Linear] == ["a", "a_b_1", "a_1"]


def hostile_tensor(**fields):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3, 2])
    for name, value in fields.items():
        if isinstance(value, list):
            del getattr(tensor, name)[:]
            getattr(tensor, name).extend(value)
        else:
            setattr(tensor, name, value)
    return tensor


def external(**entries):
    tensor = hostile_tensor(data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


class TestHostileFiles:
    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
    def test_truncated(self, tmp_path, source, share):
        content = source[0].read_bytes()
        (tmp_path / "model.onnx").write_bytes(content[: int(share * len(content))])
        with pytest.raises(InvalidFileError, match=r"damaged|needs"):
            cn.from_onnx(tmp_path / "model.onnx")

    @pytest.mark.parametrize("seed", first_or_slow(*range(20), first=5))
    def test_random_bytes(self, tmp_path, seed):
        (tmp_path / "model.onnx").write_bytes(np.random.default_rng(seed).bytes(1000))
        with pytest.raises(InvalidFileError, match="is no ONNX file, or a damaged one"):
            cn.from_onnx(tmp_path / "model.onnx")

    @pytest.mark.parametrize("seed", first_or_slow(*range(40), first=10))
    def test_damaged_in_places_it_is_refused_or_runs(self, tmp_path, source, seed):
        content, random = bytearray(source[0].read_bytes()), np.random.default_rng(seed)
        for place in random.integers(len(content), size=8):
            content[place] = random.integers(256)
        (tmp_path / "model.onnx").write_bytes(content)
        with suppress(InvalidFileError, ConversionError, InvalidInputError):
            assert isinstance(cn.from_onnx(tmp_path / "model.onnx"), fx.GraphModule)

    @pytest.mark.parametrize("content", [b"\x80\x04\x95", b"PK\x03\x04", b"model", b"\x93NUMPY"])
    def test_other_formats(self, tmp_path, content):
        (tmp_path / "model.onnx").write_bytes(content)
        with pytest.raises(InvalidFileError, match="is no ONNX file, or a damaged one"):
            cn.from_onnx(tmp_path / "model.onnx")

    def test_no_file(self, tmp_path):
        with pytest.raises(InvalidFileError, match="no such ONNX file"):
            cn.from_onnx(tmp_path / "gone.onnx")
        with pytest.raises(InvalidFileError, match="no such ONNX file"):
            cn.from_onnx(tmp_path)

    @pytest.mark.parametrize(
        ("tensor", "message"),
        [
            (
                hostile_tensor(dims=[2**40, 2**20], raw_data=b"1234"),
                r"needs 4,611,686,018,427,387,904 bytes; .* holds 4",
            ),
            (hostile_tensor(dims=[2**62, 2**62], float_data=[1.0]), "numbers; the file holds 1"),
            (hostile_tensor(dims=[-3, 2], raw_data=b"1234"), "sizes are zero or more"),
            (hostile_tensor(raw_data=b"x" * 23), "needs 24 bytes; the file holds 23"),
            (hostile_tensor(data_type=16, raw_data=b"x" * 12), "is of type 16"),
            (external(location="/etc/hostname"), "Accepted: a file in the folder of the ONNX file"),
            (external(location="../secret.bin"), "Accepted: a file in the folder of the ONNX file"),
            (external(location="link.bin"), "Accepted: a file in the folder of the ONNX file"),
            (external(location="gone.bin"), "Accepted: a file in the folder of the ONNX file"),
            (external(location="a\0b"), "cannot be read|Accepted: a file"),
            (external(), "Accepted: a file in the folder of the ONNX file"),
            (external(location="data.bin", offset="8"), "24 are said to begin at 8 of data.bin, which holds 24"),
            (external(location="data.bin", offset="-8"), "24 are said to begin at -8"),
            (external(location="data.bin", length="8"), "needs 24 bytes; 8 are said"),
            (external(location="data.bin", offset="one"), "cannot be read"),
        ],
    )
    def test_sizes_and_places_that_are_not_true(self, tmp_path, tensor, message):
        folder = tmp_path / "models"
        folder.mkdir()
        (tmp_path / "secret.bin").write_bytes(b"x" * 24)
        (folder / "data.bin").write_bytes(b"x" * 24)
        os.symlink(tmp_path / "secret.bin", folder / "link.bin")
        with pytest.raises(InvalidFileError, match=message):
            cn.from_onnx(build_linear(folder / "model.onnx", weight=tensor))

    @pytest.mark.parametrize(
        ("nodes", "message"),
        [
            (
                [("ConstantOfShape", ["big"], ["c"], {}), ("Add", ["x", "c"], ["y"], {})],
                r"\(ConstantOfShape\) gives a value",
            ),
            ([("Expand", ["x", "big"], ["y"], {})], r"\(Expand\)"),
            ([("Pad", ["x", "pads"], ["y"], {})], r"\(Pad\) gives a value of shape"),
        ],
    )
    def test_values_that_no_memory_holds(self, tmp_path, nodes, message):
        graph = helper.make_graph(
            [helper.make_node(kind, inputs, outputs, **attributes) for kind, inputs, outputs, attributes in nodes],
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [
                numpy_helper.from_array(np.array([2**20, 2**20]), "big"),
                numpy_helper.from_array(np.array([0, 2**40, 0, 0]), "pads"),
            ],
        )
        onnx.save(helper.make_model(graph, ir_version=8), tmp_path / "model.onnx")
        with pytest.raises(ConversionError, match=message):
            cn.from_onnx(tmp_path / "model.onnx")

    def test_values_that_nothing_gives(self, tmp_path):
        content = onnx.load(build_linear(tmp_path / "model.onnx"))
        content.graph.node[0].input[0] = "z"
        onnx.save(content, tmp_path / "model.onnx")
        with pytest.raises(InvalidFileError, match=r"node \(MatMul\) reads 'z', which nothing before it gives"):
            cn.from_onnx(tmp_path / "model.onnx")

    def test_names_that_are_no_text(self, tmp_path, capfd):
        path = build_linear(tmp_path / "model.onnx", node="plain_name")
        path.write_bytes(path.read_bytes().replace(b"plain_name", b"plain\xff\xfename"[:10]))
        with pytest.raises(InvalidFileError, match="a name in it is no text"):
            cn.from_onnx(path)
        assert capfd.readouterr() == ("", "")

    def test_names_cannot_write_to_the_terminal(self, tmp_path):
        path = build_linear(tmp_path / "model.onnx", operator="Odd\x1b[2J", node="n\x1b]0;x\x07\n")
        with pytest.raises(ConversionError) as caught:
            cn.from_onnx(path)
        assert str(caught.value).isprintable()

    def test_an_input_of_another_kind(self, tmp_path):
        content = onnx.load(build_linear(tmp_path / "model.onnx"))
        content.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
        onnx.save(content, tmp_path / "model.onnx")
        with pytest.raises(
            InvalidFileError, match=r"its input 'x' cannot be read\. Accepted: a float32 or float64 tensor"
        ):
            cn.from_onnx(tmp_path / "model.onnx")


class TestRefusals:
    @pytest.mark.parametrize("domain", ["", "com.example"])
    def test_unknown_operators_are_listed_with_what_is_accepted(self, tmp_path, domain):
        operator = "com.example.Einstein" if domain else "Einstein"
        path = build_linear(tmp_path / "model.onnx", operator="Einstein", node="odd", domain=domain)
        with pytest.raises(ConversionError, match=rf"odd \({operator}\)\. Accepted: Abs, Add, .*, Where\."):
            cn.from_onnx(path)

    def test_layers_that_do_not_fit(self, tmp_path):
        path = build_linear(tmp_path / "model.onnx", shape=("batch", 4), node="first")
        with pytest.raises(ConversionError, match=r"first \(MatMul\) does not fit what it reads"):
            cn.from_onnx(path)

    def test_a_difference_from_onnxruntime(self, source, monkeypatch):
        monkeypatch.setattr("critical_neurons.io.onnx_import.conversion.CONVERSION_TOLERANCE", -1.0)
        with pytest.raises(ConversionError, match="its output 'output', for 2 inputs, differs after conversion"):
            cn.from_onnx(source[0])

    @pytest.mark.parametrize("name", ["onnx", "onnxruntime"])
    def test_missing_extra(self, source, monkeypatch, name):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtraError, match=rf"{name} is not installed.*critical_neurons\[onnx\]"):
            cn.from_onnx(source[0])
