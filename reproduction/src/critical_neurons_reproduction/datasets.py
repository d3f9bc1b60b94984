"""Datasets: MNIST, Fashion-MNIST, CIFAR-10 and similar ones, as images of 32x32 pixels, three channels, in [0, 1].

Decoded images are cached in their original size; resizing takes a second.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional

from critical_neurons.core.documents import read_file
from critical_neurons.core.files import check_writable, make_folder, write_atomically
from critical_neurons.errors import InvalidFileError, InvalidInputError
from critical_neurons.io.data import LABEL_COLUMN, check_labels, open_data_set, read_pixels

HUB_IDS = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
}
"""The paper's data sets on the Hugging Face hub."""

PICTURES = {"mnist": "0f8a9f07207246f3", "fashion_mnist": "36c389d05bdab4fd", "cifar10": "b3ed270b2fe67a3e"}
"""Expected value of `digest_pictures`. A copy recompressed as JPEG has a different one."""

CHANNELS, SIZE = 3, 32
VALIDATION_SHARE = 0.1
SPLIT_SEED = 0
"""The validation split is the same in every experiment, whatever its own seed."""

DIGITS = 16
"""Length of a digest in hexadecimal."""

CHUNK = 1000
"""Images decoded or resized at once."""

CACHE = Path("~/.cache/critical_neurons")
CACHE_VERSION = 1
LARGEST_CACHE = 2**36

ACCEPTED = (
    "Accepted: a folder that Hugging Face datasets reads, with the splits train and test and the columns image or "
    f"img, and label; or an id on its hub, in the paper {', '.join(HUB_IDS.values())}. To fetch one into "
    f"a folder: hf download {HUB_IDS['mnist']} --repo-type dataset --local-dir mnist"
)


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """inputs (images, 3, 32, 32) in [0, 1] and labels (images,); `load_stored` keeps the stored shape. Channels of
    grey images share memory."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Tensor) -> LabelledImages:
        return LabelledImages(self.inputs[rows], self.labels[rows])

    @cached_property
    def digest(self) -> str:
        """A SHA-256 digest of images and labels. Takes a second for a large part, once."""
        found = hashlib.sha256(f"{tuple(self.inputs.shape)} {self.inputs.dtype}".encode())
        for values in (*torch.split(self.inputs, CHUNK), self.labels):
            found.update(values.contiguous().numpy().data)
        return found.hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """`validation` is held out from the training split and not in `training`. Classes count from 0."""

    training: LabelledImages
    validation: LabelledImages
    test: LabelledImages

    @property
    def classes(self) -> int:
        return int(self.training.labels.max()) + 1


def load_dataset(source: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None) -> Dataset:
    """A Hugging Face data set with the splits train and test: a folder, an id on the hub, or a key of `HUB_IDS`.

    A fixed tenth of every class of the training split is held out for validation. Decoded images are kept in the
    folder `cache`, under a digest of the files (folder) or of the id (hub, which is queried once only).
    """
    name, tensors = _open(source, cache)
    labels = tensors["train_labels"]
    training, held_out = _hold_out(name, labels.numpy())
    strangers = np.setdiff1d(tensors["test_labels"], labels)
    if len(strangers):
        raise InvalidInputError(
            f"{name}: the label {strangers[0]} is in the split test, but not in train. {ACCEPTED}"
        )
    images = tensors["train_images"]
    return Dataset(
        LabelledImages(_resize(images[training]), labels[training]),
        LabelledImages(_resize(images[held_out]), labels[held_out]),
        LabelledImages(_resize(tensors["test_images"]), tensors["test_labels"]),
    )


def load_stored(
    source: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None
) -> tuple[LabelledImages, LabelledImages]:
    """The splits train and test as stored: original order and image size, no validation split; values in [0, 1]."""
    _, tensors = _open(source, cache)
    training, test = (
        LabelledImages(tensors[f"{split}_images"].float() / 255, tensors[f"{split}_labels"])
        for split in ("train", "test")
    )
    return training, test


def digest_pictures(source: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None) -> str:
    """A digest of all pixels and labels of a data set, independent of the image format."""
    return bytes(_digest(_open(source, cache)[1]).tolist()).hex()[:DIGITS]


def _open(source: str | os.PathLike[str], cache: str | os.PathLike[str] | None) -> tuple[str, Mapping[str, Tensor]]:
    """The name of the data set, and its pictures and labels by split."""
    name = os.fspath(source)
    if not Path(name).expanduser().exists():
        name = HUB_IDS.get(name, name)
    kept = make_folder(Path(cache or CACHE).expanduser()) / f"{_name_cache(name)}.safetensors"
    return name, _read_cache(kept) or _fill_cache(kept, name)


def _name_cache(name: str) -> str:
    """The last part of the source's name, for readability, and a digest of its content."""
    folder = Path(name).expanduser()
    found = hashlib.sha256(f"version {CACHE_VERSION}\n".encode())
    if folder.is_dir():
        paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        for path in sorted(path for path in paths if not any(part.startswith(".") for part in path.parts)):
            with (folder / path).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            found.update(f"{path.as_posix()} {content}\n".encode())
    else:
        found.update(name.encode())
    return f"{folder.resolve().name or 'data'}-{found.hexdigest()[:16]}"


def _read_cache(path: Path) -> Mapping[str, Tensor] | None:
    """None if the file is missing or damaged: the images are then decoded again."""
    try:
        tensors = load(read_file(path, LARGEST_CACHE))
    except (InvalidFileError, SafetensorError):
        return None
    digest = tensors.pop("digest", None)
    return tensors if digest is not None and torch.equal(digest, _digest(tensors)) else None


def _fill_cache(path: Path, name: str) -> Mapping[str, Tensor]:
    check_writable(path)
    tensors: dict[str, Tensor] = {}
    for split in ("train", "test"):
        tensors[f"{split}_images"], tensors[f"{split}_labels"] = _decode(name, split)
    write_atomically(path, save({**tensors, "digest": _digest(tensors)}))
    return tensors


def _digest(tensors: Mapping[str, Tensor]) -> Tensor:
    found = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        found.update(f"{name} {tuple(values.shape)}".encode())
        found.update(values.numpy().data)
    return torch.tensor(list(found.digest()), dtype=torch.uint8)


def _decode(name: str, split: str) -> tuple[Tensor, Tensor]:
    """Images (images, channels, height, width) in uint8, as stored, and their labels."""
    if (Path(name).expanduser() / "state.json").exists():
        raise InvalidInputError(f"{name}: a single split, without separate test images. {ACCEPTED}")
    try:
        data, column = open_data_set(name, split)
    except (InvalidFileError, InvalidInputError) as error:
        raise type(error)(f"{error} {ACCEPTED}") from error
    labels = check_labels(name, data.select_columns([LABEL_COLUMN]).with_format("numpy")[:][LABEL_COLUMN])
    chunks: list[NDArray[np.uint8]] = []
    try:
        for rows in data.select_columns([column]).iter(CHUNK):
            images = [read_pixels(name, image) for image in rows[column]]
            shapes = {image.shape for image in (*images, *(chunk[0] for chunk in chunks[:1]))}
            if len(shapes) > 1:
                raise InvalidInputError(
                    f"{name}: the images of the split {split} differ in channels or size, {min(shapes)} and "
                    f"{max(shapes)} among them. Accepted: images of one shape."
                )
            chunks.append(np.stack(images))
    except (OSError, SyntaxError) as error:  # what Pillow raises for pictures it cannot read
        raise InvalidInputError(f"{name}: the split {split} holds a damaged picture ({error}).") from error
    return torch.from_numpy(np.ascontiguousarray(np.concatenate(chunks))), torch.from_numpy(labels)


def _hold_out(name: str, labels: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Stratified split: rows for training and for validation, with the class frequencies of the whole."""
    generator = np.random.default_rng(SPLIT_SEED)
    held_out = []
    for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
        if count < 2:
            raise InvalidInputError(
                f"{name}: class {label} has one image for training; one more is needed for validation."
            )
        rows = generator.permutation(np.flatnonzero(labels == label))
        held_out.append(rows[: max(1, round(VALIDATION_SHARE * count))])
    validation = np.sort(np.concatenate(held_out))
    return torch.from_numpy(np.setdiff1d(np.arange(len(labels)), validation)), torch.from_numpy(validation)


def _resize(images: Tensor) -> Tensor:
    """The same preprocessing as `io.data` with `Look(channels=3, resize=32)`."""
    resized = torch.empty(len(images), images.shape[1], SIZE, SIZE)
    for rows, target in zip(torch.split(images, CHUNK), torch.split(resized, CHUNK), strict=True):
        scaled = rows.float() / 255
        if scaled.shape[2:] != target.shape[2:]:
            scaled = functional.interpolate(scaled, (SIZE, SIZE), mode="bilinear", antialias=True).clamp_(0, 1)
        target.copy_(scaled)
    return resized.expand(-1, CHANNELS, -1, -1)
