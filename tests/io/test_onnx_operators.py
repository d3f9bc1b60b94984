"""Every operator that is converted, in graphs made by hand: `from_onnx` itself compares them with onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import ConversionError
from critical_neurons.io.onnx_import.converters import CONVERTERS
from critical_neurons.io.onnx_import.shapes import find_channels

TOLERANCE = 1e-5
IMAGE = (None, 4, 6, 7)
ROWS = (None, 5)
RANDOM = np.random.default_rng(0)


def draw(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def ints(*numbers):
    return np.array(numbers, dtype=np.int64)


def save(path, nodes, constants, shape, *, opset=20, outputs=("y",), dtype=TensorProto.FLOAT):
    """`nodes`: operator, names of the inputs, of the outputs, attributes. The input of the network is called x."""
    axes = ["batch" if size is None and axis == 0 else size for axis, size in enumerate(shape)]
    graph = helper.make_graph(
        [
            helper.make_node(kind, inputs.split(","), given.split(","), name=f"node_{number}", **attributes)
            for number, (kind, inputs, given, attributes) in enumerate(nodes)
        ],
        "graph",
        [helper.make_tensor_value_info("x", dtype, axes)],
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.save(model, path)
    return path


def convert(tmp_path, kind, shape=IMAGE, constants=None, *, inputs=None, opset=20, **attributes):
    """One operator that reads x and the constants, in their order."""
    constants = constants or {}
    nodes = [(kind, inputs or ",".join(["x", *constants]), "y", attributes)]
    return check(save(tmp_path / "model.onnx", nodes, constants, shape, opset=opset), shape)


def check(path, shape):
    """Run beside onnxruntime on batches that `from_onnx` has not tried itself, and after a copy."""
    module = cn.from_onnx(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert not module.training
    for count in (1, 4):
        rows = torch.from_numpy(draw(count, *shape[1:]))
        (expected, *_) = session.run(None, {"x": rows.numpy()})
        found = module(rows)
        assert found.shape == expected.shape
        assert np.allclose(found.detach(), expected, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)
    return module


def layers(module):
    return [each for each in module.modules() if not list(each.children()) and each is not module]


class TestConvolutions:
    @pytest.mark.parametrize(
        "attributes",
        [
            {},
            {"pads": [1, 1, 1, 1], "strides": [2, 2]},
            {"pads": [0, 1, 2, 0]},
            {"dilations": [2, 1], "pads": [2, 1, 2, 1]},
            {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
            {"auto_pad": "SAME_LOWER", "strides": [1, 2]},
            {"auto_pad": "VALID"},
        ],
        ids=str,
    )
    def test_windows(self, tmp_path, attributes):
        module = convert(tmp_path, "Conv", constants={"w": draw(3, 4, 3, 2), "b": draw(3)}, **attributes)
        assert [type(each) for each in layers(module)] == [nn.Conv2d]

    @pytest.mark.parametrize("groups", [2, 4])
    def test_groups(self, tmp_path, groups):
        (layer,) = layers(convert(tmp_path, "Conv", constants={"w": draw(8, 4 // groups, 3, 3)}, group=groups))
        assert (layer.in_channels, layer.out_channels, layer.groups, layer.bias) == (4, 8, groups, None)

    @pytest.mark.parametrize(("axes", "kind"), [(1, nn.Conv1d), (3, nn.Conv3d)])
    def test_axes(self, tmp_path, axes, kind):
        (layer,) = layers(convert(tmp_path, "Conv", (None, 2, *(5,) * axes), {"w": draw(3, 2, *(2,) * axes)}))
        assert type(layer) is kind

    @pytest.mark.parametrize(
        "attributes",
        [
            {},
            {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
            {"strides": [2, 2], "pads": [0, 1, 1, 0]},
            {"group": 2, "dilations": [2, 2]},
        ],
        ids=str,
    )
    def test_transposed(self, tmp_path, attributes):
        module = convert(tmp_path, "ConvTranspose", constants={"w": draw(4, 3, 3, 3)}, **attributes)
        assert [type(each) for each in layers(module)] == [nn.ConvTranspose2d]

    def test_a_bias_added_behind(self, tmp_path):
        nodes = [("Conv", "x,w", "a", {}), ("Add", "a,b", "y", {})]
        path = save(tmp_path / "model.onnx", nodes, {"w": draw(3, 4, 3, 3), "b": draw(1, 3, 1, 1)}, IMAGE)
        module = check(path, IMAGE)
        assert [node.op for node in module.graph.nodes] == ["placeholder", "call_module", "output"]
        assert layers(module)[0].bias.shape == (3,)


class TestLinear:
    @pytest.mark.parametrize("transposed", [0, 1])
    @pytest.mark.parametrize("bias", [None, (3,), (1, 3), (1,), ()], ids=str)
    def test_gemm(self, tmp_path, transposed, bias):
        weight = draw(*((3, 5) if transposed else (5, 3)))
        constants = {"w": weight} | ({} if bias is None else {"b": draw(*bias)})
        module = convert(tmp_path, "Gemm", ROWS, constants, transB=transposed, alpha=0.5, beta=2.0)
        (layer,) = layers(module)
        assert (type(layer), layer.in_features, layer.out_features) == (nn.Linear, 5, 3)
        assert (layer.bias is None) == (bias is None)

    @pytest.mark.parametrize("order", ["a,b", "b,a"])
    @pytest.mark.parametrize("shape", [ROWS, (None, 4, 5)], ids=str)
    def test_a_product_and_a_sum(self, tmp_path, order, shape):
        nodes = [("MatMul", "x,w", "a", {}), ("Add", order, "y", {})]
        module = check(save(tmp_path / "model.onnx", nodes, {"w": draw(5, 3), "b": draw(3)}, shape), shape)
        (layer,) = layers(module)
        assert type(layer) is nn.Linear
        assert layer.bias.shape == (3,)
        assert [node.op for node in module.graph.nodes] == ["placeholder", "call_module", "output"]

    def test_a_product_that_others_read_keeps_its_values(self, tmp_path):
        nodes = [("MatMul", "x,w", "a", {}), ("Add", "a,b", "c", {}), ("Mul", "a,c", "y", {})]
        module = check(save(tmp_path / "model.onnx", nodes, {"w": draw(5, 3), "b": draw(3)}, ROWS), ROWS)
        assert layers(module)[0].bias is None

    def test_a_product_that_is_an_output_keeps_its_values(self, tmp_path):
        nodes = [("MatMul", "x,w", "a", {}), ("Add", "a,b", "y", {})]
        path = save(tmp_path / "model.onnx", nodes, {"w": draw(5, 3), "b": draw(3)}, ROWS, outputs=("y", "a"))
        both = cn.from_onnx(path)(torch.ones(2, 5))
        assert len(both) == 2
        assert not torch.equal(*both)

    def test_a_sum_per_row_is_no_bias(self, tmp_path):
        nodes = [("MatMul", "x,w", "a", {}), ("Add", "a,b", "y", {})]
        module = check(
            save(tmp_path / "m.onnx", nodes, {"w": draw(5, 3), "b": draw(4, 1)}, (None, 4, 5)), (None, 4, 5)
        )
        assert layers(module)[0].bias is None

    def test_products_of_two_values(self, tmp_path):
        nodes = [("Transpose", "x", "t", {"perm": [0, 2, 1]}), ("MatMul", "x,t", "y", {})]
        check(save(tmp_path / "model.onnx", nodes, {}, (None, 4, 5)), (None, 4, 5))

    def test_a_constant_from_the_left(self, tmp_path):
        convert(tmp_path, "MatMul", (None, 4, 5), {"w": draw(3, 4)}, inputs="w,x")


class TestNormalisations:
    @pytest.mark.parametrize(
        ("shape", "kind"), [((None, 4), nn.BatchNorm1d), ((None, 4, 3), nn.BatchNorm1d), (IMAGE, nn.BatchNorm2d)]
    )
    def test_batch(self, tmp_path, shape, kind):
        constants = {"w": draw(4), "b": draw(4), "m": draw(4), "v": np.abs(draw(4)) + 0.1}
        module = convert(tmp_path, "BatchNormalization", shape, constants, epsilon=1e-2)
        assert [type(each) for each in layers(module)] == [kind]

    def test_instance(self, tmp_path):
        convert(tmp_path, "InstanceNormalization", constants={"w": draw(4), "b": draw(4)})

    @pytest.mark.parametrize("axis", [-1, 1])
    @pytest.mark.parametrize("bias", [True, False])
    def test_layer(self, tmp_path, axis, bias):
        sizes = (5,) if axis == -1 else (4, 5)
        constants = {"w": draw(*sizes)} | ({"b": draw(*sizes)} if bias else {})
        convert(tmp_path, "LayerNormalization", (None, 4, 5), constants, axis=axis)

    @pytest.mark.parametrize("opset", [18, 21])
    def test_group(self, tmp_path, opset):
        size = 2 if opset < 21 else 4
        constants = {"w": draw(size), "b": draw(size)}
        module = convert(tmp_path, "GroupNormalization", constants=constants, opset=opset, num_groups=2)
        assert [type(each) for each in layers(module)] == [nn.GroupNorm]

    def test_local_response(self, tmp_path):
        convert(tmp_path, "LRN", size=3, alpha=0.5)

    def test_training_mode_is_refused(self, tmp_path):
        constants = {"w": draw(4), "b": draw(4), "m": draw(4), "v": np.abs(draw(4))}
        with pytest.raises(ConversionError, match=r"node_0 \(BatchNormalization\) is in training mode"):
            convert(tmp_path, "BatchNormalization", constants=constants, training_mode=1)


@pytest.mark.parametrize(
    ("kind", "attributes", "layer"),
    [
        ("Relu", {}, nn.ReLU),
        ("LeakyRelu", {"alpha": 0.3}, nn.LeakyReLU),
        ("Sigmoid", {}, nn.Sigmoid),
        ("HardSigmoid", {"alpha": 1 / 6}, nn.Hardsigmoid),
        ("HardSigmoid", {}, None),
        ("HardSwish", {}, nn.Hardswish),
        ("Tanh", {}, nn.Tanh),
        ("Elu", {"alpha": 0.7}, nn.ELU),
        ("Celu", {"alpha": 0.7}, nn.CELU),
        ("Selu", {}, nn.SELU),
        ("Selu", {"alpha": 2.0, "gamma": 0.5}, nn.ELU),
        ("Gelu", {}, nn.GELU),
        ("Gelu", {"approximate": "tanh"}, nn.GELU),
        ("Mish", {}, nn.Mish),
        ("Softplus", {}, nn.Softplus),
        ("Softsign", {}, nn.Softsign),
        ("ThresholdedRelu", {"alpha": 0.5}, nn.Threshold),
        ("Softmax", {}, nn.Softmax),
        ("LogSoftmax", {"axis": 1}, nn.LogSoftmax),
        *((kind, {}, None) for kind in ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Log", "Neg", "Reciprocal")),
        *((kind, {}, None) for kind in ("Sign", "Sin", "Sqrt", "Identity", "Dropout")),
    ],
)
def test_one_value(tmp_path, kind, attributes, layer):
    assert [type(each) for each in layers(convert(tmp_path, kind, **attributes))] == ([layer] if layer else [])


class TestBoundsAndSlopes:
    @pytest.mark.parametrize(
        ("lowest", "highest", "kind"), [(0, 6, [nn.ReLU6]), (0, None, [nn.ReLU]), (-1, 1, []), (None, 0.5, [])]
    )
    @pytest.mark.parametrize("opset", [6, 13])
    def test_clip(self, tmp_path, lowest, highest, kind, opset):
        bounds = {"min": lowest, "max": highest}
        given = {name: np.float32(bound) for name, bound in bounds.items() if bound is not None}
        inputs = ",".join(["x", *(name if name in given else "" for name in bounds)])
        if opset == 6:
            module = convert(tmp_path, "Clip", opset=6, **{name: float(bound) for name, bound in given.items()})
        else:
            module = convert(tmp_path, "Clip", constants=given, inputs=inputs, opset=13)
        assert [type(each) for each in layers(module)] == kind

    @pytest.mark.parametrize("shape", [(1,), (4, 1, 1), (1, 4, 1, 1)])
    def test_slopes(self, tmp_path, shape):
        (layer,) = layers(convert(tmp_path, "PRelu", constants={"s": draw(*shape)}))
        assert type(layer) is nn.PReLU

    def test_a_slope_per_position_is_refused(self, tmp_path):
        with pytest.raises(ConversionError, match=r"slopes of shape \(6, 7\)"):
            convert(tmp_path, "PRelu", constants={"s": draw(6, 7)})


class TestArithmetic:
    @pytest.mark.parametrize("kind", ["Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Mean"])
    @pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1), (6, 7)], ids=str)
    def test_constants(self, tmp_path, kind, shape):
        constant = np.abs(draw(*shape)) + np.float32(0.5)
        convert(tmp_path, kind, constants={"c": constant})
        if kind not in ("Min", "Max", "Sum", "Mean", "Pow"):
            convert(tmp_path, kind, constants={"c": constant}, inputs="c,x")

    def test_one_number_is_written_out(self, tmp_path):
        assert list(convert(tmp_path, "Mul", constants={"c": np.float32(2)}).state_dict()) == []

    def test_a_constant_per_channel_is_kept_and_moves(self, tmp_path):
        module = convert(tmp_path, "Mul", constants={"c": draw(4, 1, 1)})
        assert [values.shape for values in module.state_dict().values()] == [(4, 1, 1)]
        assert module.double()(torch.ones(1, 4, 6, 7, dtype=torch.float64)).dtype == torch.float64

    def test_values_with_each_other(self, tmp_path):
        nodes = [
            *(("Relu", "x", "a", {}), ("Neg", "x", "b", {}), ("Add", "a,b", "c", {}), ("Mul", "c,a", "d", {})),
            *(("Max", "a,b,d", "e", {}), ("Sum", "a,b,e", "f", {}), ("Mean", "f,x", "y", {})),
        ]
        check(save(tmp_path / "model.onnx", nodes, {}, IMAGE), IMAGE)

    def test_a_choice(self, tmp_path):
        comparisons = ["Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"]
        nodes = [(kind, "x,zero", f"c{place}", {}) for place, kind in enumerate(comparisons)]
        nodes += [
            ("And", "c0,c1", "d", {}),
            ("Or", "c2,c3", "e", {}),
            ("Not", "c4", "f", {}),
            ("And", "d,f", "g", {}),
        ]
        nodes += [("Or", "g,e", "h", {}), ("Where", "h,x,zero", "y", {})]
        check(save(tmp_path / "model.onnx", nodes, {"zero": np.float32(0.3)}, IMAGE), IMAGE)


class TestReductions:
    @pytest.mark.parametrize("kind", ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"])
    @pytest.mark.parametrize(("axes", "keep"), [((2, 3), 1), ((-1,), 0)])
    def test_axes(self, tmp_path, kind, axes, keep):
        convert(tmp_path, kind, constants={"axes": ints(*axes)}, keepdims=keep)
        if kind != "ReduceSum":
            convert(tmp_path, kind, opset=11, axes=list(axes), keepdims=keep)

    def test_no_axes_and_nothing_done(self, tmp_path):
        convert(tmp_path, "ReduceMean", noop_with_empty_axes=1)


class TestPools:
    @pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
    @pytest.mark.parametrize(
        "attributes",
        [
            {},
            {"strides": [2, 2]},
            {"strides": [2, 2], "ceil_mode": 1},
            {"strides": [2, 2], "pads": [1, 1, 1, 1]},
            {"strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
            {"strides": [2, 2], "pads": [0, 1, 1, 0]},
            {"pads": [2, 2, 2, 2]},
            {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        ],
        ids=str,
    )
    def test_windows(self, tmp_path, kind, attributes):
        module = convert(tmp_path, kind, kernel_shape=[3, 2] if "pads" not in attributes else [3, 3], **attributes)
        assert type(layers(module)[0]) is {"MaxPool": nn.MaxPool2d, "AveragePool": nn.AvgPool2d}[kind]

    @pytest.mark.parametrize("pads", [[1, 1, 1, 1], [0, 1, 1, 0], [2, 2, 2, 2]])
    def test_padding_that_counts(self, tmp_path, pads):
        convert(tmp_path, "AveragePool", kernel_shape=[3, 3], pads=pads, count_include_pad=1)

    def test_dilated_maximum(self, tmp_path):
        convert(tmp_path, "MaxPool", kernel_shape=[2, 3], dilations=[2, 2])

    @pytest.mark.parametrize("shape", [(None, 3, 5), IMAGE, (None, 2, 3, 4, 5)], ids=len)
    @pytest.mark.parametrize("kind", ["GlobalAveragePool", "GlobalMaxPool"])
    def test_global(self, tmp_path, kind, shape):
        convert(tmp_path, kind, shape)

    @pytest.mark.parametrize("axes", [1, 3])
    def test_axes(self, tmp_path, axes):
        convert(tmp_path, "MaxPool", (None, 2, *(5,) * axes), kernel_shape=[2] * axes)
        convert(tmp_path, "AveragePool", (None, 2, *(5,) * axes), kernel_shape=[2] * axes)

    def test_indices_that_are_read_are_refused(self, tmp_path):
        both = [("MaxPool", "x", "a,i", {"kernel_shape": [2, 2]}), ("Cast", "i", "y", {"to": TensorProto.FLOAT})]
        for nodes in (both, both[:1]):
            path = save(tmp_path / "model.onnx", nodes, {}, IMAGE, outputs=("y",) if nodes[1:] else ("a", "i"))
            with pytest.raises(ConversionError, match=r"node_0 \(MaxPool\) gives 'i', which is read"):
                cn.from_onnx(path)


class TestPaddingAndResizing:
    @pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
    def test_padding(self, tmp_path, mode):
        convert(tmp_path, "Pad", constants={"p": ints(0, 0, 1, 2, 0, 0, 0, 3)}, mode=mode)
        convert(tmp_path, "Pad", opset=2, pads=[0, 0, 1, 2, 0, 0, 0, 3], mode=mode)

    def test_padding_of_channels_by_a_number(self, tmp_path):
        convert(tmp_path, "Pad", constants={"p": ints(0, 1, 0, 0, 0, 2, 0, 0), "v": np.float32(0.7)})

    def test_padding_of_chosen_axes(self, tmp_path):
        constants = {"p": ints(1, 2, 0, 3), "v": np.float32(0), "a": ints(3, -2)}
        convert(tmp_path, "Pad", constants=constants)

    @pytest.mark.parametrize(
        "attributes",
        [
            {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
            {"mode": "linear"},
            {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
            {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
            {},
        ],
        ids=str,
    )
    def test_resizing(self, tmp_path, attributes):
        nodes = [("Resize", "x,,s", "y", attributes)]
        check(save(tmp_path / "a.onnx", nodes, {"s": np.array([1, 1, 2, 2], np.float32)}, IMAGE), IMAGE)
        nodes = [
            ("Shape", "x", "h", {"end": 2}),
            ("Concat", "h,n", "s", {"axis": 0}),
            ("Resize", "x,,,s", "y", attributes),
        ]
        check(save(tmp_path / "b.onnx", nodes, {"n": ints(12, 14)}, IMAGE), IMAGE)

    def test_upsampling_of_old(self, tmp_path):
        convert(tmp_path, "Upsample", constants={"s": np.array([1, 1, 3, 2], np.float32)}, opset=9)
        convert(tmp_path, "Upsample", opset=7, scales=[1.0, 1.0, 2.0, 2.0])

    def test_others_are_refused(self, tmp_path):
        with pytest.raises(ConversionError, match=r"resizes by linear, asymmetric\. Accepted: linear and cubic with"):
            convert(tmp_path, "Resize", constants={"s": np.ones(4, np.float32)}, inputs="x,,s", mode="linear",
                    coordinate_transformation_mode="asymmetric")  # fmt: skip

    @pytest.mark.parametrize("mode", ["DCR", "CRD"])
    def test_depth_to_space(self, tmp_path, mode):
        convert(tmp_path, "DepthToSpace", (None, 12, 2, 3), blocksize=2, mode=mode)

    def test_space_to_depth(self, tmp_path):
        convert(tmp_path, "SpaceToDepth", (None, 3, 4, 6), blocksize=2)


class TestShapes:
    @pytest.mark.parametrize("axis", [1, -3])
    def test_flattening(self, tmp_path, axis):
        assert [type(each) for each in layers(convert(tmp_path, "Flatten", axis=axis))] == [nn.Flatten]

    @pytest.mark.parametrize(
        "sizes", [(-1, 168), (0, -1), (0, 4, 42), (0, 2, 2, 6, 7), (0, 0, -1), (-1, 4, 7, 6), (-1, 7), (0, 0, 0, 0)]
    )
    def test_reshaping(self, tmp_path, sizes):
        convert(tmp_path, "Reshape", constants={"s": ints(*sizes)})

    def test_a_batch_of_one_in_the_file_is_any_batch_here(self, tmp_path):
        shape = (1, *IMAGE[1:])
        nodes = [("Conv", "x,w", "a", {}), ("Reshape", "a,s", "b", {}), ("MatMul", "b,v", "y", {})]
        constants = {"w": draw(2, 4, 3, 3), "s": ints(1, 40), "v": draw(40, 3)}
        module = cn.from_onnx(save(tmp_path / "model.onnx", nodes, constants, shape))
        assert module(torch.ones(5, 4, 6, 7)).shape == (5, 3)

    def test_a_batch_that_is_written_into_the_file(self, tmp_path):
        nodes = [("Add", "x,c", "y", {})]
        with pytest.raises(ConversionError, match="does not run on other batches than the file's"):
            cn.from_onnx(save(tmp_path / "model.onnx", nodes, {"c": draw(2, 5)}, (2, 5)))

    def test_sizes_of_the_batch_are_asked_for(self, tmp_path):
        """As torch's older exporter writes x.view(x.size(0), x.size(1) // 2, 2, -1)."""
        nodes = [
            *(("Shape", "x", "s", {}), ("Gather", "s,zero", "n", {}), ("Gather", "s,one", "c", {})),
            *(("Div", "c,two", "h", {}), ("Unsqueeze", "n,first", "n1", {}), ("Unsqueeze", "h,first", "h1", {})),
            *(("Concat", "n1,h1,twos,rest", "t", {"axis": 0}), ("Cast", "t", "u", {"to": TensorProto.INT64})),
            *(("Reshape", "x,u", "r", {}), ("Transpose", "r", "y", {"perm": [0, 2, 1, 3]})),
        ]
        constants = {"zero": ints(0)[0], "one": ints(1)[0], "two": ints(2)[0], "first": ints(0), "twos": ints(2)}
        check(save(tmp_path / "model.onnx", nodes, constants | {"rest": ints(-1)}, IMAGE), IMAGE)

    def test_more_arithmetic_of_shapes(self, tmp_path):
        nodes = [
            *(("Shape", "x", "s", {}), ("Slice", "s,one,far", "p", {}), ("ReduceProd", "p", "c", {})),
            *(("Slice", "s,zero,one", "n", {}), ("Squeeze", "n,zero", "m", {}), ("Mul", "m,one", "k", {})),
            *(("Add", "k,one", "l", {}), ("Sub", "l,one", "o", {}), ("Reshape", "o,one", "q", {})),
            *(("Concat", "q,c", "t", {"axis": 0}), ("Reshape", "x,t", "y", {})),
        ]
        constants = {"zero": ints(0), "one": ints(1), "far": ints(2**31 - 1)}
        check(save(tmp_path / "model.onnx", nodes, constants, IMAGE), IMAGE)

    def test_constants_are_calculated_at_once(self, tmp_path):
        nodes = [
            *(("Constant", "", "a", {"value_ints": [2, 2]}), ("ConstantOfShape", "a", "b", {})),
            *(("Constant", "", "c", {"value_float": 1.5}), ("Add", "b,c", "d", {}), ("Relu", "d", "e", {})),
            *(("Shape", "e", "f", {}), ("Cast", "f", "g", {"to": TensorProto.FLOAT}), ("Div", "f,f", "h", {})),
            *(("Cast", "h", "i", {"to": TensorProto.FLOAT}), ("Mul", "g,i", "j", {}), ("ReduceSum", "j", "k", {})),
            *(("Reshape", "k,none", "l", {}), ("Add", "x,l", "y", {})),
        ]
        module = check(save(tmp_path / "model.onnx", nodes, {"none": np.zeros(0, np.int64)}, IMAGE), IMAGE)
        assert len([node for node in module.graph.nodes if node.op == "call_function"]) == 1

    def test_moving_axes(self, tmp_path):
        convert(tmp_path, "Transpose", perm=[0, 2, 3, 1])
        convert(tmp_path, "Unsqueeze", constants={"a": ints(1, -1)})
        convert(tmp_path, "Unsqueeze", opset=11, axes=[1, 3])
        convert(tmp_path, "Squeeze", (None, 1, 5, 1), {"a": ints(-1)})
        convert(tmp_path, "Squeeze", (None, 1, 5, 1), opset=11, axes=[1, 3])

    @pytest.mark.parametrize("target", [(1, 4, 6, 7), (3, 1, 4, 6, 7), (1, 1)], ids=str)
    def test_expanding(self, tmp_path, target):
        path = save(tmp_path / "m.onnx", [("Expand", "x,s", "y", {})], {"s": ints(*target)}, (1, 4, 6, 1))
        if len(target) == 5:
            with pytest.raises(ConversionError, match="of shape"):
                cn.from_onnx(path)
        else:
            assert cn.from_onnx(path)(torch.ones(2, 4, 6, 1)).shape == (2, 4, 6, target[-1])

    @pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
    def test_splitting_and_joining(self, tmp_path, sizes):
        nodes = [("Split", "x,s", "a,b", {"axis": 1}), ("Concat", "b,a", "y", {"axis": 1})]
        module = check(save(tmp_path / "model.onnx", nodes, {"s": ints(*sizes)}, IMAGE), IMAGE)
        assert (torch.chunk in {node.target for node in module.graph.nodes}) == (sizes == (2, 2))

    def test_splitting_by_number(self, tmp_path):
        nodes = [("Split", "x", "a,b,c", {"axis": 2, "num_outputs": 3}), ("Concat", "c,a,b", "y", {"axis": 1})]
        check(save(tmp_path / "model.onnx", nodes, {}, IMAGE), IMAGE)

    def test_slicing(self, tmp_path):
        constants = {"s": ints(1, -3), "e": ints(2**62, -1), "a": ints(1, -1), "t": ints(2, 1)}
        convert(tmp_path, "Slice", constants=constants)
        convert(tmp_path, "Slice", opset=9, starts=[0, 1], ends=[2, 9], axes=[1, 2])

    @pytest.mark.parametrize("numbers", [ints(2, 0, -1), ints(-1)[0]], ids=str)
    def test_gathering(self, tmp_path, numbers):
        convert(tmp_path, "Gather", constants={"n": numbers}, axis=1)

    @pytest.mark.parametrize(
        ("before", "after", "axis"),
        [
            ((4, 6, 7), (168,), 0),
            ((4, 6, 7), (2, 2, 6, 7), 1),
            ((2, 2, 6, 7), (4, 6, 7), 0),
            ((4, 6, 7), (4, 42), 0),
            ((6,), (2, 3), 1),
        ],
    )
    def test_where_channels_go(self, before, after, axis):
        assert find_channels(before, after) == axis


def test_every_operator_is_tested():
    text = Path(__file__).read_text()
    assert [kind for kind in CONVERTERS if f'"{kind}"' not in text] == []
