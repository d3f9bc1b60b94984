"""Data: inputs, and labels if there are any, from a file or a data set of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from critical_neurons.errors import (
    InvalidFileError,
    InvalidInputError,
    InvalidSettingError,
    MissingExtraError,
    first_line,
)
from critical_neurons.io.array_files import INPUTS, LABELS, read_arrays
from critical_neurons.removal.rows import Inputs, count_rows, take_rows

FILE_SUFFIXES = (".npz", ".safetensors")
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMN = "label"
MOST_EXAMPLES = 10
LUMINANCE = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Look:
    """How images are converted to the form the model was trained on: channels, size, then (x - mean) / std."""

    channels: int | None = None
    resize: int | None = None
    mean: Sequence[float] = ()
    std: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.channels not in (None, 1, 3):
            raise InvalidSettingError(f"channels: 1 (grey) or 3 (RGB), got {self.channels}.")
        if self.resize is not None and self.resize < 1:
            raise InvalidSettingError(f"resize: a side of at least one pixel, got {self.resize}.")
        if not np.isfinite([*self.mean, *self.std]).all() or any(value <= 0 for value in self.std):
            raise InvalidSettingError("mean, std: finite numbers, and standard deviations above zero.")


AS_STORED = Look()


def is_file(source: str) -> bool:
    return source.endswith(FILE_SUFFIXES)


def load_batch(
    source: str,
    *,
    per_class: int | None = None,
    most_per_class: int | None = None,
    seed: int = 0,
    split: str = "train",
    look: Look = AS_STORED,
) -> tuple[Inputs, Tensor | None]:
    """Inputs and labels of a `.npz` or `.safetensors`, or of a Hugging Face data set, folder or id.

    A file may have no labels, and several inputs: `inputs.0`, `inputs.1`, ... or `inputs.NAME` for the arguments of
    the model. `inputs` of uint8 are images and scaled to [0, 1]. `per_class`: draw this many of every class with
    `seed`, in the order of the classes; otherwise up to `most_per_class` of a data set. `split` is for data sets.
    """
    if is_file(source):
        inputs, labels = _load_file(source, look)
        if labels is None and per_class is not None:
            raise InvalidSettingError(f"per_class: {source} holds no labels. Leave it out, or add labels.")
        if labels is None or per_class is None:
            return inputs, labels
        chosen = torch.from_numpy(choose_balanced(labels.numpy(), per_class, seed))
        return take_rows(inputs, chosen), labels[chosen]
    data, image_column = open_data_set(source, split)
    classes = check_labels(source, data.select_columns([LABEL_COLUMN]).with_format("numpy")[:][LABEL_COLUMN])
    count = most_per_class if per_class is None else per_class
    drawn = choose_balanced(classes, count, seed, allow_fewer=per_class is None)
    images = [
        _prepare(source, _scaled(source, read_pixels(source, image))[None], look)
        for image in data.select(drawn)[image_column]
    ]
    sizes = sorted({tuple(image.shape[1:]) for image in images})
    if len(sizes) > 1:
        raise InvalidInputError(
            f"{source}: the images differ in channels or size, {sizes[0]} and {sizes[-1]} among them. "
            "Make them alike with resize and channels."
        )
    return torch.cat(images), torch.from_numpy(classes[drawn])


def load_example(source: str) -> Inputs:
    """A few inputs: the first of a file, or one of every class of a data set."""
    inputs, _ = load_batch(source, per_class=None if is_file(source) else 1)
    return take_rows(inputs, torch.arange(min(MOST_EXAMPLES, count_rows(inputs))))


def _load_file(source: str, look: Look) -> tuple[Inputs, Tensor | None]:
    arrays = read_arrays(Path(source))
    given = arrays.pop(LABELS, None)
    labels = None if given is None else check_labels(source, given)
    counts = {len(each) if each.ndim else None for each in (*arrays.values(), *(() if labels is None else (labels,)))}
    if None in counts or len(counts) > 1 or (INPUTS in arrays and arrays[INPUTS].ndim < 2):
        found = ", ".join(f"{name} of shape {each.shape}" for name, each in arrays.items())
        if labels is None:
            raise InvalidInputError(f"{source}: {found}; expected (batch, ...), with one batch size.")
        raise InvalidInputError(
            f"{source}: {found} and labels of shape {labels.shape} do not fit; expected (batch, ...) and (batch,)."
        )
    if counts == {0}:
        raise InvalidInputError(f"{source}: holds no data.")
    if look != AS_STORED and INPUTS not in arrays:
        raise InvalidSettingError(f"mean, std, resize, channels: for inputs, but {source} has {', '.join(arrays)}.")
    checked = {name: _check_finite(source, each) for name, each in arrays.items()}
    if INPUTS in checked:
        inputs: Inputs = _prepare(source, _scaled(source, checked[INPUTS]), look)
    else:
        inputs = _join(source, {name.partition(".")[2]: _convert(source, each) for name, each in checked.items()})
    return inputs, None if labels is None else torch.from_numpy(labels)


def _join(source: str, read: dict[str, Tensor]) -> Inputs:
    """A tuple of positional or a dict of named arguments."""
    places = [str(place) for place in range(len(read))]
    if {*read} == {*places}:
        return tuple(read[place] for place in places)
    if not all(name.isidentifier() for name in read):
        found = ", ".join(f"{INPUTS}.{name}" for name in read)
        raise InvalidInputError(
            f"{source}: found {found}. Accepted: inputs.0, inputs.1 and so on without a gap, or names of arguments."
        )
    return read


def _check_finite(source: str, inputs: NDArray[Any]) -> NDArray[Any]:
    if inputs.dtype.kind == "f" and not (finite := np.isfinite(inputs.reshape(len(inputs), -1)).all(1)).all():
        bad = ", ".join(map(str, np.flatnonzero(~finite)[:5]))
        raise InvalidInputError(f"{source}: NaN or infinite values in data points {bad}. Give finite ones.")
    return inputs


def choose_balanced(
    labels: NDArray[np.int64], per_class: int | None, seed: int, *, allow_fewer: bool = False
) -> NDArray[np.int64]:
    """Indices of `per_class` data points of every class, drawn without replacement; all if None.

    A class with fewer is an error, unless `allow_fewer`.
    """
    if per_class is None:
        return np.arange(len(labels))
    if per_class < 1:
        raise InvalidSettingError(f"per_class: at least one, got {per_class}.")
    classes, counts = np.unique(labels, return_counts=True)
    short = [f"class {c} has {n}" for c, n in zip(classes, counts, strict=True) if n < per_class]
    if short and not allow_fewer:
        raise InvalidInputError(f"per_class: {per_class} of every class asked for, but {', '.join(short[:6])}.")
    generator = np.random.default_rng(seed)
    drawn = [
        generator.choice(np.flatnonzero(labels == c), min(n, per_class), replace=False)
        for c, n in zip(classes, counts, strict=True)
    ]
    return np.concatenate(drawn)


def open_data_set(source: str, split: str) -> tuple[Any, str]:
    """A split of a Hugging Face data set, by folder or id, and the name of its image column."""
    folder = Path(source).expanduser()
    if folder.is_file():
        raise InvalidFileError(f"{source}: data comes as {' or '.join(FILE_SUFFIXES)}, or as a data set folder.")
    if not folder.exists() and source.startswith(("/", ".", "~")):
        raise InvalidFileError(f"{source}: no such file or folder.")
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "datasets") from error
    try:
        if folder.exists():
            datasets.disable_progress_bars()
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(str(folder))
            data = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        else:
            data = datasets.load_dataset(str(folder) if folder.exists() else source, split=split)
    except Exception as error:  # the library raises what its many readers raise
        raise InvalidInputError(
            f"{source}: cannot be loaded as a data set, split {split!r} ({first_line(error)})."
        ) from error
    image_column = next((name for name in IMAGE_COLUMNS if name in data.column_names), None)
    if image_column is None or LABEL_COLUMN not in data.column_names:
        raise InvalidInputError(
            f"{source}: expected the columns {' or '.join(IMAGE_COLUMNS)}, and {LABEL_COLUMN}; found "
            f"{', '.join(data.column_names)}."
        )
    return data, image_column


def check_labels(source: str, labels: NDArray[Any]) -> NDArray[np.int64]:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise InvalidInputError(
            f"{source}: labels of shape {labels.shape} and type {labels.dtype}; expected one integer per input. "
            "Leave them out where there are no classes."
        )
    if len(labels) == 0:
        raise InvalidInputError(f"{source}: holds no data.")
    if labels.min() < 0:
        raise InvalidInputError(f"{source}: holds the label {labels.min()}; classes count from 0.")
    return labels.astype(np.int64)


def read_pixels(source: str, image: Any) -> NDArray[Any]:
    """A picture as (channels, height, width)."""
    mode = getattr(image, "mode", None)
    if mode in ("1", "P", "PA", "LA", "RGBA", "CMYK", "YCbCr"):
        image = image.convert("L" if mode in ("1", "LA") else "RGB")
    elif mode not in ("L", "RGB"):
        raise InvalidInputError(f"{source}: found {mode or type(image).__name__} images; 8-bit pictures are read.")
    pixels = np.array(image)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _scaled(source: str, inputs: NDArray[Any]) -> Tensor:
    """Images as bytes are scaled to [0, 1]."""
    if inputs.dtype == np.uint8:
        return torch.from_numpy(inputs.astype(np.float32)) / 255
    return _convert(source, inputs)


def _convert(source: str, inputs: NDArray[Any]) -> Tensor:
    if inputs.dtype.kind in "iub" and inputs.dtype != np.uint64:
        return torch.from_numpy(inputs.astype(bool if inputs.dtype.kind == "b" else np.int64))
    if inputs.dtype.kind != "f":
        raise InvalidInputError(f"{source}: inputs of type {inputs.dtype}; whole or real numbers are read.")
    return torch.from_numpy(inputs.astype(np.float64 if inputs.dtype == np.float64 else np.float32))


def _prepare(source: str, inputs: Tensor, look: Look) -> Tensor:
    if look == AS_STORED:
        return inputs
    if not inputs.is_floating_point():
        raise InvalidInputError(
            f"{source}: mean, std, resize and channels are for uint8 or real numbers; found {inputs.dtype}."
        )
    if (look.channels or look.resize) and inputs.ndim == 3:
        inputs = inputs[:, None]
    if (look.channels or look.resize) and inputs.ndim != 4:
        raise InvalidInputError(
            f"{source}: channels and resize are for images, (batch, channels, height, width); found inputs of shape "
            f"{tuple(inputs.shape)}."
        )
    if look.channels and inputs.shape[1] != look.channels:
        if inputs.shape[1] not in (1, 3):
            raise InvalidInputError(f"{source}: images of {inputs.shape[1]} channels cannot become {look.channels}.")
        grey = torch.tensor(LUMINANCE if inputs.shape[1] == 3 else (1.0,), dtype=inputs.dtype)
        inputs = (inputs * grey[:, None, None]).sum(1, keepdim=True).repeat(1, look.channels, 1, 1)
    if look.resize:
        inputs = functional.interpolate(inputs, (look.resize, look.resize), mode="bilinear", antialias=True)
    for values, name in ((look.mean, "mean"), (look.std, "std")):
        if len(values) not in (0, 1, inputs.shape[1]):
            raise InvalidSettingError(
                f"{name}: {len(values)} values for {inputs.shape[1]} channels; give one for all, or one each."
            )
    axes = (-1, *[1] * (inputs.ndim - 2))
    mean = torch.tensor([*look.mean] or [0.0], dtype=inputs.dtype).reshape(axes)
    std = torch.tensor([*look.std] or [1.0], dtype=inputs.dtype).reshape(axes)
    return (inputs - mean) / std
