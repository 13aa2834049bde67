"""Writes a loaded model to GGUF. Metadata is copied byte for byte from the source file, and every tensor is
read from the devices."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from vkbackend.atomic_file import replacing
from vkbackend.errors import GGUFError, InvalidArgument
from vkbackend.formats import narrowed
from vkbackend.meta.gather import PIECE_NBYTES, gather_rows, matrix_of, stream, transfers
from vkbackend.meta.tensor import Weight
from vkbackend.models.architectures.weight_specs import FLOAT_TYPES, Part, WeightSpec
from vkbackend.models.gguf.header import DEFAULT_ALIGNMENT, TensorInfo
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.gguf.writer import header, padded
from vkbackend.runtime import Device

Progress = Callable[[int, int], None]  # (bytes written, total bytes).
WIDENED = {("f32", name) for name in FLOAT_TYPES}  # Pairs of (type on the devices, type in the file).


def write_gguf(
    path: str | os.PathLike[str],
    source: GGUF,
    devices: Sequence[Device],
    weights: Mapping[str, Weight],
    specs: Sequence[WeightSpec],
    progress: Progress | None = None,
) -> int:
    """Write the model of `source` to `path` and return the number of bytes. `specs` describe the `weights` on
    `devices`. Tensors that no device needs (RoPE factors) are read from the source. Needs 16 MiB on the host.

    Raises GGUFError if a tensor has another form on the devices than in the file, or if the file cannot be
    written. Raises InvalidArgument if `path` is the source. After an error `path` is unchanged.
    """
    there = [part for part in source.paths if os.path.exists(part)]  # synthetic models have no file
    if os.path.exists(path) and any(os.path.samefile(path, part) for part in there):
        raise InvalidArgument(f"{path}: is the model that was loaded; give the copy another name")
    stored: dict[str, list[WeightSpec]] = {}
    names = {spec.name for spec in specs}
    for spec in specs:
        name = spec.part.tensor if spec.part else spec.name
        # Skip a tied lm_head, because its source has its own spec.
        if name not in source.tensors and spec.source not in names:
            name = spec.source
        if name in source.tensors:
            stored.setdefault(name, []).append(spec)
    for name, of_tensor in stored.items():
        _check(source.tensors[name], of_tensor, weights, source.paths[0])
    alignment = source.u32("general.alignment", DEFAULT_ALIGNMENT)
    head = header(_values(source), source.tensors.values(), alignment)
    total = len(head) + sum(padded(info.nbytes, alignment) for info in source.tensors.values())
    with replacing(path, GGUFError) as part, open(part, "wb") as file, transfers(devices):
        file.write(head)
        for info in source.tensors.values():
            held = [(spec.part, weights[spec.name]) for spec in stored.get(info.name, [])]
            narrow = bool(held) and held[0][1].dtype != info.type
            for piece in joined(devices, held) if held else [source.data(info.name)]:
                file.write((narrowed(piece, info.type) if narrow else piece).data)
                if progress:
                    progress(file.tell(), total)
            file.write(bytes(-file.tell() % alignment))
        file.flush()
    return total


def _check(info: TensorInfo, specs: Sequence[WeightSpec], weights: Mapping[str, Weight], path: Path) -> None:
    """Raise GGUFError unless the devices hold the complete tensor."""
    held = [weights[spec.name] for spec in specs if spec.name in weights]
    parts = sorted((spec.part for spec in specs if spec.part), key=lambda part: part.begin)
    if parts:
        ends = [0, *(part.end for part in parts)]
        fits = [part.begin for part in parts] == ends[:-1] and ends[-1] == parts[0].total
        fits = fits and len(held) == len(parts)
    else:
        fits = len(held) == 1 and all(spec.fits(info.shape) for spec in specs if spec.name in weights)
    if not fits or any(w.dtype != info.type and (w.dtype, info.type) not in WIDENED for w in held):
        have = ", ".join(f"{w.dtype} {w.shape}" for w in held) or "nothing of it"
        raise GGUFError(
            f"{path}: {info.name} is {info.type} {info.shape}, and the devices hold {have}; "
            "the model cannot be written back"
        )


def joined(devices: Sequence[Device], held: Sequence[tuple[Part | None, Weight]]) -> Iterator[np.ndarray]:
    parts = sorted(((part, weight) for part, weight in held if part), key=lambda pair: pair[0].begin)
    repeat = parts[0][0].repeat if parts else 1
    if repeat == 1:
        for _, weight in parts or held:
            yield from stream(devices, weight)
        return
    nbytes = sum(math.prod(matrix_of(weight)) // repeat for _, weight in parts)
    step = max(1, PIECE_NBYTES // nbytes)
    for begin in range(0, repeat, step):
        end = min(begin + step, repeat)
        pieces = [
            gather_rows(devices, weight, *rows).reshape(end - begin, -1)
            for part, weight in parts
            for rows in part.rows(begin, end)
        ]
        yield np.concatenate(pieces, axis=1)


def _values(source: GGUF) -> dict[str, bytes]:
    joined = len(source.paths) > 1
    keys = (key for key in source.metadata if not (joined and key.startswith("split.")))
    return {key: source.metadata.stored(key) for key in keys}
