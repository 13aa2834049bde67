"""The split policies: llama.cpp's equals the runnable oracle of its arithmetic; ours is aligned and never
worse."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vkbackend.errors import InvalidArgument, PlanError
from vkbackend.formats import block_of
from vkbackend.meta.plan import normalise
from vkbackend.meta.policy import Attention, DeltaNet, FeedForward, Layer, ffn_unit, plan_model
from vkbackend.meta.split import Ranges, check_tiling, kv_heads_of
from vkbackend.models.architectures.base import MATRIX_TYPES

pytestmark = pytest.mark.no_vulkan


N_CASES = 2_000
BLOCKS = {fmt.upper(): block_of(fmt)[0] for fmt in sorted(MATRIX_TYPES)}


@pytest.fixture(scope="session")
def oracle(shared: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("split_oracle", shared / "oracles" / "split_oracle.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["split_oracle"] = module
    spec.loader.exec_module(module)
    return module


def widths(ranges: Ranges) -> list[int]:
    return [end - begin for begin, end in ranges]


def random_case(rng: random.Random) -> tuple[str, list[Layer], int, int, list[float] | None]:
    """(format, layers, vocabulary, devices, tensor split)"""
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


def cases(n_cases: int, seed: int) -> list[tuple[str, list[Layer], int, int, list[float] | None]]:
    rng = random.Random(seed)
    return [random_case(rng) for _ in range(n_cases)]


def _check_oracle(oracle: ModuleType, n_cases: int, seed: int) -> None:
    oracle.BLCK |= BLOCKS  # it has no entry for the rarer formats
    seen = set()
    for fmt, layers, n_vocab, n, split in cases(n_cases, seed):
        a, f = layers[0].attention, layers[0].ffn
        seen.add((fmt, a.head_dim_k == a.head_dim_v))
        hp = oracle.HP("llama", len(layers), a.n_head, a.n_head_kv, a.head_dim_k, a.head_dim_v, n_ff=f.n_ff)
        plans, outside = plan_model(layers, n_vocab, n, split, "llama.cpp")

        def want(name: str, size: int) -> list[int]:
            return list(oracle.total(oracle.split(hp, name, size, fmt, n, split), n))  # noqa: B023

        for il, plan in enumerate(plans):
            head, case = a.head_dim_k, (fmt, layers[0], n, split, il)
            q = [head * w for w in widths(plan.ranges["heads"])]
            k = [head * w for w in widths(plan.ranges["kv_heads"])]
            assert q == want(f"blk.{il}.attn_q.weight", a.n_head * head), case
            assert k == want(f"blk.{il}.attn_k.weight", a.n_head_kv * head), case
            heads, kv_heads = widths(plan.ranges["heads"]), widths(plan.ranges["kv_heads"])
            o, v = ([a.head_dim_v * w for w in of] for of in (heads, kv_heads))
            assert v == want(f"blk.{il}.attn_v.weight", a.n_head_kv * a.head_dim_v), case
            assert o == want(f"blk.{il}.attn_output.weight", a.n_head * a.head_dim_v), case
            for columns in plan.experts or (plan.ranges["ffn"],):
                assert widths(columns) == want(f"blk.{il}.ffn_down.weight", f.n_ff), case
        assert widths(outside.ranges["vocab"]) == want("output.weight", n_vocab)
    assert seen == {(fmt, alike) for fmt in BLOCKS for alike in (True, False)}


def test_llama_cpp_policy_equals_the_oracle(oracle: ModuleType) -> None:
    _check_oracle(oracle, N_CASES, 1)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(2, 7))
def test_llama_cpp_policy_equals_the_oracle_wide(oracle: ModuleType, seed: int) -> None:
    _check_oracle(oracle, N_CASES, seed)


def busiest(plan_ranges: list[Ranges], shares: tuple[float, ...]) -> float:
    """Units of the device with the most per share, over ranges that are worked on side by side."""
    held = [sum(widths(ranges)[d] for ranges in plan_ranges) for d in range(len(shares))]
    return max(
        (n / share if share else float("inf") if n else 0.0) for n, share in zip(held, shares, strict=True)
    )


def test_ours_is_aligned_tiles_and_is_never_less_balanced() -> None:
    compared = 0
    for fmt, layers, n_vocab, n, split in cases(N_CASES, 8):
        a, f, shares, case = (
            layers[0].attention,
            layers[0].ffn,
            normalise(split, n),
            (fmt, layers[0], n, split),
        )
        ours, ours_outside = plan_model(layers, n_vocab, n, split)
        theirs, theirs_outside = plan_model(layers, n_vocab, n, split, "llama.cpp")
        sums = [0.0, 0.0]
        for which, plans in enumerate((ours, theirs)):
            for plan in plans:
                attention = busiest([plan.ranges["heads"], plan.ranges["kv_heads"]], shares) * (
                    a.head_dim_k + a.head_dim_v
                )
                experts = list(plan.experts) or [plan.ranges["ffn"]]
                sums[which] += attention + 3 * busiest(experts, shares)
        sums[0] += busiest([ours_outside.ranges["vocab"]], shares)
        sums[1] += busiest([theirs_outside.ranges["vocab"]], shares)
        # llama.cpp's grain follows head_k: with another head_v it may cut blocks, and that split cannot run.
        cuts = {begin * a.head_dim_v % a.block for plan in theirs for begin, _ in plan.ranges["heads"]}
        compared += cuts == {0}
        assert cuts != {0} or sums[0] <= sums[1] * (1 + 1e-9), case
        for plan in ours:
            check_tiling(plan.ranges["heads"], a.n_head, str(case))
            assert plan.ranges["kv_heads"] == kv_heads_of(plan.ranges["heads"], a.group), case
            for begin, _ in plan.ranges["heads"]:
                assert begin * a.head_dim_v % a.block == 0, case
            for expert in plan.experts or (plan.ranges["ffn"],):
                check_tiling(expert, f.n_ff, str(case))
                unit = ffn_unit(f.n_ff, f.block)
                assert all(begin % unit == 0 for begin, end in expert if begin < f.n_ff), case
            for d, share in enumerate(shares):
                held = [plan.ranges["heads"], *(plan.experts or [plan.ranges["ffn"]])]
                assert share or not sum(widths(ranges)[d] for ranges in held), case
    assert compared > 0.9 * N_CASES


def test_kv_heads_are_copied_where_there_are_fewer_than_devices() -> None:
    plans, _ = plan_model([Layer(Attention(8, 2, 64, 64, 32), FeedForward(256, 32))], 100, 4)
    assert plans[0].ranges["heads"] == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert plans[0].ranges["kv_heads"] == ((0, 1), (0, 1), (1, 2), (1, 2))


def test_experts_take_turns_with_the_larger_slice() -> None:
    plans, _ = plan_model([Layer(Attention(8, 4, 64, 64, 1), FeedForward(768, 256, 8))], 100, 2)
    assert (
        sum(widths(e)[0] for e in plans[0].experts) == sum(widths(e)[1] for e in plans[0].experts) == 8 * 384
    )


@pytest.mark.parametrize("policy", ["balanced", "llama.cpp"])
@pytest.mark.parametrize(
    ("columns", "block", "grain"), [(384, 256, 2), (128, 32, 1), (128, 256, 2), (16, 32, 2)]
)
@pytest.mark.parametrize("split", [None, [2.0, 1.0, 1.0], [1.0, 0.0, 3.0], [0.9, 0.05, 0.05]])
def test_delta_nets_are_shared_out_by_whole_blocks_of_key_heads(
    policy: str, columns: int, block: int, grain: int, split: list[float] | None
) -> None:
    layer = Layer(DeltaNet(16, columns, block), FeedForward(256, 32), "recurrent")
    plans, _ = plan_model([layer] * 3, 100, 3, split, policy)
    for plan in plans:
        heads = plan.ranges["k_heads"]
        check_tiling(heads, 16, policy)
        assert all(at % grain == 0 for cut in heads for at in cut)
        assert all(n == 0 for n, share in zip(widths(heads), split or [1] * 3, strict=True) if not share)
        if policy == "balanced" and split is None:
            assert max(widths(heads)) - min(widths(heads)) <= grain


@pytest.mark.parametrize("policy", ["balanced", "llama.cpp"])
def test_a_shared_expert_is_shared_out_beside_the_experts(policy: str) -> None:
    layer = Layer(Attention(8, 4, 64, 64), FeedForward(768, 256, 8, 2048, 32))
    plans, _ = plan_model([layer] * 3, 100, 3, (2, 1, 1), policy)
    for plan in plans:
        check_tiling(plan.ranges["ffn"], 2048, policy)
        assert sorted(widths(plan.ranges["ffn"])) == [512, 512, 1024]
        assert [max(end for _, end in expert) for expert in plan.experts] == [768] * 8
    plain, _ = plan_model([Layer(layer.attention, FeedForward(768, 256, 8))], 100, 2, None, policy)
    assert "ffn" not in plain[0].ranges


def test_refusals() -> None:
    layer = Layer(Attention(8, 4, 64, 64), FeedForward(256))
    with pytest.raises(InvalidArgument, match=r"policy 'best'.*balanced, llama.cpp"):
        plan_model([layer], 100, 2, None, "best")
    with pytest.raises(PlanError, match="no whole unit of 256"):
        plan_model([Layer(Attention(8, 4, 64, 64), FeedForward(128, 256))], 100, 2)


def shares_of(model: Any, block: int, n_devices: int, n_ff: int, dim: str, il: int) -> list[int]:
    """What each device gets of a dimension of layer `il` of one of the oracle's models."""
    layers = [
        Layer(
            Attention(model.n_head, model.kv(i), model.k(i), model.v(i), block),
            FeedForward(n_ff, block),
            "swa" if model.is_swa(i) else "",
        )
        for i in range(model.n_layer)
    ]
    plans, _ = plan_model(layers, 1000, n_devices, None, "llama.cpp")
    return [end - begin for begin, end in plans[il].ranges[dim]]


def test_llama_cpp_policy_equals_the_golden_splits(oracle: ModuleType, shared: Path) -> None:
    """Every range of the attention, FFN and experts in the table of whole models, but for recurrent ones."""
    text = (shared / "oracles" / "split_golden.txt").read_text()
    checked = 0
    for head, body in re.findall(r"^(\S+ \S+ n=\d)\n((?:  .*\n?)*)", text, re.MULTILINE):
        name, dtype, n = head.split()
        model, block = oracle.MODELS[name], {"Q8_0": 32, "Q4_K": 256, "F16": 1}[dtype]
        if model.recr:
            continue
        how, n_ff = (model, block, int(n[2:])), model.n_ff or model.n_ff_exp
        for line in body.splitlines():
            if found := re.match(r"  L(\d+) +attn\S* kv-heads (\[.*?\]) wo", line):
                got = shares_of(*how, n_ff, "kv_heads", int(found[1]))
                assert got == json.loads(found[2]), (head, line)
                checked += 1
            if found := re.match(r"  (ffn|exps) \d+: (.*)", line):
                width = model.n_ff_exp if found[1] == "exps" else n_ff
                for il, want in re.findall(r"L(\d+)(\[.*?\])", found[2]):
                    assert shares_of(*how, width, "ffn", int(il)) == json.loads(want), (head, line)
                    checked += 1
    assert checked >= 100
