"""llama.cpp's flags of embeddings."""

from __future__ import annotations

import argparse

from vkbackend.models.embeddings.pooling import POOLINGS, norm_of
from vkbackend.models.options import ATTENTION
from vkbackend.tools.flags.options import adder


def add_pooling_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "embeddings")
    add("pooling", "--pooling", choices=POOLINGS,
        help="the vector of a text: the mean of its tokens' hidden states, the first (cls) or the last, "
        "the logits of the classification head (rank), or all of them (none) (default: the "
        "file's)")  # fmt: skip
    add("embd_normalize", "--embd-normalize", type=int, default=2, metavar="N",
        help="how vectors are normalised: -1: not, 0: the largest magnitude is 32760, 1: taxicab, "
        "2: Euclidean, more: p-norm (default: %(default)s)")  # fmt: skip
    add("attention", "--attention", choices=ATTENTION,
        help="whether tokens attend to later tokens of their text (non-causal) or not (causal) (default: as "
        "the file says)")  # fmt: skip


def check_pooling(args: argparse.Namespace) -> None:
    norm_of("embd_normalize", args.embd_normalize)
