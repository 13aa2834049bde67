"""Pictures of every format are decoded in a child process. Hostile files end with a typed error."""

from __future__ import annotations

import base64
import os
import random
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from fuzz.pictures import Pictures
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import KINDS, chunk, encoded, picture, png, smooth
from PIL import Image
from processes import kill, process_ends, suspend
from random_cases import examples

from vkbackend.errors import InvalidArgument
from vkbackend.models.vision import decode
from vkbackend.models.vision.data_url import picture_bytes
from vkbackend.models.vision.decode import Decoder
from vkbackend.models.vision.limits import ImageLimits

pytestmark = pytest.mark.no_vulkan


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    yield Decoder()


def pid_of(decoder: Decoder) -> int:
    worker = decoder.shared._worker
    assert worker is not None
    return worker._process.pid


# ---- what is decoded ----


@pytest.mark.parametrize(("name", "mode"), KINDS)
def test_formats_and_modes(decoder: Decoder, name: str, mode: str) -> None:
    image = picture(mode)
    lossless = {"lossless": True} if name == "WEBP" else {}
    data = encoded(image, name, **lossless)
    pixels = decoder.decode(data)
    assert pixels.dtype == np.uint8 and pixels.shape == (13, 17, 3)
    if mode == "I;16":
        grey = np.asarray(image) // 257
        expected = np.stack([grey] * 3, -1)
    elif "A" in mode:
        rgba = np.asarray(image.convert("RGBA")).astype(float)
        alpha = rgba[..., 3:] / 255
        expected = rgba[..., :3] * alpha + 255 * (1 - alpha)
    else:
        expected = np.asarray(Image.open(BytesIO(data)).convert("RGB"))
    assert np.abs(pixels.astype(float) - expected).max() <= (1 if "A" in mode else 0)


def test_a_deep_picture_is_rounded_to_8_bits(decoder: Decoder) -> None:
    grey = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    pixels = decoder.decode(encoded(Image.fromarray(grey), "PNG"))
    np.testing.assert_array_equal(pixels[..., 0], np.floor(grey / 257 + 0.5))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(decoder: Decoder, orientation: int) -> None:
    """A picture is stored in each orientation that EXIF 2.32 defines, and must be decoded upright."""
    upright = smooth(6, 9)
    rows, columns = {
        1: ("top", "left"), 2: ("top", "right"), 3: ("bottom", "right"), 4: ("bottom", "left"),
        5: ("left", "top"), 6: ("right", "top"), 7: ("right", "bottom"), 8: ("left", "bottom"),
    }[orientation]  # fmt: skip
    stored = upright.swapaxes(0, 1) if rows in ("left", "right") else upright
    stored = stored[::-1] if rows in ("bottom", "right") else stored
    stored = stored[:, ::-1] if columns in ("bottom", "right") else stored
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(stored)), "PNG", exif=exif)
    np.testing.assert_array_equal(decoder.decode(data), upright)


def test_damaged_exif_is_ignored(decoder: Decoder) -> None:
    data = encoded(picture("RGB"), "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12\0\x03")
    np.testing.assert_array_equal(decoder.decode(data), np.asarray(picture("RGB")))


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(decoder: Decoder, name: str) -> None:
    frames = [Image.new("RGB", (8, 5), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if name == "WEBP" else {}
    data = encoded(frames[0], name, save_all=True, append_images=frames[1:], duration=50, **options)
    np.testing.assert_array_equal(decoder.decode(data), np.asarray(frames[0]))


def test_other_pictures_in_a_file_are_not_decoded(decoder: Decoder) -> None:
    """The files are a GIF of 500 frames, a JPEG file with a second picture, and a JPEG file with a preview in
    EXIF."""
    red = Image.new("RGB", (8, 8), "red")
    frames = [Image.new("L", (8, 8), n % 256) for n in range(500)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(decoder.decode(data), 0)
    preview = Image.Exif()
    preview.get_ifd(0x8769)[0x927C] = encoded(Image.new("RGB", (99, 99)), "JPEG")
    expected = decoder.decode(encoded(red, "JPEG"))
    for data in (
        encoded(red, "MPO", save_all=True, append_images=[Image.new("RGB", (99, 99))]),
        encoded(red, "JPEG", exif=preview),
    ):
        np.testing.assert_array_equal(decoder.decode(data), expected)


# ---- what is refused ----

HUGE = zlib.compress(bytes(1 << 22), 9)
NAMED = {
    "SVG": b"\xef\xbb\xbf <?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>",
    "PDF": b"%PDF-1.7\n", "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "AVIF": b"\0\0\0\x1cftypavif",
    "TIFF": b"II*\0\x08\0\0\0", "HTML": b"<!DOCTYPE html><html>", "JPEG XL": b"\xff\x0a\0\0",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_other_formats_are_refused_by_name(decoder: Decoder, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"is {name}; PNG, JPEG, WebP, GIF and BMP are decoded"):
        decoder.decode(NAMED[name])


GIF_1X1 = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\xff\xff\xff\xff\0\x02\x02D\x01\0;"
# Compressing 128 MiB takes 0.4 s, so this file is made in the test.
REFUSED: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "nothing": (b"", "no bytes"),
    "text": (b"a red circle", "not a picture"),
    "many pixels": (png(100_000, 100_000, chunk(b"IDAT", HUGE)), "many pixels, at most 32000000 are"),
    "2^31 pixels wide": (png(2**31 - 1, 1, chunk(b"IDAT", HUGE)), "pixels"),
    "a long side": (png(20_000, 150, chunk(b"IDAT", HUGE)), "at most 16384 on a side"),
    "a line": (png(1000, 1, chunk(b"IDAT", HUGE)), "at most 200 times"),
    "no width": (png(0, 10, chunk(b"IDAT", HUGE)), "not a picture|empty"),
    "a large GIF frame": (GIF_1X1, "pixels"),
    "a BMP of 2^31 rows": (
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 5, -(2**31), 1, 24, 0, 0, 0, 0, 0, 0),
        "pixels|read",
    ),
    "a profile that inflates": (
        lambda: png(4, 4, chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 27), 9)), chunk(b"IDAT", HUGE)),
        "read|damaged|memory",
    ),
    "text that inflates": (
        png(4, 4, *[chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(1 << 20), 9))] * 80, chunk(b"IDAT", HUGE)),
        "read|damaged|memory",
    ),
    "no pixels": (png(4, 4), "read|damaged"),
    "a wrong checksum": (png(4, 4).replace(b"\0\0\0\4", b"\0\0\0\5", 1), "read|damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_files_are_refused(decoder: Decoder, name: str) -> None:
    data, pattern = REFUSED[name]
    with pytest.raises(InvalidArgument, match=pattern):
        decoder.decode(data() if callable(data) else data)
    assert decoder.decode(png(1, 1, chunk(b"IDAT", zlib.compress(b"\0\1\2\3")))).tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize(("name", "mode"), KINDS)
def test_half_a_file_is_refused_or_a_picture(decoder: Decoder, name: str, mode: str) -> None:
    data = encoded(picture(mode, 40, 50), name)
    with pytest.raises(InvalidArgument, match=r"damaged|cannot be read|not a picture"):
        decoder.decode(data[: len(data) // 2])


def test_a_long_file_is_refused_before_it_is_sent() -> None:
    decoder = Decoder(ImageLimits(n_bytes=1000))
    with pytest.raises(InvalidArgument, match="1001 bytes, at most 1000"):
        decoder.decode(bytes(1001))
    assert decoder.shared._worker is None


# ---- the process ----


def test_the_process_has_limits_and_is_replaced() -> None:
    decoder = Decoder()
    decoder.decode(encoded(picture("RGB"), "BMP"))
    pid = pid_of(decoder)
    limits = Path(f"/proc/{pid}/limits").read_text(encoding="utf-8")
    assert re.search(r"Max address space +1073741824 ", limits)
    assert "numpy" not in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    assert set(os.listdir(f"/proc/{pid}/fd")) == {"0", "1", "2"}
    kill(pid)
    assert decoder.decode(encoded(picture("RGB"), "BMP")).shape == (13, 17, 3)
    assert pid_of(decoder) != pid
    pid = pid_of(decoder)
    del decoder
    assert process_ends(pid)


def test_a_slow_picture_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder()
    decoder.decode(encoded(picture("RGB"), "BMP"))
    suspend(pid_of(decoder))
    monkeypatch.setattr(decode, "WALL_S", 0.1)
    with pytest.raises(InvalidArgument, match="was not decoded in 0 s"):
        decoder.decode(encoded(picture("RGB"), "BMP"))


# ---- data URLs ----


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("kind", ["image/png", "IMAGE/JPEG", "", "application/octet-stream", "image/x;a=b"])
def test_a_data_url(kind: str) -> None:
    assert picture_bytes(url(b"\x89PNG\0\xff", kind)) == b"\x89PNG\0\xff"


@pytest.mark.parametrize(
    ("wrong", "pattern"),
    [
        ("http://example.org/x.png", "begins with 'http'; nothing is fetched"),
        ("file:///etc/passwd", "begins with 'file'"),
        ("/etc/passwd", "data: URL is expected"),
        ("data:image/png,abc", "form data:image/png;base64,TEXT"),
        ("data:image/png;base64", "form data:image/png;base64,TEXT"),
        ("data:text/html;base64,AAAA", "has the type 'text/html'"),
        ("data:application/pdf;base64,AAAA", "has the type 'application/pdf'"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,AA*A", "not valid base64"),
        ("data:image/png;base64,AA\nAA", "not valid base64"),
        ("data:image/png;base64,ÄAAA", "not valid base64"),
        (url(bytes(5000)), "5001 bytes, at most 3000|bytes, at most 3000"),
    ],
)
def test_other_urls_are_refused(wrong: str, pattern: str) -> None:
    with pytest.raises(InvalidArgument, match=pattern):
        picture_bytes(wrong, ImageLimits(n_bytes=3000))


# ---- random damage ----


@pytest.fixture(scope="module")
def damage(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return Pictures(tmp_path_factory.mktemp("damage"))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=examples(200), deadline=None)
def test_random_damage_gives_a_typed_error_or_pixels(damage: Pictures, seed: int) -> None:
    assert damage.check(damage.make(random.Random(seed))) in ("accepted", "refused")
