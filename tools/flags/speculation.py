"""Flags for drafts, with llama.cpp's names."""

from __future__ import annotations

import argparse

from vkbackend.tools.flags.options import adder


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "drafts (docs/speculation.md)")
    add("speculation", "--spec-type", metavar="LIST",
        help="guess the next tokens, and verify several in one step; ngram: what followed the last tokens "
        "earlier in the text; draft-mtp: the model's multi-token prediction head; several: the first that "
        "has a guess; none (default: none)")  # fmt: skip
    add("speculation", "--spec-default", action="store_const", const="ngram", help=argparse.SUPPRESS)
    add("draft_max", "--spec-draft-n-max", "--draft", "--draft-n", "--draft-max", type=int, metavar="N",
        help="tokens of a draft at most; few are drafted where few are right (default: "
        "%(default)s)")  # fmt: skip
    add("draft_min", "--spec-draft-n-min", "--draft-min", "--draft-n-min", type=int, metavar="N",
        help="ignore drafts with fewer tokens (default: %(default)s)")  # fmt: skip
    add("draft_p_min", "--spec-draft-p-min", "--draft-p-min", type=float, metavar="P",
        help="draft-mtp: end a draft before a less probable token (default: %(default)s)")  # fmt: skip
