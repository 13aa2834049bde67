"""The committed vision demo describes new pictures word for word. The tests cover all steps from a picture's
file to the last word."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from device_sets import DEVICE_SETS, QUICKEST
from PIL import Image

from vkbackend import LLM
from vkbackend.tools.cli import main
from vkbackend.tools.demo.shapes import new_picture
from vkbackend.tools.studies.vision_demo import described

DEMO = Path(str(files("vkbackend.models"))) / "demo"
N_NEW, MIN_RIGHT = 200, 0.95
MIN_RIGHT_HELD_OUT = 0.9


def share_right(devices: Sequence[str], n: int, held_out: bool = False) -> float:
    options = {"devices": devices, "mmproj": DEMO / "mmproj-demo-vision.gguf", "n_ctx": 64, "n_slots": 8}
    options["tensor_split"] = [1] * len(devices)  # With shares by speed, a slow device would have no share.
    with LLM(DEMO / "demo-vision.gguf", **options) as llm:
        return float(np.mean(described(llm, n, held_out)))


def test_a_few_new_pictures_are_described_exactly() -> None:
    assert share_right(QUICKEST, 4) >= 0.75


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("devices", DEVICE_SETS)
def test_200_new_pictures_are_described_exactly(devices: list[str]) -> None:
    assert share_right(devices, N_NEW) >= MIN_RIGHT


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id in ("0", "0,1")])
def test_shapes_that_training_held_out(devices: list[str]) -> None:
    assert share_right(devices, N_NEW, held_out=True) >= MIN_RIGHT_HELD_OUT


def test_generate_takes_the_demo_for_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels, scene = new_picture(0)
    path = tmp_path / "shapes.png"
    Image.fromarray(pixels).save(path)
    assert main(["generate", "--image", str(path), "--temp", "0", "-dev", *QUICKEST]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == scene.sentence
    assert "using the embedded vision demo" in err


def test_the_files_are_small() -> None:
    sizes = [path.stat().st_size for path in DEMO.glob("*demo-vision.gguf")]
    assert len(sizes) == 2 and sum(sizes) <= 3_000_000
