"""Test images on the command line: --mmproj, --image, /image, and -hf."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_vision import write_projector

from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.cli import main, parse_line
from vkbackend.tools.flags import vision
from vkbackend.tools.flags.vision import image_files, settle_projector

pytestmark = pytest.mark.no_vulkan

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf", 64)


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "red.png", tmp_path / "blue, dark.png"]
    for path, color in zip(paths, ((200, 20, 20), (20, 20, 90)), strict=True):
        Image.fromarray(np.full((50, 80, 3), color, np.uint8)).save(path)
    return [str(path) for path in paths]


@pytest.fixture
def run(models: Path, projector: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    files = "-m", str(models / "stories-narrow-F16.gguf"), "--mmproj", str(projector)

    def call(command: str, *words: str) -> tuple[int, str, str]:
        code = main([command, *files, "-dev", "numpy", "-n", "4", "--temp", "0", *words])
        return code, *capsys.readouterr()

    return call


def test_generate_reads_images(run: Run, images: list[str]) -> None:
    def answer(*words: str) -> dict[str, Any]:
        code, out, err = run("generate", "--json", *words)
        assert code == 0, err
        return json.loads(out)

    both = answer("-p", "a <__media__> b <__media__>", "--image", images[0], "--image", images[1])
    assert sum(token < 0 for token in both["prompt_tokens"]) == 8 and both["timings"]["image_n"] == 2
    assert [row["device"] for row in both["memory"]] == ["numpy", "numpy (projector)"]
    assert both["memory"][1]["weights"] > 100_000 and both["memory"][1].keys() == both["memory"][0].keys()


def test_errors_name_the_file(run: Run, tmp_path: Path) -> None:
    for data, why in ((b"", "the image has 0 bytes"), (b"GIF89a", "picture")):
        path = tmp_path / "bad.gif"
        path.write_bytes(data)
        code, _, err = run("generate", "-p", "x", "--image", str(path))
        assert code == 2 and f"{path}: " in err.replace("\n", "") and why in err and "multimodal" not in err
    code, _, err = run("generate", "-p", "x", "--image", "missing.png")
    assert code == 2 and "the image 'missing.png' cannot be read: No such file" in err.replace("\n", " ")
    assert "multimodal" not in err


@pytest.mark.wide
def test_errors_and_times_of_images(run: Run, images: list[str]) -> None:
    code, _, err = run("generate", "-p", "<__media__><__media__>", "--image", images[0])
    assert code == 2 and "2 times <__media__> for 1 images" in err
    code, _, err = run("generate", "-p", "x", "--image", "missing.png")
    assert code == 2 and "'missing.png' cannot be read" in err
    _, _, err = run("generate", "-p", "x", "--image", images[0])
    assert "images      1" in err and "encode" in err


@pytest.mark.wide
def test_chat_shows_images(run: Run, images: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    saved = tmp_path / "chat.json"
    typed = [f"/image {images[0]}", "/image missing.png", "what?", f"/image '{images[1]}' and this?",
             f"/save {saved}"]  # fmt: skip
    monkeypatch.setattr("vkbackend.tools.chat.messages", lambda first: [*([first] if first else []), *typed])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    code, _, err = run("chat", "-c", "512", "-p", "hello", "--image", images[1])
    assert code == 0, err
    assert "images for the next message: 1" in err and "'missing.png' cannot be read" in err
    asked = [
        message["content"]
        for message in json.loads(saved.read_text(encoding="utf-8"))
        if message["role"] == "user"
    ]
    assert [[part["type"] for part in content] for content in asked] == 3 * [["image_url", "text"]]
    assert [content[1]["text"] for content in asked] == ["hello", "what?", "and this?"]
    urls = [content[0]["image_url"]["url"] for content in asked]
    assert urls[0] == urls[2] != urls[1] and urls[0].startswith("data:image/png;base64,")


def test_a_comma_separates_files(images: list[str]) -> None:
    args = argparse.Namespace(image=[images[1], f"{images[0]},b.png"])
    assert image_files(args) == [images[1], images[0], "b.png"]


def parsed(*words: str) -> argparse.Namespace:
    return parse_line(["generate", *words])[0]


def test_devices_of_the_projector() -> None:
    assert parsed("-mmdev", "1").mmproj_device == "1"
    assert parsed("--no-mmproj-offload").mmproj_device == "none"
    assert parsed("--no-mmproj-offload", "--mmproj-offload").mmproj_device is None


def test_the_hub_has_a_projector(
    projector: Path, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = [str(projector)]
    monkeypatch.setattr(vision, "fetch_projector", lambda name, file: fetched[0])
    for words, wanted in (
        ((), str(projector)),
        (("--no-mmproj",), None),
        (("-mm", "x.gguf"), "x.gguf"),
    ):
        args = parsed("-hf", "me/x", *words)
        settle_projector(args)
        assert args.mmproj == wanted
    fetched[0] = str(models / "stories-narrow-F16.gguf")  # a projector of an unsupported type
    args = parsed("-hf", "me/x")
    settle_projector(args)
    assert args.mmproj is None and "no images: " in args.notes[0]
    with GGUF.open(projector) as gguf:
        assert gguf.architecture == "clip"
