"""The op of an expert cache. The cache holds copies of some experts in slots of device memory, and shaders
read the other experts from host memory.

A product with experts becomes two `mat_id`: the cached experts with `hits`, and the others with `misses`. An
id of NONE is in no piece of a stack and in no group, so each product skips the other product's pairs.
"""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.ops.moe import MAX_EXPERTS
from vkbackend.ops.target import Target, rows_of

NONE = 0xFFFFFFFF


class ExpertCacheOps(Target):
    def moe_lookup(
        self, ids: View, table: View, misses: View, hits: View, step: View, counts: View | None = None
    ) -> None:
        """Write hits[r, u] = table[ids[r, u]]. Also write misses[r, u]: NONE for a hit, and otherwise ids[r,
        u].

        `table` u32 [n_experts] holds the slot of each cached expert, and NONE for other experts. `ids`,
        `misses` and `hits` are u32 [n_rows, n_used]. `counts` u32 [n_experts] receives the number of pairs of
        the step's rows per expert.
        """
        (n_rows, n_used), [n_experts] = ids.shape, table.shape
        assert all(v.dtype == "u32" for v in (ids, table, misses, hits)), (ids, table, misses, hits)
        assert rows_of(misses, n_used, "u32") == rows_of(hits, n_used, "u32") == n_rows, (misses, hits)
        assert counts is None or (counts.shape == table.shape and counts.dtype == "u32"), counts
        assert n_experts <= MAX_EXPERTS, n_experts
        self.record(
            "moe_lookup",
            "f32",
            (ids, table, misses, hits, counts or hits),
            {"n_pairs": n_rows * n_used, "n_used": n_used, "n_experts": n_experts},
            {"LOCAL": 128, "COUNTED": int(counts is not None)},
            (1, 1, 1),
            step,
        )
