"""Logits of prompts with images equal the logits of transformers, for every family of projectors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, device_params, nmse, product, wide
from image_prompts import Watched, watched
from oracles import image_cases, vision
from oracles.fixture import write
from pictures import blocks
from places import GOLDEN

from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.vision.config import TokenLimits
from vkbackend.models.vision.patches import cut_patches
from vkbackend.models.vision.picture import Picture, Tile
from vkbackend.models.vision.preprocess.prepare import prepare
from vkbackend.models.vision.projector import Projector
from vkbackend.models.vision.rows import ImageRows

NUMPY = pytest.param(["numpy"], id="numpy")
# numpy, one device of each driver, two devices of one driver, and two devices of two drivers
DEVICES = [
    NUMPY,
    *(pytest.param([p.id[0]], id=p.id, marks=p.marks) for p in device_params()),
    *(p for p in DEVICE_SETS if p.id in ("0,0", "0,1")),
]
# By default, text models of the other families run with two images.
QUICK = {f"{name}-numpy" for name in ("idefics3", "pixtral+merger", "lfm2", "internvl")}
TEXT = [5, 17, 40, 33, 21, 9, 60, 2]


def bound(arch: str) -> float:
    return 1e-6 if arch.startswith("gemma") else 1e-9


def golden(name: str) -> np.ndarray:
    with np.load(GOLDEN / "images.npz") as arrays:
        logits: np.ndarray = arrays[name]
    return logits


def model_sets() -> list[Any]:
    """Return pairs (model, devices). By default the devices are numpy, and with --all every set of devices.
    Another test has Qwen3-VL."""
    on_numpy = product([name for name in image_cases.NAMES if name != "qwen3vl"], [NUMPY])
    return [*on_numpy[:1], *map(wide, on_numpy[1:]), *map(wide, product(image_cases.NAMES, DEVICE_SETS))]


@pytest.mark.parametrize(("name", "devices"), model_sets())
@pytest.mark.parametrize("n_ubatch", [24, wide(pytest.param(96))])
def test_logits_after_two_images(tmp_path: Path, name: str, devices: list[str], n_ubatch: int) -> None:
    """A step has 24 rows, fewer than both images need, and fewer than the text needs."""
    c = image_cases.case(name)
    prompt: list[int | ImageRows] = []
    for at, token in enumerate(c.tokens):
        if at in c.images:
            both_ways = name in image_cases.BOTH_WAYS
            prompt.append(ImageRows(bytes([at]) * 16, c.images[at], c.grids[at], both_ways))
        elif not c.is_image[at]:
            prompt.append(token)
    want = golden(name)
    with watched(write(c.fixture, tmp_path / "model.gguf"), devices, n_ubatch=n_ubatch) as w:
        got = []
        for n in range(len(prompt) - len(want), len(prompt)):
            w.run(prompt[: n + 1])
            got += w.logits
    assert nmse(np.array(got), want) <= bound(c.fixture.arch)


@contextmanager
def encoder(path: Path, text: Path, device: str) -> Iterator[Projector]:
    [opened] = open_devices([device], exact=True)
    with GGUF.open(text) as gguf, Projector.open(path, opened, text=gguf) as projector:
        yield projector


@contextmanager
def with_picture(
    folder: Path, name: str, devices: list[str], **options: Any
) -> Iterator[tuple[Watched, list[int | ImageRows]]]:
    """Yield the text model, and a prompt with the picture that the projector encodes on the first device."""
    with np.load(GOLDEN / "vision.npz") as arrays:
        c = image_cases.of_picture(name, arrays[name])
    text = write(c.fixture, folder / "text.gguf")
    path = write(vision.build(name), folder / "mmproj.gguf")
    with encoder(path, text, devices[0]) as projector:
        side = projector.config.patch_side
        patches = cut_patches(vision.pixels_of(name, side), side, projector.encoder.merge)
        [rows] = projector.encode(Picture(bytes(16), (Tile(patches, vision.GRIDS[name]),), (0,)))
    [(first, theirs)] = c.images.items()
    assert rows.n_rows == len(theirs)
    with watched(text, devices, n_ctx=128, **options) as w:
        yield w, [*c.tokens[:first], rows, *c.tokens[first + len(theirs) :]]


@pytest.mark.parametrize(("name", "devices"), [
    p if p.id in QUICK else wide(p) for p in product(image_cases.TEXT_OF, DEVICES)
])  # fmt: skip
def test_logits_from_pixels(tmp_path: Path, name: str, devices: list[str]) -> None:
    """Compare the logits of each token after the picture. A step has 16 rows, or all rows of a picture if
    they attend to each other."""
    want = golden(f"picture/{name}")
    with with_picture(tmp_path, name, devices, n_ubatch=16) as (w, prompt):
        got = []
        for n in range(len(prompt) - len(want), len(prompt)):
            w.run(prompt[: n + 1])
            got += w.logits
    assert nmse(np.array(got), want) <= bound(image_cases.text_of(name).arch)


@pytest.mark.wide
@pytest.mark.parametrize("devices", DEVICES)
def test_logits_from_pixels_in_slices(tmp_path: Path, devices: list[str]) -> None:
    """MiniCPM-V reads a complete picture, then its slices."""
    text = write(image_cases.text_of("minicpmv"), tmp_path / "text.gguf")
    path, want = write(vision.build("minicpmv"), tmp_path / "mmproj.gguf"), golden("sliced/minicpmv")
    with encoder(path, text, devices[0]) as projector:
        pixels = blocks(*image_cases.SLICED, seed=34)
        picture = prepare(pixels, projector.config, TokenLimits())
        rows = projector.encode(picture)
    before, after = image_cases.text_around()
    prompt: list[int | ImageRows] = [*before]
    for part in picture.layout:
        if isinstance(part, int):
            prompt.append(rows[part])
        else:
            prompt += [image_cases.MARKS[mark] for mark in re.findall(r"<[^>]+>|\n", part)]
    assert len(rows) == 5
    prompt += after
    with watched(text, devices, n_ctx=128, n_ubatch=32) as w:
        got = []
        for n in range(len(prompt) - len(want), len(prompt)):
            w.run(prompt[: n + 1])
            got += w.logits
    assert nmse(np.array(got), want) <= bound("qwen3")


@pytest.mark.wide
@pytest.mark.parametrize(("name", "devices"), product(image_cases.TEXT_OF, DEVICES))
def test_pictures_and_texts_in_one_batch(tmp_path: Path, name: str, devices: list[str]) -> None:
    """In a batch, each prompt has the same logits as alone, after the prompt and in four more steps."""
    how: dict[str, Any] = {"n_slots": 4, "n_ubatch": 256, "prefix_cache": False}
    with with_picture(tmp_path, name, devices, **how) as (w, prompt):
        [picture] = [part for part in prompt if isinstance(part, ImageRows)]
        prompts: list[list[int | ImageRows]] = [prompt, TEXT, [picture, 7, *TEXT, picture, 3], [*TEXT, *TEXT]]
        answers, alone = [], []
        for each in prompts:
            answers += w.run(each, n=5)
            alone += w.logits
        assert w.run(*prompts, n=5) == answers
        # With recurrent layers, the longest prompt needs two steps.
        assert len(w.n_rows) <= 6 and len(w.logits) == len(alone)
        together = w.logits
    for want in alone:
        assert min(nmse(got, want) for got in together) <= 1e-9
