"""Computes the exchanges of a step from the model's plan, without the step's recording."""

from __future__ import annotations

from math import isfinite

from vkbackend.models.architectures.selective import SelectiveDecoder
from vkbackend.models.architectures.state_space import StateSpaceDecoder
from vkbackend.models.architectures.wide_normed import WideNormed
from vkbackend.models.engine.runner.runner import Runner


def planned(runner: Runner, rows: int) -> list[int]:
    """Return the number of elements of each exchange in a step whose layers are on several devices. Per
    token, attention (or the layer in its place) exchanges a row of the residual, and the FFN exchanges
    another row. Attention and FFN exchange only one row if the model adds their results together. Some layers
    need more exchanges, most of them small: two values per token for norms of q and k over all heads and for
    FFNs with sparse gates, and one value per token for a norm before an output matrix. Split norms of state
    space heads exchange one value per group. Experts after hyper-connections read the first device's row, so
    all devices choose the same experts. Experts that write a latent vector exchange this vector before its
    norm. Mamba-1 layers sum dt, B and C, which all channels share."""
    wanted, m = [], runner.model
    names = {spec.name for spec in m.weights()}
    for il, plan in enumerate(runner.layout.plans):
        mixes = "heads" in plan.ranges or "k_heads" in plan.ranges or "ssm_heads" in plan.ranges
        if isinstance(m, WideNormed):
            wanted.append(2 * rows)
        if isinstance(m, SelectiveDecoder) and m.recurrent[il]:
            wanted.append(rows * sum(m.selection.shared.values()))
        if isinstance(m, StateSpaceDecoder) and f"blk.{il}.ssm_norm.weight" in names:
            group = m.scan.n_head // m.scan.n_group
            if any(at % group for cut in plan.ranges["ssm_heads"] for at in cut):
                wanted.append(rows * m.scan.n_group)
        if getattr(m, "cuts", ()) and isfinite(m.cuts[il]):
            wanted += [rows * m.n_embd, 2 * rows, rows * m.n_embd]
            continue
        if plan.experts and m.residual_is_wide:  # type: ignore[attr-defined]
            wanted.append(rows * m.n_embd)
            mixture = m.config.layers[il].mixture  # type: ignore[attr-defined]
            wanted += [rows * mixture.n_latent] if mixture.n_latent else []
        sub_norms = (f"blk.{il}.{part}_sub_norm.weight" in names for part in ("attn", "ffn"))
        wanted += [rows for has_norm in sub_norms if has_norm]
        halves = mixes + ("ffn" in plan.ranges or bool(plan.experts))
        wanted += [rows * m.n_embd] * (1 if getattr(m, "parallel", False) else halves)
    return wanted
