"""Makes `golden/pictures.npz`: sizes and samples of the tiles that transformers' image processors make of 200
random pictures per family, and the sizes that they choose for 500 large pictures.

    PYTHONPATH=tests/support python tests/support/oracles/make_pictures.py [TYPE ...]  # Writes the file.
    PYTHONPATH=tests/support python tests/support/oracles/make_pictures.py --table  # Compares all pixels.

With TYPE, only the pictures of these projector types are computed, and other entries remain. Needs
transformers, torch, torchvision and Pillow.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from oracles import hf_pictures
from picture_goldens import (
    MAX_TOKENS,
    MIN_TOKENS,
    PUBLISHED,
    in_raster_order,
    large_sizes,
    levels,
    limits_of,
    pixels_of,
    samples,
)
from places import GOLDEN
from vision_configs import SMALL, vision_config

from vkbackend.models.vision.preprocess.prepare import prepare

N = 200


def reference(projector: str, number: int) -> list[np.ndarray]:
    limits = limits_of(projector)
    bounds = {"min_tokens": limits.min_tokens or 0, "max_tokens": limits.max_tokens or 0}
    return hf_pictures.tiles(vision_config(projector), pixels_of(projector, number), **bounds)


def published(projector: str, height: int, width: int) -> list[tuple[int, int]]:
    return hf_pictures.tile_sizes(
        vision_config(projector, real=True), height, width, min_tokens=MIN_TOKENS, max_tokens=MAX_TOKENS
    )


def write(projectors: Sequence[str]) -> None:
    arrays: dict[str, np.ndarray] = {}
    if projectors:
        with np.load(GOLDEN / "pictures.npz") as stored:
            arrays = {name: stored[name] for name in stored.files}
    for projector in projectors or SMALL:
        config = vision_config(projector)
        pictures = [reference(projector, number) for number in range(N)]
        arrays[f"{projector}/n_tiles"] = np.array([len(tiles) for tiles in pictures], np.int32)
        sizes = [tile.shape[1:] for tiles in pictures for tile in tiles]
        arrays[f"{projector}/sizes"] = np.array(sizes, np.int32)
        rows = [samples(tiles, config, number) for number, tiles in enumerate(pictures)]
        arrays[f"{projector}/samples"] = np.concatenate(rows).round().clip(0, 255).astype(np.uint8)
    for projector in [name for name in PUBLISHED if not projectors or name in projectors]:
        config = vision_config(projector, real=True)
        pictures = [published(projector, *size) for size in large_sizes()]
        arrays[f"{projector}/published"] = np.array(
            [(len(tiles), *tiles[0], *tiles[-1]) for tiles in pictures], np.int32
        )
    np.savez_compressed(GOLDEN / "pictures.npz", **arrays)


def table(n: int, projectors: Sequence[str]) -> None:
    print("family                pictures  largest difference in steps of 255  share that differs")
    for projector in projectors or SMALL:
        config, largest, n_differ, n_values = vision_config(projector), 0.0, 0, 0
        for number in range(n):
            ours = prepare(pixels_of(projector, number), config, limits_of(projector)).tiles
            for tile, theirs in zip(ours, reference(projector, number), strict=True):
                off = np.abs(levels(in_raster_order(tile, config), config) - levels(theirs, config))
                largest, n_differ = max(largest, off.max()), n_differ + (off > 0.5).sum()
                n_values += off.size
        print(f"{projector:21} {n:8}  {largest:34.3f}  {n_differ / n_values:18.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("projectors", nargs="*", metavar="TYPE", help="projector types (default: all)")
    parser.add_argument("--table", action="store_true", help="compare all pixels instead")
    parser.add_argument(
        "-n", type=int, default=N, help="pictures per family for --table (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.table:
        table(args.n, args.projectors)
    else:
        write(args.projectors)


if __name__ == "__main__":
    main()
