from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from vkbackend.errors import InvalidArgument
from vkbackend.models.vision import images
from vkbackend.models.vision.images import Image, image_of, image_of_base64, image_of_part, image_of_url
from vkbackend.models.vision.limits import ImageLimits

pytestmark = pytest.mark.no_vulkan

DATA = b"GIF89a and so on"
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()


def test_all_forms_of_a_file_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(DATA)
    forms = [path, str(path), DATA, bytearray(DATA), URL, URL.replace("data:", "DATA:", 1), memoryview(DATA)]
    parsed = [image_of("image", form) for form in forms]
    assert {(image.data, image.digest) for image in parsed} == {(DATA, parsed[0].digest)}
    assert image_of("image", parsed[0]) is parsed[0]
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    for form in (part, part | {"image_url": URL}, {"type": "image", "image": path}):
        assert image_of_part("p", form).digest == parsed[0].digest


def test_pixels_depend_on_their_shape() -> None:
    pixels = np.arange(24, dtype=np.uint8)
    digests = {image_of("i", pixels.reshape(h, w, 3)).digest for h, w in ((2, 4), (4, 2), (1, 8))}
    assert len(digests) == 3
    upper = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)[:2]
    assert image_of("i", upper[:, ::2]).digest == image_of("i", upper[:, ::2].copy()).digest


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (3, "expected a path"),
        (b"", "the image has 0 bytes"),
        (np.zeros((2, 2), np.uint8), "expected uint8 [height, width, 3]"),
        (np.zeros((2, 2, 3), np.float32), "expected uint8 [height, width, 3]"),
        (np.zeros((0, 2, 3), np.uint8), "expected uint8 [height, width, 3]"),
        ("no/such.png", "cannot be read"),
        ("a\0b", "cannot be read"),
        ("http://host/a.png", "nothing is fetched"),
        ("HTTPS://host/a.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("file:/etc/passwd", "nothing is fetched"),
        ("data:image/png,raw", "must have the form"),
        ("data:image/png;base64,!", "not valid base64"),
        ("data:image/png;base64,QUJ", "not valid base64"),
        ("data:image/png;base64,", "the image has 0 bytes"),
    ],
)
def test_other_values_are_refused(value: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(why)) as refusal:
        image_of("image", value)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("value", [None, 3, ["x"], "/etc/passwd", "x" * 5000])
def test_a_url_is_a_data_url(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        image_of_url("url", value)
    with pytest.raises(InvalidArgument):
        image_of_part("p", {"type": "image_url", "image_url": {"url": value}})


def test_the_size_is_limited_before_decoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(images, "IMAGE_LIMITS", ImageLimits(n_bytes=12))
    assert Image.of_bytes("i", bytes(12)).data == bytes(12)
    path = tmp_path / "large.png"
    path.write_bytes(bytes(13))
    for refuse in (
        lambda: image_of("i", path),
        lambda: image_of_base64("i", base64.b64encode(bytes(13)).decode()),
    ):
        with pytest.raises(InvalidArgument, match="has 13 bytes, expected 1 to 12"):
            refuse()
    with pytest.raises(InvalidArgument, match="in base64"):
        image_of_base64("i", b"QQ==")


def test_pillows_images_are_upright_and_on_white() -> None:
    clear = Pillow.new("RGBA", (3, 2), (9, 9, 9, 0))
    assert (image_of("i", clear).data == np.full((2, 3, 3), 255, np.uint8)).all()
    turned = Pillow.new("RGB", (3, 2))
    turned.putpixel((0, 0), (250, 0, 0))
    exif = turned.getexif()
    exif[0x0112] = 6  # turn clockwise
    buffer = BytesIO()
    turned.save(buffer, "PNG", exif=exif)
    pixels = image_of("i", Pillow.open(buffer)).data
    assert isinstance(pixels, np.ndarray)
    assert pixels.shape == (3, 2, 3) and pixels[0, 1].tolist() == [250, 0, 0]


def test_data_urls_hold_the_same_image() -> None:
    assert image_of("i", image_of("i", DATA).data_url()).data == DATA
    assert image_of("i", DATA).data_url().startswith("data:image/gif;")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    png = image_of("i", image_of("i", pixels).data_url()).data
    assert isinstance(png, bytes) and (np.asarray(Pillow.open(BytesIO(png))) == pixels).all()
