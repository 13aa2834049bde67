from __future__ import annotations

import math
from dataclasses import dataclass

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops.spec import SPECS, OpSpec
from vkbackend.recording import Dispatch, Recording

MAX_GROUPS = 65_535  # workgroups per axis that Vulkan guarantees


@dataclass(frozen=True)
class Target:
    recording: Recording
    limits: Limits
    label: str = ""  # The commands' label; if "", the op's name.

    def record(
        self,
        op: str | OpSpec,
        variant: str,
        args: tuple[View, ...],
        push: dict[str, int | float],
        consts: dict[str, int],
        groups: tuple[int, int, int],
        step: View | None = None,
        flops: int = 0,
        apart: int = 0,
    ) -> None:
        spec = SPECS[op] if isinstance(op, str) else op
        assert len(push) == len(spec.push), (spec.name, tuple(push))
        assert tuple(consts) == spec.consts and len(args) == len(spec.args), (spec.name, tuple(consts))
        assert (step is not None) == spec.step, spec.name
        assert 0 < min(groups) and max(groups) <= MAX_GROUPS, (spec.name, groups)
        values: list[tuple[str, int | float]] = []
        for (name, kind), (given, value) in zip(spec.push, push.items(), strict=True):
            assert given == name and (kind == "f" or 0 <= value < 1 << 32), (spec.name, push)
            values.append((name, float(value) if kind == "f" else value))
        self.recording.dispatch(
            Dispatch(
                spec.name,
                variant,
                args,
                spec.written,
                tuple(values),
                tuple(consts.items()),
                groups,
                step,
                self.label or spec.name,
                flops,
                spec.addressed,
                spec.rows,
                apart,
            )
        )

    def copy(self, src: View, dst: View) -> None:
        self.recording.copy(src, dst, self.label)

    def fold(self, count: int) -> tuple[int, int]:
        """Return workgroups (x, y) within the device's limits with x * y >= count."""
        max_x = min(self.limits.max_groups[0], MAX_GROUPS)
        return (count, 1) if count <= max_x else (max_x, -(-count // max_x))


def rows_of(view: View, width: int, dtype: str = "f32") -> int:
    total = math.prod(view.shape)
    assert view.dtype == dtype and total % width == 0, f"{view!r} is not {dtype} rows of {width}"
    return total // width


def floor_pow2(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)


def low_bit(value: int) -> int:
    """Return the largest power of two that divides `value`."""
    return value & -value
