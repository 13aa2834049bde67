"""Adds GGUF's types that the package `gguf` lacks to its enumeration, so that its writer accepts them."""

from __future__ import annotations

import gguf

from vkbackend.formats import NEWER


def ggml_type(name: str) -> gguf.GGMLQuantizationType:
    """Return the type with a name such as "q2_0". Raises KeyError."""
    enum = gguf.GGMLQuantizationType
    for number, (newer, elements, nbytes) in NEWER.items():
        if newer.upper() not in enum.__members__:
            member = int.__new__(enum, number)
            member._name_, member._value_ = newer.upper(), number
            enum._member_map_[newer.upper()] = enum._value2member_map_[number] = member
            gguf.GGML_QUANT_SIZES[member] = elements, nbytes
    return enum[name.upper()]
