"""Turns the images of a prompt into rows: decodes, preprocesses, and asks the engine to encode.

Recently used images are kept, so later turns of a conversation do not compute them again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.answers import Answers
from vkbackend.models.engine.messages import EncodeTile
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.vision.config import VisionConfig
from vkbackend.models.vision.decode import Decoder
from vkbackend.models.vision.images import Image
from vkbackend.models.vision.limits import IMAGE_LIMITS
from vkbackend.models.vision.picture import Picture, Tile
from vkbackend.models.vision.preprocess.prepare import counts, prepare
from vkbackend.models.vision.rows import ImageRows

MAX_IMAGES = 128  # of a prompt
KEPT_NBYTES = 256 << 20
NO_VISION = "this model was opened without a projector, which images need; give its file (--mmproj, mmproj=)"


@dataclass(slots=True)
class ImageTimes:
    """The seconds that the images of a request took, and their pixels. `n_kept` of the `n` images were kept
    from earlier requests and took no time."""

    n: int = 0
    n_pixels: int = 0
    n_kept: int = 0
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    encode_s: float = 0.0

    def add(self, times: ImageTimes) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(times, name))

    def add_pixels(self, n: int) -> None:
        """Raises InvalidArgument if the images together have too many pixels."""
        self.n_pixels += n
        check_pixels(self.n_pixels)

    def report(self) -> dict[str, float]:
        """Return the public timings, or none without images."""
        if not self.n:
            return {}
        parts = {"decode": self.decode_s, "preprocess": self.preprocess_s, "encode": self.encode_s}
        times = {f"image_{part}_ms": 1e3 * seconds for part, seconds in parts.items()}
        return {"image_n": self.n, "image_cache_n": self.n_kept, "image_ms": sum(times.values()), **times}


@dataclass(eq=False, slots=True)
class PreparedImage:
    """An image after preprocessing. `n_pixels` counts the pixels of the original image, and `n_rows` lists
    the rows of each tile. `rows` are None until the image is encoded. Encoding drops the patches of
    `picture`."""

    n_pixels: int
    layout: tuple[str | int, ...]
    n_rows: tuple[int, ...]
    picture: Picture | None
    rows: list[ImageRows] | None = None

    @property
    def nbytes(self) -> int:
        patches = [tile.patches for tile in self.picture.tiles] if self.picture else []
        return sum(array.nbytes for array in [*patches, *(rows.values for rows in self.rows or ())])


@dataclass(frozen=True, eq=False, slots=True)
class TileRows:
    """The rows of a tile, as a part of a prompt."""

    image: PreparedImage
    tile: int

    @property
    def n_rows(self) -> int:
        return self.image.n_rows[self.tile]


Piece = int | TileRows


@dataclass(frozen=True, eq=False, slots=True)
class MediaPrompt:
    """A prompt of token ids and images. Its length includes the rows of the images."""

    pieces: tuple[Piece, ...]
    times: ImageTimes = field(default_factory=ImageTimes)

    def __len__(self) -> int:
        return n_tokens(self.pieces)


def n_tokens(pieces: Sequence[Piece]) -> int:
    return sum(1 if isinstance(piece, int) else piece.n_rows for piece in pieces)


def media_prompt(pieces: Sequence[Piece], times: ImageTimes | None = None) -> list[int] | MediaPrompt:
    """Return a MediaPrompt, or a list if the pieces have no image."""
    ids = [piece for piece in pieces if isinstance(piece, int)]
    return ids if len(ids) == len(pieces) else MediaPrompt(tuple(pieces), times or ImageTimes())


@dataclass(frozen=True, slots=True)
class VisionSteps:
    """The steps from an image's file to its rows. `prepare` gets pixels u8 [height, width, 3]. `counts`
    returns how many rows each tile of an image of (height, width) has."""

    decode: Callable[[bytes], np.ndarray]
    prepare: Callable[[np.ndarray], Picture]
    counts: Callable[[int, int], tuple[int, ...]]
    encode: Callable[[Picture], list[ImageRows]]


def vision_steps(options: Options, ask: Callable[[Callable[[int], EncodeTile]], Answers]) -> VisionSteps:
    """Return the steps of the projector's family. `ask` sends a request to the engine, which has the
    projector. Raises GGUFError, UnsupportedModel."""
    assert options.mmproj is not None
    limits = options.image_limits
    with GGUF.open(options.mmproj) as gguf:
        config = VisionConfig.from_gguf(gguf)

    def rows_of(key: bytes, index: int, tile: Tile) -> ImageRows:
        (event,) = ask(lambda id_: EncodeTile(id_, key, index, tile)).events()
        assert event.image is not None
        return event.image

    return VisionSteps(
        decode=Decoder().decode,
        prepare=lambda pixels: prepare(pixels, config, limits),
        counts=lambda height, width: counts(height, width, config, limits),
        encode=lambda picture: [rows_of(picture.key, i, tile) for i, tile in enumerate(picture.tiles)],
    )


class Pictures:
    """Threads may share it. `kept_nbytes` limits the patches and rows that are kept; 0: no image is kept."""

    def __init__(self, steps: VisionSteps, kept_nbytes: int = KEPT_NBYTES) -> None:
        self._steps, self._kept_nbytes = steps, kept_nbytes
        self._kept: OrderedDict[str, PreparedImage] = OrderedDict()
        self._lock = Lock()
        self._total = ImageTimes()

    def stats(self) -> dict[str, float]:
        """Return the sums of all requests, as in `ImageTimes.report`, and `image_kept_nbytes`."""
        with self._lock:
            n_bytes = sum(image.nbytes for image in self._kept.values())
            return {**self._total.report(), "image_kept_nbytes": n_bytes} if self._total.n else {}

    def count(self, times: ImageTimes) -> None:
        with self._lock:
            self._total.add(times)

    def prepared(self, image: Image, times: ImageTimes, name: str = "image") -> PreparedImage:
        """Decode and preprocess an image, unless it is kept. Raises InvalidArgument, with the argument's
        `name`, if the image cannot be used or if the images of `times` have too many pixels. Also raises
        Timeout."""
        times.n += 1
        try:
            kept = self._find(image.digest)
            if kept is None:
                return self._new(image, times)
            times.n_kept += 1
            times.add_pixels(kept.n_pixels)
            return kept
        except InvalidArgument as error:
            raise InvalidArgument(f"{image.path or name}: {error}", argument=name) from None

    def _find(self, digest: str) -> PreparedImage | None:
        with self._lock:
            kept = self._kept.get(digest)
            if kept is not None:
                self._kept.move_to_end(digest)
            return kept

    def _new(self, image: Image, times: ImageTimes) -> PreparedImage:
        began = time.perf_counter()
        pixels = self._steps.decode(image.data) if isinstance(image.data, bytes) else image.data
        decoded = time.perf_counter()
        n_pixels = pixels.shape[0] * pixels.shape[1]
        times.add_pixels(n_pixels)
        picture = self._steps.prepare(pixels)
        times.decode_s += decoded - began
        times.preprocess_s += time.perf_counter() - decoded
        n_rows = self._steps.counts(*pixels.shape[:2])
        return self._keep(image.digest, PreparedImage(n_pixels, picture.layout, n_rows, picture))

    def rows(self, image: PreparedImage, times: ImageTimes) -> list[ImageRows]:
        """Return the rows of each tile. Raises the errors of the engine."""
        picture, rows = image.picture, image.rows  # Read in this order, because another thread may set both.
        if rows is None:
            assert picture is not None
            began = time.perf_counter()
            image.rows = rows = self._steps.encode(picture)
            times.encode_s += time.perf_counter() - began
            image.picture = None
        return rows

    def _keep(self, digest: str, image: PreparedImage) -> PreparedImage:
        if not self._kept_nbytes:
            return image
        with self._lock:
            image = self._kept.setdefault(digest, image)
            self._kept.move_to_end(digest)
            n_bytes = sum(one.nbytes for one in self._kept.values())
            while n_bytes > self._kept_nbytes and len(self._kept) > 1:
                n_bytes -= self._kept.popitem(last=False)[1].nbytes
        return image


def check_pixels(n: int) -> None:
    """Raises InvalidArgument for `n` pixels above the limit of a request."""
    if n > (most := IMAGE_LIMITS.request_pixels):
        raise InvalidArgument(
            f"up to here, the request's images have {n} pixels, and at most {most} are allowed; make them "
            "smaller"
        )


def check_count(name: str, images: Collection[object]) -> None:
    """Raises InvalidArgument for more than MAX_IMAGES images."""
    if len(images) > MAX_IMAGES:
        raise InvalidArgument(
            f"{name}: {len(images)} images, at most {MAX_IMAGES} are allowed", argument=name
        )
