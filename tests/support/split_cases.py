"""Draws random models to split, and computes llama.cpp's splits with the oracle."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from oracles.make_formats import FORMATS

from vkbackend.formats import block_of
from vkbackend.meta.policy import Attention, FeedForward, Layer
from vkbackend.models.architectures.weight_specs import MATRIX_TYPES

BLOCKS = {fmt.upper(): block_of(fmt)[0] for fmt in sorted(set(MATRIX_TYPES) - set(FORMATS))}
Case = tuple[str, list[Layer], int, int, list[float] | None]


def random_case(rng: random.Random) -> Case:
    """Return (format, layers, vocabulary, devices, tensor split)."""
    while True:
        fmt, n = rng.choice(list(BLOCKS)), rng.randint(1, 8)
        head, kv = rng.choice([8, 16, 32, 64, 80, 96, 128, 192, 256]), rng.choice([1, 2, 3, 4, 5, 8, 16])
        head_v = rng.choice([head, head, rng.choice([16, 32, 64, 128, 256])])
        group = rng.choice([1, 2, 3, 4, 6, 8])
        n_ff = rng.choice([172, 256, 384, 704, 768, 1408, 2880, 11008, 14336, rng.randint(8, 40) * 256])
        block = BLOCKS[fmt]
        if n_ff % block or group * kv * head_v % block:
            continue
        split: list[float] | None = rng.choice(
            [
                None,
                [1.0] * n,
                [rng.choice([0, 1, 2, 3, 5]) for _ in range(n)],
                [rng.random() for _ in range(n)],
            ]
        )
        if split is not None and not sum(split):
            continue
        layer = Layer(
            Attention(group * kv, kv, head, head_v, block), FeedForward(n_ff, block, rng.choice([0, 0, 8]))
        )
        return fmt, [layer] * rng.choice([1, 2, 5]), rng.randint(100, 200_000), n, split


def cases(n_cases: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    return [random_case(rng) for _ in range(n_cases)]


def matrices(case: Case) -> list[tuple[str, int]]:
    layers, n_vocab = case[1], case[2]
    a, n_ff = layers[0].attention, layers[0].ffn.n_ff
    q, k, v = a.n_head * a.head_dim_k, a.n_head_kv * a.head_dim_k, a.n_head_kv * a.head_dim_v
    sizes = {"attn_q": q, "attn_k": k, "attn_v": v, "attn_output": a.n_head * a.head_dim_v, "ffn_down": n_ff}
    names = [(f"blk.{il}.{name}.weight", n) for il in range(len(layers)) for name, n in sizes.items()]
    return [*names, ("output.weight", n_vocab)]


def load_oracle(path: Path) -> ModuleType:
    """Import the script `split_oracle.py`, and add the block sizes of all of vkbackend's formats."""
    spec = spec_from_file_location("split_oracle", path)
    assert spec and spec.loader
    # the script's dataclasses look up their module in sys.modules
    module = sys.modules["split_oracle"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.BLCK |= BLOCKS
    return module


def answers(oracle: ModuleType) -> Callable[[Case], list[list[int]]]:
    """Return a function that maps a case to each device's share of the case's `matrices`."""

    def answer(case: Case) -> list[list[int]]:
        fmt, layers, _, n, split = case
        a, f = layers[0].attention, layers[0].ffn
        assert isinstance(a, Attention)
        hp = oracle.HP("llama", len(layers), a.n_head, a.n_head_kv, a.head_dim_k, a.head_dim_v, n_ff=f.n_ff)
        sizes = matrices(case)
        return [oracle.total(oracle.split(hp, name, size, fmt, n, split), n) for name, size in sizes]

    return answer
