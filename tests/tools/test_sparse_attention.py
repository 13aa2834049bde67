"""The study sparse_attention counts plain and sparse attention, and the docs have its table."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from places import ROOT

from vkbackend.errors import VkbackendError
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.ops import OPS
from vkbackend.tools.measure import attention_trips, compilers
from vkbackend.tools.measure.attention_steps import BLOCKS, DEEPSEEK, QUARTER, plain, sparse
from vkbackend.tools.measure.attention_trips import Shape, Trips
from vkbackend.tools.measure.loop_tree import Issued, Loop
from vkbackend.tools.studies import sparse_attention

FEATURES = frozenset(OPS["attn_chosen_coop"].needs)
AMD = Limits(1024, 65_536, subgroup_size=64, features=FEATURES, matrix_units=MatrixUnits(lanes=64))


@pytest.mark.no_vulkan
def test_ops_of_a_row() -> None:
    def ops_of(dispatches: list) -> list[str]:
        return [d.op for d in dispatches]

    without = replace(AMD, features=frozenset())
    assert ops_of(plain(without, DEEPSEEK, 1, 4096)) == ["attn_decode"]
    assert ops_of(plain(AMD, DEEPSEEK, 1, 4096)) == ["attn_decode_coop"]
    assert ops_of(plain(AMD, BLOCKS, 512, 4096)) == ["attn_prefill_coop"]
    assert ops_of(sparse(without, DEEPSEEK, 1, 4096)) == ["index_scores", "index_top_k", "attn_chosen"]
    assert ops_of(sparse(AMD, DEEPSEEK, 512, 4096)) == [
        "index_scores_coop",
        "index_top_k",
        "attn_prefill_coop",
        "attn_chosen_coop",
    ]
    choice = ["index_maxima_coop", "index_top_k"]
    assert ops_of(sparse(AMD, BLOCKS, 1, 4096)) == [*choice, "attn_blocks_coop"]
    assert ops_of(sparse(AMD, BLOCKS, 512, 4096)) == [*choice, "attn_blocks_coop", "attn_blocks_coop"]


def tree_of(trips: Trips, macs: float) -> Loop:
    """Return a listing's tree with these loops, of which the innermost multiply."""
    inner = tuple(tree_of(of, macs) for of in trips[1])
    return Loop(Issued(1, macs=0 if inner else macs), inner)


@pytest.mark.no_vulkan
def test_wrong_trips_are_an_error() -> None:
    (d,) = plain(AMD, BLOCKS, 1, 4096)
    consts, subgroups = dict(d.consts), 2
    work = attention_trips.OF[d.op](consts, Shape(BLOCKS, 1, 4096, d.groups))
    rounds = math.prod(times for times, _ in (work.trips[1][1], work.trips[1][1][1][0]))
    tree = tree_of(work.trips, 0)
    load, blocks = tree.inner
    for macs, is_right in ((work.macs / rounds / subgroups, True), (1000, False)):
        of_blocks = replace(blocks, inner=(replace(blocks.inner[0], own=Issued(1, macs=macs)),))
        loops = {(d.op, d.consts): replace(tree, inner=(load, of_blocks))}
        if is_right:
            total = sparse_attention.of_row([d], BLOCKS, 1, 4096, loops)
            assert total.macs == work.macs * work.workgroups
            continue
        with pytest.raises(VkbackendError, match="multiply-adds, the tile"):
            sparse_attention.of_row([d], BLOCKS, 1, 4096, loops)


@pytest.mark.wide
def test_block_lists_have_fewer_instructions_than_all_positions(capsys: pytest.CaptureFixture[str]) -> None:
    """The table in the docs is this table."""
    if why := compilers.missing(compilers.GPUS[sparse_attention.GPU]):
        pytest.skip(why)
    assert sparse_attention.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    for name, n, *_, token, _, _, prompt in rows:
        ratios = [float(of.partition(",")[0]) for of in (token, prompt)]
        # At 2,049 positions, a row of DeepSeek attends to 2,048 of them, and needs scores.
        most = {(DEEPSEEK.name, "2,049"): 1.12}
        most |= {
            (QUARTER.name, at): most_of for at, most_of in (("2,049", 1.37), ("2,560", 1.15), ("3,072", 1.01))
        }
        assert max(ratios) <= most.get((name, n), 1), (name, n, ratios)
    docs = (ROOT / "docs" / "measurements" / "kernels.md").read_text(encoding="utf-8")
    assert not [row for row in rows if "| " + " | ".join(row) + " |" not in docs]
