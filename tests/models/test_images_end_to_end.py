"""Compute the next token after an image on devices, with the files of a projector and a text model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS, QUICKEST
from PIL import Image as Pillow
from tiny_vision import write_projector

from vkbackend import LLM
from vkbackend.errors import GGUFError, InvalidArgument, PromptTooLong, UnsupportedModel
from vkbackend.models.conversation import Chat
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.prompt_pieces import MARKER
from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.prepare import prepare
from vkbackend.models.vision.projector import Projector

N_ROWS = 4
TEXT = f"Once upon {MARKER} there was"


def color(*rgb: int) -> np.ndarray:
    return np.full((50, 80, 3), rgb, np.uint8)


RED, BLUE = color(200, 20, 20), color(20, 20, 200)


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf", 64)


@pytest.fixture(scope="module")
def llm(models: Path, projector: Path) -> Iterator[LLM]:
    path = models / "stories-narrow-F16.gguf"
    with LLM(path, devices=QUICKEST, mmproj=projector, mmproj_device="none", n_ctx=256, n_slots=2) as llm:
        yield llm


def prompt(*images: Any, text: str = TEXT) -> dict[str, Any]:
    return {"prompt_string": text, "multimodal_data": list(images)}


def test_the_rows_are_the_projectors(llm: LLM, projector: Path) -> None:
    """A separate projector computes rows of an image. A prompt with these rows gives the same tokens."""
    with GGUF.open(projector) as gguf:
        config = VisionConfig.from_gguf(gguf)
    picture = prepare(RED, config, TokenLimits())
    with Projector.open(projector, open_devices(["numpy"])[0]) as separate:
        (rows,) = separate.encode(picture)
    begin, end = llm.tokenize("Once upon "), llm.tokenize(" there was", add_special=False)
    expected = llm.generate([*begin, rows, *end], 8, temperature=0)
    answer = llm.generate(prompt(RED), 8, temperature=0)
    assert answer.tokens == expected.tokens and answer.prompt_tokens == expected.prompt_tokens
    assert sum(token < 0 for token in answer.prompt_tokens) == rows.n_rows == N_ROWS


def test_an_image_is_computed_once(llm: LLM) -> None:
    red = llm.generate(prompt(RED, text=f"w {MARKER} x"), 8, temperature=0)
    blue = llm.generate(prompt(BLUE, text=f"w {MARKER} x"), 8, temperature=0)
    assert blue.tokens != red.tokens, "images of equal size do not share rows"
    again = llm.generate(prompt(RED, text=f"w {MARKER} x"), 8, temperature=0)
    assert again.tokens == red.tokens
    assert again.timings["image_cache_n"] == 1 and again.timings["image_ms"] == 0
    assert again.timings["prompt_n"] < red.timings["prompt_n"], "the prefix cache has the rows"


def test_all_forms_of_an_image_are_equal(llm: LLM, tmp_path: Path) -> None:
    buffer = BytesIO()
    Pillow.fromarray(RED).save(buffer, "PNG")
    path = tmp_path / "red.png"
    path.write_bytes(buffer.getvalue())
    expected = llm.generate(prompt(RED), 4, temperature=0).tokens
    for form in (buffer.getvalue(), str(path), Pillow.open(path)):
        assert llm.generate(prompt(form), 4, temperature=0).tokens == expected
    streamed = [chunk.token for chunk in llm.stream(prompt(path), 4, temperature=0)]
    assert streamed == expected

    async def read() -> list[int | None]:
        return [chunk.token async for chunk in llm.astream(prompt(path), 4, temperature=0)]

    assert asyncio.run(read()) == expected
    several = llm.generate([prompt(RED), prompt(BLUE)], 4, temperature=0)
    assert several[0].tokens == expected


def test_a_conversation_with_images(llm: LLM) -> None:
    image = color(7, 70, 170)
    chat = Chat(llm)
    text = "Once upon a time there was a little girl who liked red apples"
    chunks = list(chat.send(text, 6, images=[image], temperature=0))
    timings = chunks[-1].timings or {}
    assert timings["image_cache_n"] == 0 and timings["prompt_n"] > 40
    later = list(chat.send("a time", 6, temperature=0))[-1].timings or {}
    assert later["image_cache_n"] == 1 and later["prompt_n"] < timings["prompt_n"], "the image is in the slot"
    parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    assert chat.messages[0]["content"][1:] == parts[1:]
    answer = llm.chat([{"role": "user", "content": parts}], 6, temperature=0)
    assert answer.completion.text == "".join(chunk.text for chunk in chunks)


def test_a_context_without_room_is_refused_before_encoding(llm: LLM) -> None:
    assert llm.pictures is not None
    image = color(1, 2, 3)
    with pytest.raises(PromptTooLong) as refusal:
        llm.generate(prompt(image, text="a " * 300), 1)
    assert refusal.value.n_tokens > 300 + N_ROWS
    prepared = llm.generate(prompt(image), 1)
    assert prepared.timings["image_cache_n"] == 1 and prepared.timings["image_encode_ms"] > 0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prompt_string": MARKER * 2, "multimodal_data": [RED]}, "2 times <__media__> for 1 images"),
        ({"prompt_string": "x", "multimodal_data": [3]}, "multimodal_data\\[0\\]=3: expected a path"),
        ({"prompt_string": 3}, "prompt_string=3"),
        ({"prompt": "x"}, "expected {'prompt_string'"),
        ({"prompt_string": "x", "multimodal_data": [RED] * 129}, "129 images, at most 128"),
        ({"prompt_string": "x", "multimodal_data": [b"GIF89a"]}, "picture"),
        ({"prompt_string": "x", "multimodal_data": [color(0, 0, 0)[:1].repeat(300, 1)]}, "at most 200"),
    ],
)
def test_wrong_prompts_are_refused(llm: LLM, given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        llm.generate(given, 1)


def test_rows_that_are_not_finite_are_refused(models: Path, tmp_path: Path) -> None:
    """A text on the same model is then computed as before."""
    path = write_projector(tmp_path / "mmproj.gguf", 64, damage=np.nan)
    with LLM(models / "stories-narrow-F16.gguf", devices=["numpy"], mmproj=path, n_ctx=128) as llm:
        expected = llm.generate("Once upon", 4, temperature=0).tokens
        with pytest.raises(InvalidArgument, match="not finite for an image"):
            llm.generate(prompt(RED), 4)
        assert llm.generate("Once upon", 4, temperature=0).tokens == expected


def test_a_dict_without_images_is_a_text(llm: LLM) -> None:
    expected = llm.generate("Once upon", 4, temperature=0)
    answer = llm.generate({"prompt_string": "Once upon"}, 4, temperature=0)
    assert (answer.tokens, answer.prompt_tokens) == (expected.tokens, expected.prompt_tokens)
    assert not [name for name in answer.timings if name.startswith("image")]


def test_files_that_do_not_match(models: Path, tmp_path: Path, projector: Path) -> None:
    path = models / "stories-narrow-F16.gguf"
    other = write_projector(tmp_path / "other.gguf", 48)
    with pytest.raises(UnsupportedModel, match=r"other.gguf and .*stories-narrow-F16.gguf do not match"):
        LLM(path, devices=["numpy"], mmproj=other)
    with pytest.raises(UnsupportedModel, match="is no projector"):
        LLM(path, devices=["numpy"], mmproj=path)
    with pytest.raises(GGUFError, match=r"missing\.gguf"):
        LLM(path, devices=["numpy"], mmproj=tmp_path / "missing.gguf")
    with pytest.raises(InvalidArgument, match="--mmproj"):
        with LLM(path, devices=["numpy"]) as llm:
            llm.generate(prompt(RED), 1)


@pytest.mark.wide
@pytest.mark.parametrize("devices", DEVICE_SETS)
def test_an_engine_in_its_own_process_on_every_device(
    models: Path, projector: Path, devices: list[str], llm: LLM
) -> None:
    path = models / "stories-narrow-F16.gguf"
    expected = llm.generate(prompt(RED), 8, temperature=0).tokens
    with LLM(path, devices=devices, mmproj=projector, n_ctx=256, process=True) as apart:
        assert apart.generate(prompt(RED), 8, temperature=0).tokens == expected
