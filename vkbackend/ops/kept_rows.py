"""Ops on rows of earlier steps. Each slot keeps the rows of its last positions."""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.ops.target import Target, rows_of


class KeptRowOps(Target):
    def rows_before(self, x: View | None, kept: View, y: View, step: View) -> None:
        """For each row r, copy the row before it in its sequence to row r of y. If r is the first row of its
        run, this is the row that the slot kept, otherwise row r - 1 of x. A row at position 0 gets zeros.

        Shapes: x and y [n_rows, n], kept [n_slots, n_kept, n]. Without `x`, every run has one row.
        """
        _, n_kept, n = kept.shape
        n_rows = rows_of(y, n)
        assert x is None or rows_of(x, n) == n_rows, (x, y)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "n_kept": n_kept}
        consts = {"LOCAL": 64, "HAS_X": int(x is not None)}
        groups = (*self.fold(-(-n // 64)), n_rows)
        self.record("rows_before", "f32", (x or kept, kept, y), push, consts, groups, step)

    def keep_rows(self, x: View, kept: View, step: View) -> None:
        """Store row r of x [n_rows, n] as kept[slot, position % n_kept], kept [n_slots, n_kept, n]. If a run
        has more than n_kept rows, only its last n_kept rows are stored."""
        _, n_kept, n = kept.shape
        n_rows = rows_of(x, n)
        push: dict[str, int | float] = {"n": n, "n_rows": n_rows, "n_kept": n_kept}
        groups = (*self.fold(-(-n // 64)), n_rows)
        self.record("keep_rows", "f32", (x, kept), push, {"LOCAL": 64}, groups, step)
