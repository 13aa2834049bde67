"""The committed vision demo describes new pictures word for word: from a picture's file to the last word."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from device_sets import DEVICE_SETS, QUICKEST
from pictures import encoded
from PIL import Image

from vkbackend import LLM
from vkbackend.tools.cli import main
from vkbackend.tools.demo.shapes import new_picture

DEMO = Path(str(files("vkbackend.models"))) / "demo"
N_NEW, MIN_RIGHT = 200, 0.95


def picture(number: int) -> tuple[bytes, str]:
    """Return a PNG that the model never saw, and its sentence."""
    pixels, scene = new_picture(number)
    return encoded(Image.fromarray(pixels), "PNG"), scene.sentence


def share_right(devices: Sequence[str], n: int) -> float:
    pictures = [picture(number) for number in range(n)]
    prompts = [{"prompt_string": "", "multimodal_data": [data]} for data, _ in pictures]
    options = {"devices": devices, "mmproj": DEMO / "mmproj-demo-vision.gguf", "n_ctx": 64, "n_slots": 8}
    with LLM(DEMO / "demo-vision.gguf", **options) as llm:
        answers = llm.generate(prompts, max_tokens=40, temperature=0)
    return float(np.mean([a.text.strip() == s for a, (_, s) in zip(answers, pictures, strict=True)]))


def test_a_few_new_pictures_are_described_exactly() -> None:
    assert share_right(QUICKEST, 4) >= 0.75


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("devices", DEVICE_SETS)
def test_200_new_pictures_are_described_exactly(devices: list[str]) -> None:
    assert share_right(devices, N_NEW) >= MIN_RIGHT


def test_generate_takes_the_demo_for_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, sentence = picture(0)
    path = tmp_path / "shapes.png"
    path.write_bytes(data)
    assert main(["generate", "--image", str(path), "--temp", "0", "-dev", *QUICKEST]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == sentence
    assert "using the embedded vision demo" in err


def test_the_files_are_small() -> None:
    sizes = [path.stat().st_size for path in DEMO.glob("*demo-vision.gguf")]
    assert len(sizes) == 2 and sum(sizes) <= 3_000_000
