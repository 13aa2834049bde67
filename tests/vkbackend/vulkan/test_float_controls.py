"""Execution modes for rounding are added to SPIR-V at valid positions, and drivers accept the result."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from vkbackend import shaderlib
from vkbackend.ops import OPS

MODULE = "add", "f32"


def instructions(code: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    words = struct.unpack(f"<{len(code) // 4}I", code)
    at = 5
    while at < len(words):
        length = words[at] >> 16
        yield words[at] & 0xFFFF, words[at + 1 : at + length]
        at += length


@pytest.fixture
def code() -> bytes:
    if not shaderlib.is_available(*MODULE):
        pytest.skip("no compiler for the shader is here (tools/setup.sh)")
    return shaderlib.spirv(*MODULE)


def test_modes_are_declared_in_order(code: bytes) -> None:
    from vkbackend.vulkan.float_controls import declared

    before, after = list(instructions(code)), list(instructions(declared(code, {"rte_float16": True})))
    added = [i for i in after if i not in before]
    assert [op for op, _ in added] == [17, 10, 16]
    entry = next(operands[1] for op, operands in before if op == 15)
    assert added[0][1] == (4467,) and added[2][1] == (entry, 4462, 16)
    assert struct.pack(f"<{len(added[1][1])}I", *added[1][1]).rstrip(b"\0") == b"SPV_KHR_float_controls"
    order = [op for op, _ in after]
    assert order.index(10) > max(i for i, op in enumerate(order) if op == 17)
    assert after[order.index(15) + 1] == added[2]
    assert [i for i in after if i not in added] == before


def test_without_the_feature_nothing_changes(code: bytes) -> None:
    from vkbackend.vulkan.float_controls import declared

    assert declared(code, {"rte_float16": False}) == code


@pytest.mark.native
def test_modes_are_declared_in_f16_shaders(device: Any, code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend.vulkan import float_controls, program

    if not device.features.get("rte_float16"):
        pytest.skip(f"{device.info.name} has no rounding mode for halves")
    spec = replace(OPS["add"], needs=("matrix_units",))
    monkeypatch.setattr(program, "OPS", OPS | {"add": spec})
    seen = []

    def declared(code: bytes, features: Any) -> bytes:
        seen.append(float_controls.declared(code, features))
        return seen[-1]

    monkeypatch.setattr(program, "float_controls", type("Spy", (), {"declared": staticmethod(declared)}))
    programs = program.Programs(device, device.memory, device.transfers)
    try:
        for op, n_args in (("add", 3), ("scale", 2)):
            layout = programs.layouts.get(n_args, False)
            programs._make({(op, "f32", (("LOCAL", 64),)): layout})
    finally:
        programs.close()
    assert len(seen) == 1 and any(op == 16 and operands[1] == 4462 for op, operands in instructions(seen[0]))
