"""Saves a slot's tokens, K and V to a safetensors file, and loads them.

The file stores the heads in the model's order (docs/state_format.md), so any devices can load it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vkbackend import env
from vkbackend.atomic_file import replacing
from vkbackend.errors import InvalidArgument, StateError
from vkbackend.formats import row_nbytes
from vkbackend.meta.gather import PIECE_NBYTES, gather_rows, matrix_of, scatter_rows, transfers
from vkbackend.meta.tensor import Weight
from vkbackend.models.engine.cache.blocks import SlotContent
from vkbackend.models.engine.cache.image_spans import ID_NBYTES
from vkbackend.models.engine.cache.mark import AdapterUse, Mark, n_alike
from vkbackend.models.engine.cache.prefix_tree import packed
from vkbackend.models.engine.runner.state_checksums import check, checksums
from vkbackend.models.placement.cache_plan import layout_of
from vkbackend.paths import quoted, why

if TYPE_CHECKING:
    from vkbackend.models.engine.runner.runner import Runner
    from vkbackend.models.placement.kv_cache import CachePart

FORMAT, VERSION = "vkbackend.state", "1"
MAX_POSITION = 1 << 30
MAX_HEADER_NBYTES = 1 << 20  # The header of a model with 1,024 layers has 0.4 MiB.
_DTYPES = {  # Type names in the header and in numpy. Quantized blocks are stored as bytes.
    "f32": ("F32", "<f4"),
    "f16": ("F16", "<f2"),
    "bf16": ("U16", "<u2"),
    **dict.fromkeys(("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"), ("U8", "u1")),
}


def save(
    runner: Runner,
    path: str | os.PathLike[str],
    slot: int,
    content: SlotContent,
    first: int,
    last: int | None,
) -> None:
    """Write positions `first` to `last` - 1 to `path`, or up to the end if `last` is None. After an error,
    `path` is unchanged. Needs host memory of the file's size. Raises InvalidArgument for positions that the
    slot lacks, and StateError if the file cannot be written."""
    stop = content.n_stored if last is None else last
    if not 0 <= first < stop <= content.n_stored:
        raise InvalidArgument(
            f"positions {first}..{stop} of slot {slot} cannot be saved: it holds {content.n_stored}; "
            "give 0 <= first < last, and last at most that"
        )
    if stop < content.resumable:
        raise InvalidArgument(
            f"positions {first}..{stop} of slot {slot} cannot be saved: layers with a sliding window no "
            f"longer hold the positions that {stop} attends to; give a last of at least {content.resumable}"
        )
    if runner.kv.states and (first, stop) != (0, content.n_stored):
        raise InvalidArgument(
            f"positions {first}..{stop} of slot {slot} cannot be saved alone: the model has recurrent "
            f"layers, whose state stands for all {content.n_stored} positions; save the slot without a range"
        )
    tokens = packed(content.tokens[first : content.n_stored + 1 if last is None else stop])
    tensors: dict[str, tuple[str, np.ndarray]] = {"tokens": (_type_of(tokens), tokens)}
    with transfers(runner.mesh.devices) as devices:
        for held in runner.kv.parts:
            begin = _begin(held.window, content.resumable, first, stop)
            runs = _runs(held, slot, begin, stop)
            pieces = [gather_rows(devices, held.array, cell, cell + n) for _, cell, n in runs]
            rows = np.concatenate([np.empty((0, matrix_of(held.array)[1]), np.uint8), *pieces])
            in_file, in_numpy = _DTYPES[held.array.dtype]
            tensors[held.name] = in_file, rows.view(in_numpy).reshape(len(rows), *_shape(held))
        for name, state in _states(runner):
            cell = runner.kv.states.slots.cell(slot, stop)
            tensors[name] = "F32", gather_rows(devices, state, cell, cell + 1).view("<f4").reshape(-1)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "first": str(first),
        "last": str(stop),
        "resumable": str(content.resumable),
        "prefix_sha256": _hash(content.tokens[:first]),
    } | _identity(runner)
    if uses := [(use.digest, use.scale, use.start) for use in content.mark if use.start < stop]:
        metadata["adapters"] = json.dumps(uses)
    metadata |= checksums(metadata, tensors)
    try:
        with replacing(path, StateError) as part:
            save_file({name: array for name, (_, array) in tensors.items()}, part, metadata)
    except SafetensorError as error:
        raise StateError(f"{path}: cannot be written: {error}; give a name in a folder with space") from None


def load(
    runner: Runner,
    path: str | os.PathLike[str],
    slot: int,
    content: SlotContent,
    place: Callable[[int, int], dict[int, int]] | None = None,
) -> None:
    """Load saved positions into a slot and update `content`. After the checks, `place(first, last)` allocates
    blocks and returns {window: first position with a block}.

    If the saved positions begin at 0, they replace the content. Otherwise they must continue the content.
    Raises StateError for a file that is damaged or does not fit; the slot is then unchanged. If a device
    fails, the slot keeps the positions before `first`.
    """
    _check_file(Path(path))
    try:
        with safe_open(path, framework="numpy") as file, transfers(runner.mesh.devices) as devices:
            first, last, tokens, saved, mark = _check(runner, file, path, content)
            if not check(file, path):
                env.log(
                    0, f"{quoted(path)}: saved without checksums, so damage cannot be detected; save it again"
                )
            room = place(first, last) if place else {}
            del content.tokens[first:]
            content.n_stored = first
            content.resumable = _resumable(runner, content, first, last, saved)
            if runner.kv.states:
                cell = runner.kv.states.slots.put(slot, last)
                for name, state in _states(runner):
                    data = file.get_tensor(name).reshape(1, -1).view(np.uint8)
                    scatter_rows(devices, state, cell, data)
            for part in runner.kv.parts:
                rows, table = file.get_slice(part.name), part.table
                begin = _begin(part.window, saved, first, last)
                # This slot may have fewer cells for a window than the slot that was saved.
                kept = max(begin, last - table.capacity, room.get(table.window, 0))
                for at, cell, n in _runs(part, slot, kept, last):
                    at += kept // part.block - begin // part.block
                    data = np.ascontiguousarray(rows[at : at + n]).reshape(n, -1).view(np.uint8)
                    scatter_rows(devices, part.array, cell, data)
            content.tokens += tokens
            content.n_stored, content.mark = last, mark
    except (SafetensorError, OSError) as error:
        raise StateError(
            f"{path}: not a whole safetensors file: {why(error)}; save the state again"
        ) from None


def _check_file(path: Path) -> None:
    try:
        status = path.stat()  # `stat` comes first, because opening a named pipe waits for a writer
        if not stat.S_ISREG(status.st_mode):
            raise StateError(f"{path}: is not a regular file; give the name of a saved state")
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL.
        raise StateError(f"{path}: cannot be read: {why(error)}; give the name of a saved state") from None
    if not 2 <= header <= min(MAX_HEADER_NBYTES, status.st_size - 8):
        raise StateError(
            f"{path}: not a saved state, or truncated: its header has {header} bytes and the file "
            f"{status.st_size}; save the state again"
        )


def _check(
    runner: Runner, file: Any, path: str | os.PathLike[str], content: SlotContent
) -> tuple[int, int, list[int], int, Mark]:
    """Return (first, last, tokens, resumable, adapters). Raises StateError unless the file fits."""
    meta = file.metadata() or {}
    if (kind := (meta.get("format"), meta.get("version"))) != (FORMAT, VERSION):
        raise StateError(
            f"{path}: format {kind[0]!r} version {kind[1]!r}: expected {FORMAT} version {VERSION}"
        )
    for key, here in _identity(runner).items():
        if meta.get(key) != here:
            wanted = "the model it was saved with"
            if key != "model_sha256":
                wanted = "the same cache types" if key.startswith("type_") else "a newer state"
            raise StateError(
                f"{path}: saved with {key} {meta.get(key)!r}, here it is {here!r}; open {wanted}"
            )
    first, last = _position(meta, "first", path), _position(meta, "last", path)
    saved = _position({"resumable": "0"} | meta, "resumable", path)  # files of earlier versions lack this key
    if first >= last:
        raise StateError(f"{path}: positions {first}..{last} are not a range; the file is damaged")
    if saved > last:
        raise StateError(f"{path}: resumable is {saved}, beyond the last position; the file is damaged")
    if last > runner.n_ctx:
        raise StateError(
            f"{path}: holds positions up to {last} and the context {runner.n_ctx}; open the model with n_ctx "
            f"(-c) of at least {last}"
        )
    if first > content.n_stored or meta.get("prefix_sha256") != _hash(content.tokens[:first]):
        raise StateError(
            f"{path}: continues a sequence after its first {first} tokens, and these are not what the slot "
            "holds; load the file with the beginning first"
        )
    mark = _mark(runner, meta, path)
    if n_alike(content.mark, mark) < first:
        raise StateError(
            f"{path}: continues a sequence that was computed with other adapters than the slot's; load the "
            "file with the beginning first"
        )
    if _resumable(runner, content, first, last, saved) > last:
        raise StateError(
            f"{path}: continues a sequence after its first {first} tokens, and layers with a sliding window "
            f"hold too few of those by now; load the file with the beginning first"
        )
    n = last - first
    expected = {
        part.name: (
            _DTYPES[part.array.dtype][0],
            [last // part.block - _begin(part.window, saved, first, last) // part.block, *_shape(part)],
        )
        for part in runner.kv.parts
    }
    expected |= {name: ("F32", [state.shape[1]]) for name, state in _states(runner)}
    names = set(file.keys())
    if names != {"tokens", *expected}:
        odd = sorted(names ^ {"tokens", *expected})
        raise StateError(f"{path}: tensors are missing or not known: {', '.join(map(repr, odd[:4]))}")
    n_tokens = (file.get_slice("tokens").get_shape() or [-1])[0]
    ids = "I64" if file.get_slice("tokens").get_dtype() == "I64" else "I32"
    expected["tokens"] = ids, [n_tokens if n_tokens in (n, n + 1) else n]
    for name, want in expected.items():
        entry = file.get_slice(name)
        if (got := (entry.get_dtype(), entry.get_shape())) != want:
            raise StateError(f"{path}: {name} is {got[0]} {got[1]}, expected {want[0]} {want[1]}")
    tokens = file.get_tensor("tokens").tolist()
    least = -(1 << 8 * ID_NBYTES) if ids == "I64" else 0
    if bad := [token for token in tokens if not least <= token < runner.n_vocab]:
        raise StateError(f"{path}: token id {bad[0]} is out of range: the model has 0..{runner.n_vocab - 1}")
    return first, last, tokens, saved, mark


def _mark(runner: Runner, meta: dict[str, str], path: str | os.PathLike[str]) -> Mark:
    """Return the adapters that computed the positions. Raises StateError if the model has other adapters."""
    ids = {info.digest: info.id for info in runner.adapters}
    try:
        uses = [
            (str(digest), float(s), int(start)) for digest, s, start in json.loads(meta.get("adapters", "[]"))
        ]
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise StateError(f"{path}: the list of adapters is not readable; the file is damaged") from None
    if missing := [digest for digest, _, _ in uses if digest not in ids]:
        raise StateError(
            f"{path}: computed with an adapter that the model was not opened with (SHA-256 "
            f"{missing[0][:16]}...); open the model with this adapter (lora)"
        )
    if any(not math.isfinite(scale) or not 0 <= start <= MAX_POSITION for _, scale, start in uses):
        raise StateError(f"{path}: the list of adapters has an impossible value; the file is damaged")
    return tuple(AdapterUse(ids[digest], scale, digest, start) for digest, scale, start in uses)


def _position(meta: dict[str, str], key: str, path: str | os.PathLike[str]) -> int:
    text = meta.get(key, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise StateError(f"{path}: {key} is {text!r}, expected a position; the file is damaged")
    return int(text)


def _identity(runner: Runner) -> dict[str, str]:
    return {"model_sha256": runner.fingerprint} | layout_of(runner.options)


def _shape(part: CachePart) -> tuple[int, int]:
    """Return a cell's KV heads and head size in stored elements."""
    (n_heads, width), dtype = part.shape, part.array.dtype
    return n_heads, row_nbytes(dtype, width) // np.dtype(_DTYPES[dtype][1]).itemsize


def _states(runner: Runner) -> Iterator[tuple[str, Weight]]:
    for layer in runner.kv.states.layers.values():
        yield from ((weight.name, weight) for weight in layer.arrays.values())


def _begin(window: int, resumable: int, first: int, last: int) -> int:
    """Return the first position that has K and V in a layer with this window."""
    return min(max(first, resumable - window + 1), last - 1) if window and resumable else first


def _resumable(runner: Runner, content: SlotContent, first: int, last: int, saved: int) -> int:
    """Return `content.resumable` after loading. `saved` is the file's `resumable`."""
    return max(content.resumable if first else 0, saved, runner.resumable(last))


def _runs(part: CachePart, slot: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield each run of consecutive cells as (offset from the first cell, cell, number of cells)."""
    cells = part.at(slot, first, last)
    longest = max(1, PIECE_NBYTES // matrix_of(part.array)[1])
    cuts = [0, *(np.flatnonzero(np.diff(cells) != 1) + 1).tolist(), len(cells)]
    for begin, end in pairwise(cuts):
        for start in range(begin, end, longest):
            yield start, int(cells[start]), min(longest, end - start)


def _hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(packed(tokens).tobytes()).hexdigest()


def _type_of(tokens: np.ndarray) -> str:
    return "I64" if tokens.dtype.itemsize == 8 else "I32"
