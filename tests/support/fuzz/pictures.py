"""Damaged pictures of every format."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from pictures import KINDS, chunk, encoded, picture
from PIL import Image

from fuzz.damage import damaged
from fuzz.kind import Wrong
from vkbackend.errors import InvalidArgument
from vkbackend.models.vision.decode import Decoder
from vkbackend.models.vision.limits import ImageLimits

LIMITS = ImageLimits(n_pixels=1_000_000, cpu_s=5)
PIECES = (
    b"\xff\xe1\0\x0eExif\0\0II*\0\xff\xff",
    b"\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03\x01\x22\0",
    b"VP8X\x0a\0\0\0\x12\0\0\0\xff\xff\xff\xff\xff\xff",
    b"!\xff\x0bNETSCAPE2.0\x03\x01\0\0\0",
    *(b"\xff\xd9", b"RIFF", b"ANMF", b",\0\0\0\0", b"BM"),
    *(chunk(b"tRNS", b"\0\1"), chunk(b"acTL", struct.pack(">II", 9, 0)), chunk(b"iCCP", b"x\0\0x\x9c")),
    *(chunk(b"eXIf", b"MM\0*\0\0\0\x08"), chunk(b"IEND", b"")),
)


def sources() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [picture("RGB", seed=seed) for seed in range(3)]
    several = {"save_all": True, "append_images": frames[1:]}
    return [
        *(encoded(picture(mode), name) for name, mode in KINDS),
        *(encoded(frames[0], name, **several) for name in ("GIF", "WEBP", "PNG")),
        *(encoded(frames[0], name, exif=exif) for name in ("JPEG", "PNG", "WEBP")),
        encoded(frames[0], "JPEG", progressive=True, optimize=True),
        encoded(frames[0], "WEBP", lossless=True),
    ]


class Pictures:
    """The decoder must refuse a file, or return pixels within its limits. If its child process ends, the case
    counts as "ended"."""

    deadline_s = 30.0

    def __init__(self, folder: Path) -> None:
        self._sources = sources()
        self._decoder = Decoder(LIMITS)

    def make(self, rng: random.Random) -> bytes:
        return damaged(rng, rng.choice(self._sources), PIECES)

    def check(self, case: bytes) -> str:
        try:
            pixels = self._decoder.decode(case)
        except InvalidArgument as error:
            ended = any(words in str(error) for words in ("ended the process", "takes more", "took more"))
            return "ended" if ended else "refused"
        if pixels.ndim != 3 or not pixels.size or pixels.nbytes > 3 * LIMITS.n_pixels:
            raise Wrong(f"pixels of the shape {pixels.shape}")
        return "accepted"
