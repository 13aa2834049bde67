"""The vision demo's pictures match their sentences, and its trainer prepares them as the engine does. The
tests need no PyTorch and no Vulkan.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vision_configs import vision_config

from vkbackend.models.vision.config import TokenLimits
from vkbackend.models.vision.preprocess.prepare import prepare
from vkbackend.tools.demo.shapes import (
    COLOURS,
    PLACES,
    SHAPES,
    SIDE,
    Scene,
    draw,
    is_held_out,
    new_picture,
    random_scene,
    training_scene,
)
from vkbackend.tools.demo.vision import VisionSizes, patches_of
from vkbackend.tools.train_vision_demo import FAKE, GLOBAL, QUESTIONS, main, vocabulary

pytestmark = pytest.mark.no_vulkan


def test_scenes_have_all_words_and_one_or_two_shapes() -> None:
    rng = random.Random(5)
    scenes = [random_scene(rng) for _ in range(500)]
    assert {len(scene.shapes) for scene in scenes} == {1, 2}
    shapes = [shape for scene in scenes for shape in scene.shapes]
    assert len({(colour, shape) for colour, shape, _ in shapes}) == len(COLOURS) * len(SHAPES)
    for scene in scenes:
        places = [PLACES.index(place) for *_, place in scene.shapes]
        assert places == sorted(set(places))


def test_training_never_draws_shapes_that_are_held_out() -> None:
    """Training holds out 12 of 72 shapes, in which each colour, form and place occurs equally often."""
    every = list(product(COLOURS, SHAPES, PLACES))
    held_out = {shape for shape in every if is_held_out(shape)}
    assert len(held_out) == 12
    counts = [Counter(part).values() for part in zip(*held_out, strict=True)]
    assert [(len(n), len(set(n))) for n in counts] == [(6, 1), (3, 1), (4, 1)]
    rng = random.Random(5)
    drawn = {shape for _ in range(2000) for shape in training_scene(rng).shapes}
    assert drawn == {*every} - held_out
    new = [new_picture(n, held_out=True)[1].shapes for n in range(20)]
    assert {len(shapes) for shapes in new} == {1, 2} and held_out >= {s for shapes in new for s in shapes}


def test_a_sentence() -> None:
    scene = Scene((("red", "circle", "top left"), ("orange", "square", "bottom right")))
    assert scene.sentence == "a red circle in the top left and an orange square in the bottom right."


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_in_their_quarter_and_have_their_colour(shape: str, place: str) -> None:
    pixels = draw(Scene((("blue", shape, place),)), np.random.default_rng(3)).astype(int)
    blue = pixels[..., 2] - pixels[..., 0] > 80
    rows = slice(0, SIDE // 2) if place.startswith("top") else slice(SIDE // 2, SIDE)
    columns = slice(0, SIDE // 2) if place.endswith("left") else slice(SIDE // 2, SIDE)
    assert 60 < blue.sum() == blue[rows, columns].sum()


def test_each_word_is_a_token() -> None:
    words = vocabulary(1)
    sentence = "a purple triangle in the top right and an orange square in the bottom left."
    assert len(words.encode(sentence)) == len(sentence.split()) + 1
    assert words.decode(words.encode(sentence)) == sentence
    assert words.pieces[-2:] == [FAKE, GLOBAL] and words.decode([len(words.pieces) - 1]) == ""
    assert all(words.decode(words.encode(question)) == question for question in QUESTIONS)


def test_patches_are_those_of_the_engine() -> None:
    sizes = VisionSizes()
    config = vision_config(
        "idefics3",
        image_size=sizes.image,
        preproc_size=sizes.image,
        patch_size=sizes.patch,
        merge=sizes.merge,
    )
    pixels = draw(random_scene(random.Random(1)), np.random.default_rng(1))
    picture = prepare(pixels, config, TokenLimits())
    np.testing.assert_allclose(patches_of(pixels[None], sizes)[0], picture.tiles[0].patches, atol=1e-6)
    assert picture.layout == (f"{FAKE}{GLOBAL}", 0, FAKE)
    assert len(picture.tiles[0].patches) == sizes.n_rows * sizes.merge**2


def test_new_pictures_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--pictures", "2", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [new_picture(n)[1].sentence for n in range(2)]
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "shapes-1.png")), new_picture(1)[0])


def test_without_torch_a_line_says_so() -> None:
    code = "import sys; sys.modules['torch'] = None; from vkbackend.tools import train_vision_demo; "
    code += "sys.exit(train_vision_demo.main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 2 and "needs PyTorch: pip install 'vkbackend[train]'" in done.stderr
