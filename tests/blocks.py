"""Blocks: three tiny data sets in the layout of the real ones, which small networks learn in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 4
TRAIN, TEST = 100, 20
"""Images of every class. A tenth of the first are held out for validation: enough for the paper's IMIDP."""

SIDE = 7
FAINT, BRIGHT = (0, 0.9), (0.6, 1)


def write_blocks(folder: Path) -> Path:
    """A folder of data sets called as those of the paper."""
    for at, (name, column, size) in enumerate(
        [("mnist", "image", (28, 28)), ("fashion_mnist", "image", (28, 28)), ("cifar10", "img", (32, 32, 3))]
    ):
        for split, count in (("train", TRAIN), ("test", TEST)):
            generator = np.random.default_rng((at, count))
            labels = np.tile(np.arange(CLASSES), count)
            images = [draw_blocks(label, size, shift=at, generator=generator) for label in labels]
            _write(folder / name / f"{split}-00000-of-00001.parquet", column, images, labels)
    return folder


def draw_blocks(label: int, size: tuple[int, ...], *, shift: int, generator: np.random.Generator) -> Image.Image:
    """A bright block whose place tells the class, and a fainter one at the place of any class, to be mistaken."""
    image = np.zeros(size)
    for place, brightness in ((generator.integers(CLASSES), FAINT), (label, BRIGHT)):
        row, column = divmod((5 * place + shift) % 16, 4)
        image[SIDE * row : SIDE * (row + 1), SIDE * column : SIDE * (column + 1)] = generator.uniform(*brightness)
    image.flat[generator.integers(image.size)] = generator.uniform()  # no two images are alike
    return Image.fromarray((255 * image).astype(np.uint8))


def _write(path: Path, column: str, images: list[Image.Image], labels: np.ndarray) -> None:
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    features = datasets.Features({column: datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({column: images, "label": labels}, features=features).to_parquet(path)
