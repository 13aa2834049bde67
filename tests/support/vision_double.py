"""A projector without a model. The rows of an image contain the image's mean color, and the number of rows is
the image's height."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from vkbackend.models.pictures import Pictures, VisionSteps
from vkbackend.models.vision.picture import Picture, Tile
from vkbackend.models.vision.rows import ImageRows

BEGIN, END = "<|user|>", "<|system|>"  # special tokens of chat_words


@dataclass
class VisionDouble:
    """Counts its calls. Each image has two tiles, with control tokens around and between them."""

    width: int = 4
    decoded: list[bytes] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)

    def decode(self, data: bytes) -> np.ndarray:
        self.decoded.append(data)
        return np.full((len(data), 2, 3), data[0], np.uint8)

    def prepare(self, pixels: np.ndarray) -> Picture:
        height = len(pixels)
        tile = Tile(np.full((height, 12), pixels.mean(), np.float32), (height, 1))
        key = hashlib.sha256(pixels.tobytes()).digest()[:16]
        return Picture(key, (tile, tile), (BEGIN, 0, END, 1, BEGIN))

    def encode(self, picture: Picture) -> list[ImageRows]:
        self.encoded.append(picture.key)
        rows = []
        for i, tile in enumerate(picture.tiles):
            values = np.full((len(tile.patches), self.width), tile.patches[0, 0], np.float32)
            key = hashlib.sha256(picture.key + bytes([i])).digest()[:16]
            rows.append(ImageRows(key, values, (1, len(values)), False))
        return rows

    def pictures(self, kept_nbytes: int = 1 << 20) -> Pictures:
        steps = VisionSteps(self.decode, self.prepare, lambda height, width: (height, height), self.encode)
        return Pictures(steps, kept_nbytes)
