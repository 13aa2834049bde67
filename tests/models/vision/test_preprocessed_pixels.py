"""Pictures are preprocessed as transformers' processors do."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from picture_goldens import (
    BY_TORCH,
    MAX_TOKENS,
    MIN_TOKENS,
    PUBLISHED,
    STRETCHED,
    WITH_MARGIN,
    in_raster_order,
    large_sizes,
    limits_of,
    pixels_of,
    samples,
)
from places import GOLDEN
from vision_configs import SMALL, vision_config

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.prepare import cut_of, prepare

pytestmark = pytest.mark.no_vulkan


@cache
def golden(name: str) -> np.ndarray:
    with np.load(GOLDEN / "pictures.npz") as file:
        array: np.ndarray = file[name]
    return array


def check(projector: str, numbers: range) -> None:
    config = vision_config(projector)
    ends = golden(f"{projector}/n_tiles").cumsum()
    for number in numbers:
        picture = prepare(pixels_of(projector, number), config, limits_of(projector))
        theirs = slice(ends[number] - golden(f"{projector}/n_tiles")[number], ends[number])
        [size, *_] = golden(f"{projector}/sizes")[theirs]
        if projector in WITH_MARGIN and shrinks(config, limits_of(projector), size):
            assert sum(len(tile.patches) for tile in picture.tiles) <= 400
            continue
        tiles = [in_raster_order(tile, config) for tile in picture.tiles]
        assert [t.shape[1:] for t in tiles] == list(map(tuple, golden(f"{projector}/sizes")[theirs]))
        off = samples(tiles, config, number) - golden(f"{projector}/samples")[theirs]
        assert np.abs(off).max() < 1.01, number
        if projector not in BY_TORCH:
            assert np.abs(off).max() < 0.01, number


def shrinks(config: VisionConfig, limits: TokenLimits, size: np.ndarray) -> bool:
    return bool(size.prod() // (config.patch_size * config.merge) ** 2 > config.most_tokens(limits))


@pytest.mark.parametrize("projector", SMALL)
def test_pixels_are_the_reference_s(projector: str) -> None:
    check(projector, range(2))


@pytest.mark.wide
@pytest.mark.parametrize("projector", SMALL)
def test_pixels_of_200_pictures(projector: str) -> None:
    check(projector, range(200))


@pytest.mark.parametrize("projector", PUBLISHED)
def test_sizes_of_published_models(projector: str) -> None:
    limits = TokenLimits(MIN_TOKENS, MAX_TOKENS) if projector in STRETCHED else TokenLimits()
    if projector == "pixtral":
        limits = TokenLimits(None, 9999)
    config = vision_config(projector, real=True)
    wrong = []
    for (height, width), theirs in zip(large_sizes(), golden(f"{projector}/published"), strict=True):
        cut = cut_of(height, width, config, limits)
        if projector in WITH_MARGIN and shrinks(config, limits, theirs[1:3]):
            assert 0.9 * config.most_tokens(limits) < cut.n_rows <= config.most_tokens(limits)
            continue
        n_tiles = cut.grid[0] * cut.grid[1] + (cut.overview is not None)
        last = cut.overview.size if cut.overview else cut.tile
        if [n_tiles, *cut.tile, *last] != theirs.tolist():
            wrong.append((height, width, n_tiles, cut.tile, last, theirs.tolist()))
    assert not wrong, (len(wrong), wrong[:5])
