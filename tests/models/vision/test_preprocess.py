"""Test sizes, rows, layouts, keys and errors of preprocessing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracles.fixture import write
from oracles.vision import build
from picture_goldens import pixels_of
from pictures import blocks
from vision_configs import SMALL, vision_config

from vkbackend.errors import GGUFError, InvalidArgument, UnsupportedModel
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.prepare import count, cut_of, prepare
from vkbackend.step import MAX_RUNS

pytestmark = pytest.mark.no_vulkan

NONE = TokenLimits()


@pytest.mark.parametrize("projector", SMALL)
def test_rows_are_counted_without_pixels(projector: str) -> None:
    config = vision_config(projector)
    for number in (1, 2) if projector == "idefics3" else (1,):
        pixels = pixels_of(projector, number)
        picture = prepare(pixels, config, NONE)
        cut = cut_of(*pixels.shape[:2], config, NONE)
        n_rows = sum(len(tile.patches) for tile in picture.tiles) // cut.merge**2 + cut.n_marks
        if projector == "resampler":
            n_rows = 64 * len(picture.tiles)
        assert count(*pixels.shape[:2], config, NONE) == n_rows
        assert [part for part in picture.layout if isinstance(part, int)] == list(range(len(picture.tiles)))


# ---- the text around the rows ----


def test_the_text_around_tiles() -> None:
    fake = "<fake_token_around_image>"
    layout = cut_of(300, 512, vision_config("idefics3", preproc_size=192), NONE).layout
    assert layout == (
        f"{fake}<row_1_col_1>",
        0,
        f"{fake}<row_1_col_2>",
        1,
        f"{fake}<row_1_col_3>",
        2,
        f"\n{fake}<row_2_col_1>",
        3,
        f"{fake}<row_2_col_2>",
        4,
        f"{fake}<row_2_col_3>",
        5,
        f"\n\n{fake}<global-img>",
        6,
        fake,
    )
    small = vision_config("idefics3", preproc_size=64)
    assert cut_of(50, 50, small, NONE).layout == (f"{fake}<global-img>", 0, fake)
    assert cut_of(600, 1200, vision_config("lfm2"), NONE).layout == (
        "<|image_start|><|img_row_1_col_1|>",
        0,
        "<|img_row_1_col_2|>",
        1,
        "<|img_thumbnail|>",
        2,
        "<|image_end|>",
    )
    assert cut_of(56, 168, vision_config("internvl"), NONE).layout == ("<img>", 0, 1, 2, 3, "</img>")


def test_slices_of_minicpm_v() -> None:
    """Version 2 is MiniCPM-V 2.5. The complete picture is encoded last, and shown first."""
    layout = "<image>", 4, "</image>", "<slice>", 0, "</slice>", "<slice>", 1, "</slice>"
    layout += "\n<slice>", 2, "</slice>", "<slice>", 3, "</slice>"
    cut = cut_of(800, 900, vision_config("resampler"), NONE)
    assert cut.layout == layout and cut.tile_rows == (64,) * 5
    nested = cut_of(800, 900, vision_config("resampler", minicpmv_version=2, n_queries=96), NONE)
    assert "".join(map(str, nested.layout)) == (
        "<image>4</image><slice><image>0</image><image>1</image>\n<image>2</image><image>3</image></slice>"
    )
    assert nested.n_rows == 5 * 96


# ---- sizes of published models, from their processors ----


@pytest.mark.parametrize(
    ("projector", "height", "width", "n_rows"),
    [
        ("idefics3", 480, 640, 13 * 64),
        ("idefics3", 2048, 2048, 17 * 64),
        ("gemma3", 480, 640, 256),
        ("pixtral", 1540, 1000, 55 * 37 - 1),
        ("gemma4v", 1000, 1000, 256),
        ("internvl", 448, 896, 3 * 256),
        ("lfm2", 512, 512, 256),
        ("qwen3vl_merger", 640, 480, 20 * 15),
    ],
)
def test_rows_of_published_models(projector: str, height: int, width: int, n_rows: int) -> None:
    assert count(height, width, vision_config(projector, real=True), NONE) == n_rows


@pytest.mark.parametrize("most", [8, 64, 300])
@pytest.mark.parametrize("projector", ["qwen3vl_merger", "pixtral", "gemma4v"])
def test_pictures_stay_within_the_most_tokens(projector: str, most: int) -> None:
    config = vision_config(projector, real=True)
    for height, width in ((10, 10), (4000, 3000), (300, 1000), (1000, 301)):
        assert count(height, width, config, TokenLimits(None, most)) <= most


@pytest.mark.parametrize("size", [(1500, 2000), (2000, 1504), (3000, 3000), (500, 8000), (90, 9000)])
def test_windows_of_qwen25_fit_a_step(size: tuple[int, int]) -> None:
    """With 2,048 rows, a picture with the ratio 3 : 4 would have 130 windows, so it shrinks. With the default
    number of rows, no picture shrinks."""
    windowed = vision_config("qwen2.5vl_merger", n_wa_pattern=8)
    height, width = cut_of(*size, windowed, TokenLimits(None, 2048)).tile
    assert -(-height // 112) * -(-width // 112) <= MAX_RUNS
    assert 1600 < height * width // 28**2 <= 2048 or size == (90, 9000)
    assert cut_of(*size, windowed, NONE) == cut_of(*size, vision_config("qwen2.5vl_merger"), NONE)


# ---- keys ----


def test_keys_depend_on_pixels_file_and_limits() -> None:
    config, pixels = vision_config("qwen3vl_merger"), blocks(40, 60, 1)
    other = pixels.copy()
    other[-1, -1, -1] ^= 1
    keys = [
        prepare(pixels, config, NONE).key,
        prepare(other, config, NONE).key,
        prepare(pixels.reshape(60, 40, 3), config, NONE).key,
        prepare(pixels, vision_config("qwen3vl_merger", identity=b"x" * 32), NONE).key,
        prepare(pixels, config, TokenLimits(None, 900)).key,
    ]
    assert len(set(keys)) == 5 and {len(key) for key in keys} == {16}
    assert keys[0] == prepare(pixels[::1].copy(), config, NONE).key


# ---- errors ----


def test_what_cannot_be_prepared_is_refused() -> None:
    config = vision_config("idefics3")
    with pytest.raises(InvalidArgument, match="at most 200 times"):
        prepare(np.zeros((1, 201, 3), np.uint8), config, NONE)
    with pytest.raises(InvalidArgument, match="0 x 5 pixels"):
        count(5, 0, config, NONE)
    with pytest.raises(InvalidArgument, match=r"float32 and shape \(4, 4, 3\)"):
        prepare(np.zeros((4, 4, 3), np.float32), config, NONE)
    with pytest.raises(UnsupportedModel, match="no preprocessing for projectors of type 'other'"):
        count(4, 4, vision_config("idefics3", projector="other"), NONE)


@pytest.mark.parametrize("tiles", [{"min": 3, "max": 2}, {"max": 65}, {"min": 1 << 31}])
def test_a_file_with_impossible_tiles_is_refused(tmp_path: Path, tiles: dict[str, int]) -> None:
    fixture = build("idefics3")
    fixture.keys |= {f"vision.preproc_{name}_tiles": n for name, n in tiles.items()}
    path = tmp_path / "mmproj.gguf"
    write(fixture, path)
    with GGUF.open(path) as gguf, pytest.raises(GGUFError, match="tiles per picture, at most 64"):
        VisionConfig.from_gguf(gguf)
