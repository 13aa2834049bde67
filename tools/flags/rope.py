"""Flags of RoPE and YaRN, with llama.cpp's names."""

from __future__ import annotations

import argparse

from vkbackend.rope import SCALINGS
from vkbackend.tools.flags.options import adder


def add_rope_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "RoPE, replacing the file's values")
    add("rope_scaling", "--rope-scaling", metavar="TYPE",
        help=f"how RoPE is scaled: {', '.join(SCALINGS)} (default: the file's, else linear)")  # fmt: skip
    add("rope_scale", "--rope-scale", type=float, metavar="N", help="the factor by which the context grows")
    add("rope_freq_base", "--rope-freq-base", type=float, metavar="N", help="the base of the frequencies")
    add("rope_freq_scale", "--rope-freq-scale", type=float, metavar="N",
        help="the factor of positions: 1 / N of --rope-scale")  # fmt: skip
    add("yarn_orig_ctx", "--yarn-orig-ctx", type=int, metavar="N",
        help="YaRN: the context that the model was trained with (default: 0, the file's)")  # fmt: skip
    add("yarn_ext_factor", "--yarn-ext-factor", type=float, metavar="N",
        help="YaRN: how much of the fast pairs' own angle is kept; 0: linear (default: 1)")  # fmt: skip
    add("yarn_attn_factor", "--yarn-attn-factor", type=float, metavar="N",
        help="the factor of cos and sin (default: the file's, or 1)")  # fmt: skip
    add("yarn_beta_slow", "--yarn-beta-slow", type=float, metavar="N",
        help="YaRN: pairs that turn less often are scaled (default: the file's, or 1)")  # fmt: skip
    add("yarn_beta_fast", "--yarn-beta-fast", type=float, metavar="N",
        help="YaRN: pairs that turn more often keep their angle (default: the file's, or 32)")  # fmt: skip
