from __future__ import annotations

from dataclasses import replace

import pytest
from vision_double import VisionDouble

from vkbackend.errors import InvalidArgument
from vkbackend.models.pictures import ImageTimes, MediaPrompt, TileRows
from vkbackend.models.vision.images import Image
from vkbackend.models.vision.limits import ImageLimits

pytestmark = pytest.mark.no_vulkan


def test_an_image_is_decoded_and_encoded_once() -> None:
    double, times = VisionDouble(), ImageTimes()
    pictures = double.pictures()
    first = pictures.prepared(Image.of_bytes("i", b"abc"), times)
    rows = pictures.rows(first, times)
    assert [len(tile.values) for tile in rows] == list(first.n_rows) == [3, 3]
    again = pictures.prepared(Image.of_bytes("i", b"abc"), times)
    assert again is first and pictures.rows(again, times) is rows and first.picture is None
    assert len(double.decoded) == len(double.encoded) == 1
    report = times.report()
    assert report["image_n"] == 2 and report["image_cache_n"] == 1
    parts = sum(report[f"image_{part}_ms"] for part in ("decode", "preprocess", "encode"))
    assert report["image_ms"] == pytest.approx(parts) and parts > 0
    assert ImageTimes().report() == {} == pictures.stats()
    pictures.count(times)
    pictures.count(times)
    stats = pictures.stats()
    assert stats["image_n"] == 4 and stats["image_ms"] == pytest.approx(2 * report["image_ms"])
    assert stats["image_kept_nbytes"] == sum(tile.values.nbytes for tile in rows)


def test_images_that_were_used_least_recently_are_dropped() -> None:
    double = VisionDouble()
    n_bytes = 2 * 3 * 12 * 4  # of an image's patches
    pictures = double.pictures(2 * n_bytes)
    for data in (b"aaa", b"bbb", b"aaa", b"ccc", b"aaa", b"bbb"):
        pictures.prepared(Image.of_bytes("i", data), ImageTimes())
    assert double.decoded == [b"aaa", b"bbb", b"ccc", b"bbb"]


def test_nothing_is_kept_without_sharing() -> None:
    double = VisionDouble()
    pictures = double.pictures(0)
    for _ in range(2):
        pictures.prepared(Image.of_bytes("i", b"aaa"), ImageTimes())
    assert double.decoded == [b"aaa", b"aaa"]


def test_the_pixels_of_a_request_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept images count, too. Each image has 2 pixels per byte here."""
    monkeypatch.setattr("vkbackend.models.pictures.IMAGE_LIMITS", ImageLimits(request_pixels=10))
    pictures, times = VisionDouble().pictures(), ImageTimes()
    for data in (b"aa", b"bb", b"c"):
        pictures.prepared(Image.of_bytes("i", data), times)
    for data in (b"aa", b"new"):
        with pytest.raises(InvalidArgument, match=r"third: .* images have 1\d pixels, and at most 10 are"):
            pictures.prepared(Image.of_bytes("i", data), replace(times), "third")
    pictures.prepared(Image.of_bytes("i", b"new"), ImageTimes())


def test_the_length_of_a_prompt_counts_rows() -> None:
    image = VisionDouble().pictures().prepared(Image.of_bytes("i", b"abcd"), ImageTimes())
    prompt = MediaPrompt((1, TileRows(image, 0), 2, TileRows(image, 1), 3))
    assert len(prompt) == 11
