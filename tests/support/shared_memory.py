"""Evaluates a SPIR-V module's shared memory for given specialization constants."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np

TYPE_BOOL, TYPE_INT, TYPE_FLOAT, TYPE_VECTOR, TYPE_ARRAY, TYPE_POINTER = 20, 21, 22, 23, 28, 32
CONSTANT, SPEC_TRUE, SPEC_FALSE, SPEC_CONSTANT, SPEC_OP, VARIABLE, DECORATE = 43, 48, 49, 50, 52, 59, 71
SPEC_ID, WORKGROUP = 1, 4
# Opcodes of OpSpecConstantOp. The modules use unsigned integers and booleans.
OPERATIONS: dict[int, Callable[..., int]] = {
    128: operator.add, 130: operator.sub, 132: operator.mul, 134: operator.floordiv, 135: operator.floordiv,
    137: operator.mod, 139: operator.mod, 164: operator.eq, 165: operator.ne, 166: lambda a, b: a or b,
    167: lambda a, b: a and b, 168: operator.not_, 169: lambda a, b, c: b if a else c, 170: operator.eq,
    171: operator.ne, 172: operator.gt, 173: operator.gt, 174: operator.ge, 175: operator.ge,
    176: operator.lt, 177: operator.lt, 178: operator.le, 179: operator.le, 194: operator.rshift,
    195: operator.rshift, 196: operator.lshift, 197: operator.or_, 198: operator.xor, 199: operator.and_,
}  # fmt: skip


def shared_nbytes(code: bytes, values: Sequence[int]) -> int:
    """Return the bytes of all shared variables. `values` are the specialization constants in order of ids.
    Variables are aligned as in std430."""
    words, at = np.frombuffer(code, np.uint32).tolist(), 5
    spec_ids: dict[int, int] = {}
    constants: dict[int, int] = {}
    types: dict[int, tuple[int, int]] = {}  # result id -> size and alignment in bytes
    pointees: dict[int, int] = {}
    nbytes = 0
    while at < len(words):
        op, length = words[at] & 0xFFFF, words[at] >> 16
        args = words[at + 1 : at + length]
        if op == DECORATE and args[1] == SPEC_ID:
            spec_ids[args[0]] = args[2]
        elif op in (CONSTANT, SPEC_CONSTANT, SPEC_TRUE, SPEC_FALSE):
            constants[args[1]] = _constant(op, args, spec_ids, values)
        elif op == SPEC_OP and args[2] in OPERATIONS and all(a in constants for a in args[3:]):
            result = OPERATIONS[args[2]](*(constants[a] for a in args[3:]))
            constants[args[1]] = int(result) & 0xFFFFFFFF
        elif op in (TYPE_INT, TYPE_FLOAT):
            types[args[0]] = (args[1] // 8,) * 2
        elif op == TYPE_BOOL:
            types[args[0]] = 4, 4
        elif op == TYPE_VECTOR:
            size = types[args[1]][0]
            types[args[0]] = size * args[2], size * (2 if args[2] == 2 else 4)
        elif op == TYPE_ARRAY and args[2] in constants and args[1] in types:
            size, align = types[args[1]]
            types[args[0]] = -(-size // align) * align * constants[args[2]], align
        elif op == TYPE_POINTER and args[1] == WORKGROUP:
            pointees[args[0]] = args[2]
        elif op == VARIABLE and args[2] == WORKGROUP:
            size, align = types[pointees[args[0]]]
            nbytes = -(-nbytes // align) * align + size
        at += length
    return nbytes


def _constant(op: int, args: Sequence[int], spec_ids: Mapping[int, int], values: Sequence[int]) -> int:
    chosen = spec_ids.get(args[1], len(values))
    if chosen < len(values):
        return values[chosen]
    return args[2] if op in (CONSTANT, SPEC_CONSTANT) else int(op == SPEC_TRUE)
