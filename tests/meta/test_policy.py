"""llama.cpp's split policy equals an oracle of its arithmetic. vkbackend's policy aligns splits, and balances
them at least as well."""

from __future__ import annotations

import json
from typing import Any

import pytest
from material import DATA
from places import SHARED
from random_cases import examples
from split_cases import BLOCKS, Case, answers, cases, load_oracle

from vkbackend.errors import InvalidArgument, PlanError
from vkbackend.meta.plan import normalise
from vkbackend.meta.policy import Attention, DeltaNet, FeedForward, Layer, StateSpace, ffn_unit, plan_model
from vkbackend.meta.split import Ranges, check_tiling, kv_heads_of

pytestmark = pytest.mark.no_vulkan


N_CASES = examples(2_000)
ORACLE = SHARED / "oracles" / "split_oracle.py"


def widths(ranges: Ranges) -> list[int]:
    return [end - begin for begin, end in ranges]


def planned(case: Case) -> list[list[int]]:
    _, layers, n_vocab, n, split = case
    a, rows = layers[0].attention, []
    plans, outside = plan_model(layers, n_vocab, n, split, "llama.cpp")
    for plan in plans:
        heads, kv_heads = widths(plan.ranges["heads"]), widths(plan.ranges["kv_heads"])
        rows += [[a.head_dim_k * w for w in of] for of in (heads, kv_heads)]
        rows += [[a.head_dim_v * w for w in of] for of in (kv_heads, heads)]
        [columns] = {expert for expert in plan.experts or (plan.ranges["ffn"],)}
        rows.append(widths(columns))
    return [*rows, widths(outside.ranges["vocab"])]


# ---- the oracle's splits: stored (tests/data/make_splits.py), and computed if it is installed ----

KEPT = json.loads((DATA / "splits.json").read_text(encoding="utf-8"))


def test_llama_cpp_policy_equals_the_oracle() -> None:
    seen = set()
    for fmt, attention, ffn, n_layer, n_vocab, n, split, want in KEPT["cases"]:
        layer = Layer(Attention(*attention), FeedForward(*ffn))
        assert planned((fmt, [layer] * n_layer, n_vocab, n, split)) == want, (fmt, layer, n, split)
        seen.add((fmt, layer.attention.head_dim_k == layer.attention.head_dim_v))
    assert seen == {(fmt, alike) for fmt in BLOCKS for alike in (True, False)}


@pytest.mark.parametrize("model", KEPT["models"], ids=lambda model: model["name"])
def test_llama_cpp_policy_equals_the_golden_splits(model: dict[str, Any]) -> None:
    assert len(model["splits"]) >= 6
    for block, n, dim, width, il, want in model["splits"]:
        layers = [
            Layer(Attention(*attention, block), FeedForward(width, block), "swa" if swa else "")
            for attention, swa in zip(model["attention"], model["swa"], strict=True)
        ]
        plans, _ = plan_model(layers, 1000, n, None, "llama.cpp")
        assert widths(plans[il].ranges[dim]) == want, (block, n, dim, il)


if ORACLE.is_file():

    @pytest.mark.wide
    @pytest.mark.parametrize("seed", range(1, 7))
    def test_llama_cpp_policy_equals_the_oracle_next_to_the_checkout(seed: int) -> None:
        want = answers(load_oracle(ORACLE))
        for case in cases(N_CASES, seed):
            assert planned(case) == want(case), case


def busiest(plan_ranges: list[Ranges], shares: tuple[float, ...]) -> float:
    """Return the largest ratio of a device's part of all widths to its share."""
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
        # llama.cpp aligns splits to multiples of head_k. If head_v differs from head_k, a split may divide a
        # block, so it cannot run.
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


def test_kv_heads_are_copied_if_there_are_fewer_than_devices() -> None:
    plans, _ = plan_model([Layer(Attention(8, 2, 64, 64, 32), FeedForward(256, 32))], 100, 4)
    assert plans[0].ranges["heads"] == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert plans[0].ranges["kv_heads"] == ((0, 1), (0, 1), (1, 2), (1, 2))


def test_the_larger_slice_alternates_between_experts() -> None:
    plans, _ = plan_model([Layer(Attention(8, 4, 64, 64, 1), FeedForward(768, 256, 8))], 100, 2)
    assert (
        sum(widths(e)[0] for e in plans[0].experts) == sum(widths(e)[1] for e in plans[0].experts) == 8 * 384
    )


@pytest.mark.parametrize("policy", ["balanced", "llama.cpp"])
@pytest.mark.parametrize(
    ("columns", "block", "grain"), [(384, 256, 2), (128, 32, 1), (128, 256, 2), (16, 32, 2)]
)
@pytest.mark.parametrize("split", [None, [2.0, 1.0, 1.0], [1.0, 0.0, 3.0], [0.9, 0.05, 0.05]])
def test_delta_nets_are_split_between_blocks_of_key_heads(
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


@pytest.mark.parametrize("split", [None, [2.0, 1.0, 1.0], [1.0, 0.0, 3.0]])
@pytest.mark.parametrize(("n_group", "block", "grain"), [(8, 32, 1), (8, 256, 4), (1, 256, 4), (2, 1, 1)])
def test_state_space_heads_are_split_with_their_groups(
    n_group: int, block: int, grain: int, split: list[float] | None
) -> None:
    layer = Layer(StateSpace(32, n_group, 64, 128, block), None)
    plans, _ = plan_model([layer] * 3, 100, 3, split)
    for plan in plans:
        heads, groups = plan.ranges["ssm_heads"], plan.ranges["ssm_groups"]
        check_tiling(heads, 32, "heads")
        assert groups == kv_heads_of(heads, 32 // n_group) and set(plan.ranges) == {"ssm_heads", "ssm_groups"}
        assert all(at % grain == 0 for cut in heads for at in cut)
        shares = split or [1] * 3
        assert all(share or not n for n, share in zip(widths(heads), shares, strict=True))
        assert split or all(widths(heads))


@pytest.mark.parametrize("policy", ["balanced", "llama.cpp"])
def test_every_device_with_a_share_keeps_the_rows_before(policy: str) -> None:
    layer = Layer(DeltaNet(2, 64, 32, shifts=True), FeedForward(512, 32))
    plans, _ = plan_model([layer] * 3, 100, 4, [1.0, 0.0, 1.0, 1.0], policy)
    for plan in plans:
        assert plan.ranges["shifts"] == ((0, 1), (0, 0), (0, 1), (0, 1))
        check_tiling(plan.ranges["k_heads"], 2, "key heads")


def test_layers_without_mixer_or_ffn_and_with_parallel_scan() -> None:
    attention, scan, ffn = Attention(8, 4, 64, 64), StateSpace(8, 1, 64, 128), FeedForward(256)
    layers = [Layer(None, ffn), Layer(scan, None), Layer(attention, ffn, parallel=scan)]
    for policy in ("balanced", "llama.cpp"):
        plans, _ = plan_model(layers, 100, 2, None, policy)
        assert [set(plan.ranges) for plan in plans] == [
            {"ffn"},
            {"ssm_heads", "ssm_groups"},
            {"heads", "kv_heads", "ssm_heads", "ssm_groups", "ffn"},
        ]


@pytest.mark.parametrize("policy", ["balanced", "llama.cpp"])
def test_a_shared_expert_is_split_in_addition_to_the_experts(policy: str) -> None:
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
    with pytest.raises(PlanError, match="smaller than a unit of 256"):
        plan_model([Layer(Attention(8, 4, 64, 64), FeedForward(128, 256))], 100, 2)
