"""Flags of sampling, with llama.cpp's names and in the samplers' order."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

from vkbackend.models.sampling.params import LETTERS, ORDER, SamplingParams
from vkbackend.tools.flags.options import adder, fields_given

# (option, flags, placeholder, help without the default)
NUMBERS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("repeat_last_n", ("--repeat-last-n",), "N",
     "how many recent tokens are penalized, prompt included; 0: none, -1: all"),
    ("repeat_penalty", ("--repeat-penalty",), "X", "divide the logits of recent tokens by X; 1: off"),
    ("presence_penalty", ("--presence-penalty",), "X", "subtract X from the logits of recent tokens; 0: off"),
    ("frequency_penalty", ("--frequency-penalty",), "X", "the same for each time that they occur; 0: off"),
    ("dry_multiplier", ("--dry-multiplier",), "X",
     "DRY: a token that would extend a repetition of n tokens loses X * base^(n - allowed length); 0: off"),
    ("dry_base", ("--dry-base",), "X", "DRY's base"),
    ("dry_allowed_length", ("--dry-allowed-length",), "N", "DRY: shorter repetitions are free"),
    ("dry_penalty_last_n", ("--dry-penalty-last-n",), "N", "DRY: how many recent tokens; 0: off, -1: all"),
    ("top_n_sigma", ("--top-nsigma", "--top-n-sigma"), "N",
     "drop logits more than N standard deviations below the best; -1: none"),
    ("top_k", ("--top-k",), "N", "keep the N likeliest tokens; 0: all"),
    ("typical_p", ("--typical", "--typical-p"), "P",
     "keep the tokens of the most typical surprise that reach the probability P; 1: all"),
    ("top_p", ("--top-p",), "P", "keep the likeliest tokens that reach the probability P; 1: all"),
    ("min_p", ("--min-p",), "P", "drop tokens below P times the best probability; 0: none"),
    ("xtc_probability", ("--xtc-probability",), "P",
     "XTC: the chance to drop all tokens above the threshold but the least likely of them; 0: off"),
    ("xtc_threshold", ("--xtc-threshold",), "P", "XTC's threshold; above 0.5: off"),
    ("temperature", ("--temp", "--temperature"), "T", "temperature; 0: always the likeliest token"),
    ("dynatemp_range", ("--dynatemp-range",), "T",
     "dynamic temperature: how far the entropy moves it down and up; 0: off"),
    ("dynatemp_exponent", ("--dynatemp-exp",), "X", "dynamic temperature: the exponent of the entropy"),
    ("mirostat", ("--mirostat",), "N",
     "1 or 2: use this version of Mirostat; only --logit-bias and --temp work with it; 0: off"),
    ("mirostat_eta", ("--mirostat-lr",), "X", "Mirostat's learning rate"),
    ("mirostat_tau", ("--mirostat-ent",), "X", "Mirostat's target, bits of surprise a token"),
    ("min_tokens", ("--min-tokens",), "N", "forbid the end until N tokens are generated"),
    ("min_keep", ("--min-keep",), "N",
     "candidates that filters by probability keep at least; 0: one"),
)  # fmt: skip


class _Collect(argparse.Action):
    """Collect the values of a repeated flag in a list. The list replaces the default."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(before if before is not self.default else ()), values])


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "sampling, in the order applied", SamplingParams)
    defaults = SamplingParams(seed=0)
    add(
        "samplers",
        "--samplers",
        metavar="A;B",
        help=f"the samplers in their order (default: {';'.join(ORDER)})",
    )
    add("samplers", "--sampler-seq", "--sampling-seq", type=letters, metavar="LETTERS",
        help=f"the same as letters (default: {''.join(LETTERS)})")  # fmt: skip
    add("logit_bias", "-l", "--logit-bias", action=_Collect, type=token_bias, metavar="ID+X",
        help="add X to the logit of token ID, as in 15043+1; ID-inf forbids it; may be repeated")  # fmt: skip
    for name, flags, value, text in NUMBERS:
        kind = type(getattr(defaults, name))
        add(name, *flags, type=kind, metavar=value, help=f"{text} (default: %(default)s)")
    add("dry_sequence_breakers", "--dry-sequence-breaker", action=_Collect, metavar="TEXT",
        help="DRY: repetitions do not reach across TEXT; may be repeated, none: no breakers "
        "(default: newline, colon, double quote, asterisk)")  # fmt: skip
    add("stop_token_ids", "--stop-token-ids", type=token_list, metavar="ID,ID",
        help="tokens that end the text, in addition to the model's (default: none)")  # fmt: skip
    add("logprobs", "--logprobs", type=int, metavar="N",
        help="with --json: log probabilities of each token and the N likeliest (default: off)")  # fmt: skip
    add("post_sampling_probs", "--post-sampling-probs", action="store_true",
        help="--logprobs are from the candidates that the samplers keep (default: the model)")  # fmt: skip
    add("seed", "-s", "--seed", type=int, default=-1, metavar="N",
        help="seed of the random numbers; -1: a random one, shown at the end (default: -1)")  # fmt: skip


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Draw a random seed if no flag sets a seed."""
    return SamplingParams(**fields_given(args, SamplingParams))


def token_bias(text: str) -> tuple[int, float]:
    """Parse 15043+1.5 or 15043-inf."""
    match = re.fullmatch(r"([0-9]{1,10})([+-].+)", text)
    try:
        assert match is not None
        bias = float(match[2])
        assert bias < math.inf
    except (AssertionError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a token id, a sign and a number, for example 15043+1 or 15043-inf"
        ) from None
    return int(match[1]), bias


def token_list(text: str) -> list[Any]:
    """Parse 1,2."""
    return [int(word) if word.strip().isdecimal() else word for word in text.split(",")]


def letters(text: str) -> list[str]:
    if unknown := [letter for letter in text if letter not in LETTERS]:
        known = ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
        raise argparse.ArgumentTypeError(f"{text!r}: {unknown[0]!r} is not a sampler; there are: {known}")
    return [LETTERS[letter] for letter in text]
