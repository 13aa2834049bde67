"""Flags for images, with llama.cpp's names."""

from __future__ import annotations

import argparse
import os

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.hub import fetch_projector
from vkbackend.models.vision.config import projector_type
from vkbackend.models.vision.registry import family
from vkbackend.tools.flags.notes import note
from vkbackend.tools.flags.options import adder


def add_vision_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "images (docs/vision.md)")
    add("mmproj", "-mm", "--mmproj", metavar="FILE",
        help="the model's projector, a .gguf file, which turns images into tokens (default: with -hf, the "
        "repository's, else none)")  # fmt: skip
    add("mmproj_auto", "--mmproj-auto", action="store_true", default=True, help=argparse.SUPPRESS)
    add("mmproj_auto", "--no-mmproj", "--no-mmproj-auto", action="store_false", default=True,
        help="with -hf, do not load the repository's projector")  # fmt: skip
    add("mmproj_device", "-mmdev", "--mmproj-device", metavar="DEVICE",
        help="the device of the projector, as -dev; none: the processor (default: the fastest of -dev "
        "whose memory holds it and the model)")  # fmt: skip
    add("mmproj_device", "--no-mmproj-offload", action="store_const", const="none",
        help="run the projector on the processor")  # fmt: skip
    add("mmproj_device", "--mmproj-offload", action="store_const", const=None, help=argparse.SUPPRESS)
    add("image_min_tokens", "--image-min-tokens", type=int, metavar="N",
        help="make smaller images larger, up to N tokens, if the model accepts several sizes (default: the "
        "model's)")  # fmt: skip
    add("image_max_tokens", "--image-max-tokens", type=int, metavar="N",
        help="make larger images smaller, down to N tokens, if the model accepts several sizes (default: the "
        "model's)")  # fmt: skip


def add_image_argument(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("--image", action="append", default=[], metavar="FILE,...",
        help=f"{about}: PNG, JPEG, WebP, GIF or BMP; may be given several times")  # fmt: skip


def image_files(args: argparse.Namespace) -> list[str]:
    """Return the files of --image, in order. A comma separates files, unless a file's name contains it."""
    words = [[word] if os.path.exists(word) else word.split(",") for word in args.image]
    return [path for paths in words for path in paths]


def settle_projector(args: argparse.Namespace) -> None:
    """Find the projector of -hf's repository. Projectors of unknown types are not used."""
    if args.mmproj is not None or not args.mmproj_auto:
        return
    path = fetch_projector(args.hf_repo, args.hf_file)
    if path is None:
        return
    if reason := unusable(path):
        note(args, f"no images: {reason}")
    else:
        args.mmproj = path


def unusable(path: str) -> str:
    """Return why a file cannot be used as a projector, or ""."""
    try:
        with GGUF.open(path) as gguf:
            family(projector_type(gguf), os.path.basename(path))
    except (UnsupportedModel, GGUFError) as error:
        return str(error)
    return ""
