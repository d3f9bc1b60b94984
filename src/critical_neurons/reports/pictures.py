"""Pictures: input images as thumbnails embedded in the page."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from critical_neurons.core.structure import Floats

SIDE = 64
"""Largest height and width of a thumbnail, in pixels."""

MOST_PICTURES = 60


def draw_pictures(images: Floats) -> list[str]:
    """Images (count, 1 or 3 channels, height, width) with any range of values as `data:` URLs of PNG files.

    All are scaled together, from their lowest value to their highest: this nearly undoes a normalisation.
    """
    if not images.size:
        return []
    coarser = max(1, -(-max(images.shape[2:]) // SIDE))
    low, high = float(images.min()), float(images.max())
    levels = (images - low) * (255 / (high - low if high > low else 1.0))
    small = _shrink(levels, coarser).round().astype(np.uint8)
    return ["data:image/png;base64," + base64.b64encode(_write_png(each)).decode() for each in small]


def _shrink(images: Floats, factor: int) -> Floats:
    """Average pooling by `factor`; incomplete windows at the edges are dropped."""
    count, channels, height, width = images.shape
    height, width = (max(1, side // factor) for side in (height, width))
    cut = images[:, :, : height * factor, : width * factor]
    means: Floats = cut.reshape(count, channels, height, -1, width, cut.shape[3] // width).mean(axis=(3, 5))
    return means


def _write_png(image: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    channels, height, width = image.shape
    lines = image.transpose(1, 2, 0).reshape(height, width * channels)
    packed = zlib.compress(b"".join(b"\0" + line.tobytes() for line in lines), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
