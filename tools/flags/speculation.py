"""Flags for drafts, with llama.cpp's names."""

from __future__ import annotations

import argparse

from vkbackend.errors import InvalidArgument
from vkbackend.models.hub import fetch
from vkbackend.tools.flags.options import adder


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "drafts (docs/speculation.md)")
    add("speculation", "--spec-type", metavar="LIST",
        help="guess the next tokens, and verify several in one step; ngram: what followed the last tokens "
        "earlier in the text; draft-simple: the model of -md; draft-eagle3: the EAGLE-3 head of -md; "
        "draft-mtp: the model's multi-token prediction head; several: the first that has a guess; none "
        "(default: none)")  # fmt: skip
    add("speculation", "--spec-default", action="store_const", const="ngram", help=argparse.SUPPRESS)
    add("draft", "-md", "--spec-draft-model", "--model-draft", metavar="FILE",
        help="a smaller model of the same vocabulary, or an EAGLE-3 head of the model, which "
        "drafts")  # fmt: skip
    add("hf_draft", "-hfd", "-hfrd", "--spec-draft-hf", "--hf-repo-draft", metavar="USER/REPO[:TAG]",
        help="a draft model or EAGLE-3 head of the Hugging Face Hub")  # fmt: skip
    add("draft_devices", "-devd", "--spec-draft-device", "--device-draft", metavar="LIST",
        help="devices of the draft model (default: the first of -dev)")  # fmt: skip
    add("draft_n_gpu_layers", "-ngld", "--spec-draft-ngl", "--gpu-layers-draft", "--n-gpu-layers-draft",
        metavar="N", help="layers of the draft model on devices, as -ngl (default: all)")  # fmt: skip
    for cache in ("k", "v"):
        names = f"-ct{cache}d", f"--spec-draft-type-{cache}", f"--cache-type-{cache}-draft"
        add(f"draft_type_{cache}", *names, metavar="TYPE",
            help=f"type of the draft model's {cache.upper()} cache (default: %(default)s)")  # fmt: skip
    add("draft_max", "--spec-draft-n-max", "--draft", "--draft-n", "--draft-max", type=int, metavar="N",
        help="tokens of a draft at most; few are drafted where few are right (default: "
        "%(default)s)")  # fmt: skip
    add("draft_min", "--spec-draft-n-min", "--draft-min", "--draft-n-min", type=int, metavar="N",
        help="ignore drafts with fewer tokens (default: %(default)s)")  # fmt: skip
    add("draft_p_min", "--spec-draft-p-min", "--draft-p-min", type=float, metavar="P",
        help="end a draft of a model or head before a less probable token (default: "
        "%(default)s)")  # fmt: skip


def settle_draft(args: argparse.Namespace) -> None:
    """Fetch the draft model of -hfd. Raises InvalidArgument if -md names another model."""
    if getattr(args, "hf_draft", None) is None:
        return
    if args.draft is not None:
        raise InvalidArgument("-md and -hfd name a draft model each; give one")
    args.draft, args.hf_draft = fetch(args.hf_draft), None
