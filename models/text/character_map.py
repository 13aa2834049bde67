"""The character map of a SentencePiece vocabulary, which replaces the longest known text at each position.

The map is a trie over UTF-8 bytes, stored as a double array (Kanda 2018, XOR instead of addition). A node's
32 bits encode its byte, a flag for the end of a known text, and the position of its children.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vkbackend.errors import GGUFError

# A node with an offset into the texts has the highest bit set, so its label never equals a byte.
_LABEL = 1 << 31 | 0xFF


class CharacterMap:
    """Replaces texts according to the map `raw`, the file's `tokenizer.ggml.precompiled_charsmap`, which may
    be empty."""

    def __init__(self, raw: Any, path: Path) -> None:
        stored = np.asarray(raw if len(raw) else [], np.uint8).tobytes()
        size = int.from_bytes(stored[:4], "little")
        if stored and (size % 4 or not 0 < size < len(stored) - 4):
            raise GGUFError(
                f"{path}: 'tokenizer.ggml.precompiled_charsmap' has {len(stored)} bytes, of which the map "
                f"itself is to take {size}: the file is damaged, or the converter does not fit"
            )
        self._nodes: list[int] = np.frombuffer(stored[4 : 4 + size], "<u4").tolist()
        self._texts = stored[4 + size :]

    def __call__(self, text: str) -> str:
        if not self._nodes:
            return text
        raw, out, at, copied = text.encode(), list[bytes](), 0, 0
        while at < len(raw):
            length, where = self._longest(raw, at)
            if length:
                out += (raw[copied:at], self._texts[where:].partition(b"\0")[0])
                at = copied = at + length
            else:
                at += 1
                while at < len(raw) and raw[at] & 0xC0 == 0x80:
                    at += 1
        return b"".join([*out, raw[copied:]]).decode(errors="replace")

    def _longest(self, raw: bytes, at: int) -> tuple[int, int]:
        """Return the length of the longest match (0 if none), and the offset of its replacement."""
        nodes, n_nodes = self._nodes, len(self._nodes)
        length = where = 0
        node = _children(nodes[0])
        for i in range(at, len(raw)):
            byte = raw[i]
            node ^= byte
            if not byte or node >= n_nodes or nodes[node] & _LABEL != byte:
                break
            ends = nodes[node] >> 8 & 1
            node ^= _children(nodes[node])
            if ends and node < n_nodes:
                length, where = i - at + 1, nodes[node] & ~(1 << 31)
        return length, where


def _children(node: int) -> int:
    return node >> 10 << ((node & 1 << 9) >> 6)
