from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.step import StepParams
from vkbackend.twins.arrays import Array

NONE = 0xFFFFFFFF  # As in vkbackend/ops/expert_cache.py.


def moe_lookup(
    ids: Array, table: Array, misses: Array, hits: Array, counts: Array, step: StepParams, *,
    n_pairs: int, n_used: int, n_experts: int, counted: int, **_: Any,
) -> None:  # fmt: skip
    expert, slot_of = ids.reshape(-1)[:n_pairs], table.reshape(-1)[:n_experts]
    known = expert < n_experts
    slot = np.where(known, slot_of[np.where(known, expert, 0)], np.uint32(NONE))
    hits.reshape(-1)[:n_pairs] = slot
    misses.reshape(-1)[:n_pairs] = np.where(slot == NONE, expert, np.uint32(NONE))
    if counted:
        used = expert[: step.n_rows * n_used]
        counts.reshape(-1)[:n_experts] = np.bincount(used[used < n_experts], minlength=n_experts)
