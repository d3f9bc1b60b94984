"""Converters of pooling, padding and resizing, and the windows that convolutions share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from critical_neurons.io.onnx_import.builder import find_number
from critical_neurons.io.onnx_import.converters import GraphStep, Value, converts

AVERAGES = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
MAXIMA = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
GLOBAL: dict[str, dict[int, Any]] = {
    "GlobalAveragePool": {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d},
    "GlobalMaxPool": {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d},
}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
NEAREST = {
    ("asymmetric", "floor"): "nearest",
    ("half_pixel", "round_prefer_floor"): "nearest-exact",
    ("half_pixel", "round_prefer_ceil"): "nearest-exact",
}
"""torch's modes by ONNX's coordinates and rounding; remaining differences show in the comparison."""


@dataclass(frozen=True)
class Window:
    """Kernel, stride, dilation and padding of a sliding window, axis by axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        return self.before == self.after

    def pad(
        self, step: GraphStep, value: fx.Node, fill: float, *, apart: bool = False
    ) -> tuple[fx.Node, tuple[int, ...]]:
        """The value, and the padding that is left to the layer. If torch's layer cannot do it, or if `apart`, the
        value is padded and the layer gets none."""
        if self.symmetric and not apart:
            return value, self.before
        widths = [width for pair in zip(reversed(self.before), reversed(self.after), strict=True) for width in pair]
        padded: fx.Node = (
            step.builder.call(step.node.name, F.pad, value, widths, value=fill) if any(widths) else value
        )
        return padded, (0,) * len(self.kernel)


def find_window(step: GraphStep, kernel: tuple[int, ...]) -> Window:
    axes = len(kernel)
    stride = step.attribute("strides", (1,) * axes)
    dilation = step.attribute("dilations", (1,) * axes)
    pads = step.attribute("pads", (0,) * (2 * axes))
    positions, auto = step.shape()[2:], step.attribute("auto_pad", "NOTSET")
    if {len(kernel), len(stride), len(dilation), len(positions), len(pads) / 2} != {axes} or min(pads, default=0) < 0:
        raise step.refuse("has windows, strides, pads or inputs of other numbers of axes", "as many of each")
    if auto == "VALID":
        pads = (0,) * (2 * axes)
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        total = [
            max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
            for size, s, k, d in zip(positions, stride, kernel, dilation, strict=True)
        ]
        small, large = tuple(each // 2 for each in total), tuple(each - each // 2 for each in total)
        pads = (*small, *large) if auto == "SAME_UPPER" else (*large, *small)
    elif auto != "NOTSET":
        raise step.refuse(f"has auto_pad {auto!r}", "NOTSET, VALID, SAME_UPPER, SAME_LOWER")
    return Window(kernel, stride, dilation, pads[:axes], pads[axes:])


@converts("MaxPool")
def convert_max_pool(step: GraphStep) -> Value:
    window = find_window(step, step.attribute("kernel_shape", ()))
    too_wide = any(2 * width > size for width, size in zip(window.before, window.kernel, strict=True))
    value, padding = window.pad(step, step.computed(), -math.inf, apart=too_wide)
    pool = MAXIMA[len(window.kernel)](
        window.kernel, window.stride, padding, window.dilation, ceil_mode=bool(step.attribute("ceil_mode", 0))
    )
    return step.module(pool, value)


@converts("AveragePool")
def convert_average_pool(step: GraphStep) -> Value:
    window = find_window(step, step.attribute("kernel_shape", ()))
    if set(window.dilation) != {1}:
        raise step.refuse(f"has dilations {window.dilation}", "average pools without")
    counted, ceiling = bool(step.attribute("count_include_pad", 0)), bool(step.attribute("ceil_mode", 0))
    too_wide = any(2 * width > size for width, size in zip(window.before, window.kernel, strict=True))
    value, padding = window.pad(step, step.computed(), 0.0, apart=too_wide)
    if any(padding) or counted or value is step.any():
        pool = AVERAGES[len(window.kernel)](
            window.kernel, window.stride, padding, ceil_mode=ceiling, count_include_pad=counted
        )
        return step.module(pool, value)
    # Zeros were added by a call of their own but do not count: divide by the share of each window that counts.
    pool = AVERAGES[len(window.kernel)](window.kernel, window.stride, ceil_mode=ceiling)
    ones = torch.ones(1, 1, *step.shape()[2:], dtype=step.graph.dtype)
    widths = [width for pair in zip(reversed(window.before), reversed(window.after), strict=True) for width in pair]
    return step.call(torch.div, step.module(pool, value), pool(F.pad(ones, widths)))


@converts("GlobalAveragePool", "GlobalMaxPool")
def convert_global_pool(step: GraphStep) -> Value:
    return step.module(GLOBAL[step.node.operator][len(step.shape()) - 2](1))


@converts("Pad")
def convert_padding(step: GraphStep) -> Value:
    rank, widths = len(step.shape()), step.numbers(1, "pads", ())
    axes = [axis % rank for axis in step.numbers(3, "", range(rank))]
    mode = step.attribute("mode", "constant")
    value = float(step.constant(2)) if step.has(2) else step.attribute("value", 0.0)
    if mode not in PAD_MODES or len(widths) != 2 * len(axes):
        raise step.refuse(f"pads in the mode {mode!r} by {widths}", f"{', '.join(PAD_MODES)}; two numbers per axis")
    pairs = [(0, 0)] * rank
    for place, axis in enumerate(axes):
        pairs[axis] = widths[place], widths[place + len(axes)]
    while pairs and pairs[0] == (0, 0):  # torch pads the last axes, and some modes no others
        pairs.pop(0)
    flat = [width for pair in reversed(pairs) for width in pair]
    if not flat:
        return step.input()
    extra = {"value": value} if mode == "constant" else {}
    return step.call(F.pad, step.input(), flat, mode=PAD_MODES[mode], **extra)


@converts("Resize", "Upsample")
def convert_resizing(step: GraphStep) -> Value:
    shape = step.shape()
    scale_place = 2 if step.node.operator == "Resize" and step.opset >= 11 else 1
    rank, chosen = len(shape), step.attribute("axes")
    if chosen is not None and tuple(axis % rank for axis in chosen) != tuple(range(2, rank)):
        raise step.refuse(f"resizes the axes {chosen}", "all but batch and channels")
    if step.attribute("keep_aspect_ratio_policy", "stretch") != "stretch" or step.attribute("antialias", 0):
        raise step.refuse("keeps the aspect ratio, or smooths", "neither")
    mode, corners = _find_mode(step, rank - 2)
    spatial = slice(0, None) if chosen is not None else slice(2, None)
    if step.has(3) and (sizes := step.sizes(3)):  # either may be given as a list of none
        kept, new = sizes[: -len(sizes[spatial])], sizes[spatial]
        if [find_number(each) for each in kept] != [*shape[: len(kept)]]:
            raise step.refuse("resizes batch or channels", "positions alone")
        if all(isinstance(each, int) for each in new):
            return step.module(nn.Upsample(size=tuple(new), mode=mode, align_corners=corners))  # type: ignore[arg-type]
        return step.call(F.interpolate, step.input(), size=new, mode=mode, align_corners=corners)
    scales = step.constant(scale_place).tolist() if step.has(scale_place) else step.attribute("scales", ())
    if len(scales[spatial]) != rank - 2 or (chosen is None and any(scale != 1 for scale in scales[:2])):
        raise step.refuse(f"scales by {tuple(scales)}", "positions alone")
    return step.module(nn.Upsample(scale_factor=tuple(scales[spatial]), mode=mode, align_corners=corners))


def _find_mode(step: GraphStep, axes: int) -> tuple[str, bool | None]:
    """torch's mode and `align_corners`, which is None for modes without it."""
    before_11 = step.node.operator == "Upsample" or step.opset < 11
    mode = step.attribute("mode", "nearest")
    coordinates = step.attribute("coordinate_transformation_mode", "asymmetric" if before_11 else "half_pixel")
    rounding = step.attribute("nearest_mode", "floor" if before_11 else "round_prefer_floor")
    if mode == "nearest" and (coordinates, rounding) in NEAREST:
        return NEAREST[coordinates, rounding], None
    smooth = {"linear": LINEAR.get(axes)} | ({"cubic": "bicubic"} if axes == 2 else {})
    aligned = {"align_corners": True, "half_pixel": False, "pytorch_half_pixel": False}
    if smooth.get(mode) and coordinates in aligned and not step.attribute("exclude_outside", 0):
        return str(smooth[mode]), aligned[coordinates]
    raise step.refuse(
        f"resizes by {mode}, {coordinates}" + (f", {rounding}" if mode == "nearest" else ""),
        "linear and cubic with half_pixel or align_corners; nearest with "
        + ", ".join(f"{first} and {second}" for first, second in NEAREST),
    )
