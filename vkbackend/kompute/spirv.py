"""Adapts SPIR-V modules to kp."""

from __future__ import annotations

import numpy as np


def storage_only(code: bytes) -> bytes:
    """Return the module with only storage buffers in one descriptor set, because kp supports no other
    buffers.

    Storage class Uniform becomes StorageBuffer (SPIR-V 1.3, 3.7). Decorations and layouts remain valid.
    Bindings of other sets are appended to set 0.
    """
    uniform, storage_buffer = 2, 12
    class_at = {32: 2, 59: 3}  # index of the storage class in OpTypePointer and OpVariable
    op_decorate, binding, descriptor_set = 71, 33, 34
    words, at = np.frombuffer(code, np.uint32).copy(), 5
    # {decoration: {variable: index of the decoration's value in `words`}}
    places: dict[int, dict[int, int]] = {binding: {}, descriptor_set: {}}
    while at < words.size:
        op, length = int(words[at]) & 0xFFFF, int(words[at]) >> 16
        if op in class_at and words[at + class_at[op]] == uniform:
            words[at + class_at[op]] = storage_buffer
        elif op == op_decorate and int(words[at + 2]) in places:
            places[int(words[at + 2])][int(words[at + 1])] = at + 3
        at += length
    moved = [variable for variable, at in places[descriptor_set].items() if words[at]]
    n = sum(1 for at in places[descriptor_set].values() if not words[at])
    for number, variable in enumerate(moved, n):
        words[places[descriptor_set][variable]], words[places[binding][variable]] = 0, number
    return words.tobytes()
