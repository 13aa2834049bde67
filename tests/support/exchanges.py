"""What a model's layers exchange as its plan says, without looking at what was recorded."""

from __future__ import annotations

from math import isfinite

from vkbackend.models.architectures.state_space import StateSpaceDecoder
from vkbackend.models.architectures.wide_normed import WideNormed
from vkbackend.models.engine.runner import Runner


def planned(runner: Runner, rows: int) -> list[int]:
    """The elements of every exchange of a step of layers that lie on several devices.

    Attention (or what is in its place) exchanges a row of the residual, and so does the FFN; one row serves
    both where they are added together. Some layers exchange more before that. Norms of q and k over all heads
    take two values per row. A norm over a group of state space heads that lies on several devices takes one
    value per group and row. An FFN that keeps only its largest gates takes two values per row.
    """
    wanted, m = [], runner.model
    names = {spec.name for spec in m.weights()}
    for il, plan in enumerate(runner.layout.plans):
        mixes = "heads" in plan.ranges or "k_heads" in plan.ranges or "ssm_heads" in plan.ranges
        if isinstance(m, WideNormed):
            wanted.append(2 * rows)
        if isinstance(m, StateSpaceDecoder) and f"blk.{il}.ssm_norm.weight" in names:
            group = m.scan.n_head // m.scan.n_group
            if any(at % group for cut in plan.ranges["ssm_heads"] for at in cut):
                wanted.append(rows * m.scan.n_group)
        if getattr(m, "cuts", ()) and isfinite(m.cuts[il]):
            wanted += [rows * m.n_embd, 2 * rows, rows * m.n_embd]
            continue
        halves = mixes + ("ffn" in plan.ranges or bool(plan.experts))
        wanted += [rows * m.n_embd] * (1 if getattr(m, "parallel", False) else halves)
    return wanted
