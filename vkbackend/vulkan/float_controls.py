"""Declares in a shader how it rounds to F16 (SPV_KHR_float_controls, core in SPIR-V 1.4).

Without the declaration, a driver may truncate values, and may flush values below 2^-14 to zero. Drivers
support different modes, so the declaration is added at runtime.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

_HEADER_WORDS = 5
_OP_EXTENSION, _OP_ENTRY_POINT, _OP_EXECUTION_MODE, _OP_CAPABILITY = 10, 15, 16, 17
_NAME = b"SPV_KHR_float_controls"
# Capability and execution mode by feature: rounding to nearest even, and preserving denormals.
MODES = {"rte_float16": (4467, 4462), "denorm_float16": (4464, 4459)}


def declared(code: bytes, features: Mapping[str, Any]) -> bytes:
    """Return `code` with declarations of the 16-bit float modes in `features`."""
    wanted = [modes for name, modes in MODES.items() if features.get(name)]
    if not wanted:
        return code
    words = list(struct.unpack(f"<{len(code) // 4}I", code))
    capability_at = entry_at = at = _HEADER_WORDS
    entry_point = 0
    while at < len(words):
        op, length = words[at] & 0xFFFF, words[at] >> 16
        assert length, "not a SPIR-V module"
        at += length
        if op == _OP_CAPABILITY:
            capability_at = at
        elif op == _OP_ENTRY_POINT:
            entry_at, entry_point = at, words[at - length + 2]
            break
    name = _NAME + bytes(4 - len(_NAME) % 4)
    extension = _instruction(_OP_EXTENSION, *struct.unpack(f"<{len(name) // 4}I", name))
    head = [word for capability, _ in wanted for word in _instruction(_OP_CAPABILITY, capability)]
    modes = [word for _, mode in wanted for word in _instruction(_OP_EXECUTION_MODE, entry_point, mode, 16)]
    patched = [
        *words[:capability_at], *head, *extension, *words[capability_at:entry_at], *modes, *words[entry_at:]
    ]  # fmt: skip
    return struct.pack(f"<{len(patched)}I", *patched)


def _instruction(op: int, *operands: int) -> list[int]:
    return [1 + len(operands) << 16 | op, *operands]
