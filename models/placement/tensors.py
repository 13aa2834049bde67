"""Compares a file's tensors with its model's weights. Every weight needs the right shape and a supported
type. A tensor that the model does not read is an error. Exceptions are tensors of multi-token prediction
layers (nextn), tensors of encoders of images and audio, and frequency factors that the architecture
ignores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import widened
from vkbackend.models.architectures.base import Model, Weighted, all_weights
from vkbackend.models.architectures.reading import ROPE_FACTORS, lacks_heads
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF

# The host reads these tensors (models/embeddings/heads.py).
HEAD_TENSORS = frozenset(
    f"{name}.{kind}"
    for name in ("cls", "cls.norm", "cls.output", "dense_2", "dense_3")
    for kind in ("weight", "bias")
)

ENCODERS = "v.", "a.", "mm."  # the prefixes of the encoders' tensors
FOR_IMAGES = ".exp_probs_b_vl.bias"  # selects experts for positions of images (DeepSeek V4 Flash Vision)


class FileSource:
    def __init__(self, gguf: GGUF, specs: Sequence[WeightSpec]) -> None:
        self._gguf = gguf
        self._specs = {spec.name: spec for spec in specs}

    def data(self, name: str) -> np.ndarray:
        spec = self._specs[name]
        if spec.values is not None:
            return spec.values.view(np.uint8)
        info = spec.tensor(self._gguf)
        assert info is not None  # checked by check_weights
        raw = self._gguf.data(info.name)
        cut = spec.part.cut(raw) if spec.part else raw
        return widened(cut, info.type) if spec.widened else cut

    def file(self, name: str) -> tuple[np.ndarray, int]:
        """Return (bytes of the mapped file, offset). The weight must have an `offset_in_file`."""
        spec = self._specs[name]
        info, offset = spec.tensor(self._gguf), offset_in_file(self._gguf, spec)
        assert info is not None and offset is not None
        return self._gguf.file(info.file), offset


def offset_in_file(gguf: GGUF, spec: WeightSpec) -> int | None:
    """Return a weight's offset in the file, or None if devices need another form of the weight or the offset
    is not a multiple of 4."""
    info = spec.tensor(gguf)
    if info is None or not gguf.mapped or (spec.widened and info.type != "f32"):
        return None
    offset = info.offset
    if spec.part:
        if spec.part.repeat > 1 or spec.part.segments:
            return None
        offset += info.nbytes // spec.part.total * spec.part.begin
    return None if offset % 4 else offset


def weights_in_file(gguf: GGUF, model: Weighted) -> frozenset[str]:
    return frozenset(spec.name for spec in all_weights(model) if offset_in_file(gguf, spec) is not None)


def check_weights(gguf: GGUF, model: Weighted) -> dict[str, str]:
    """Return the type of each weight on the devices. Raises GGUFError for a missing tensor or a wrong shape,
    and UnsupportedModel for an unsupported type or tensor."""
    if gguf.draft_head and model.draft_head:
        check_weights(gguf.draft_head, model.draft_head)  # errors then name the head's file
    types = {}
    used = {*ROPE_FACTORS, *HEAD_TENSORS, *ahead_tensors(gguf, model), *model.unread(), *of_encoders(gguf)}
    for spec in all_weights(model):
        if spec.values is not None:
            types[spec.name] = spec.dtype
            continue
        info = spec.tensor(gguf)
        if info is None:
            raise GGUFError(f"{gguf.paths[0]}: the tensor {spec.name!r} is missing")
        if not spec.fits(info.shape):
            expected = " or ".join(map(str, spec.shapes()))
            raise GGUFError(f"{gguf.paths[0]}: {info.name} has shape {info.shape}, expected {expected}")
        if info.type not in spec.types:
            raise UnsupportedModel(
                f"{gguf.paths[0]}: {info.name} is {info.type}, expected {', '.join(spec.types)}; "
                "convert the file to one of these types"
            )
        types[spec.name] = "f32" if spec.widened else info.type
        used.add(info.name)
    if left := sorted(set(gguf.tensors) - used):
        raise UnsupportedModel(
            f"{gguf.paths[0]}: {len(left)} tensors that {gguf.architecture} does not use: "
            f"{', '.join(left[:6])}"
        )
    return types


def ahead_tensors(gguf: GGUF, model: Weighted) -> list[str]:
    """Return the names of the multi-token prediction heads' tensors if the model does not include them."""
    if model.n_ahead or not gguf.u32(f"{gguf.architecture}.nextn_predict_layers", 0):
        return []
    n_blocks = int(gguf.u32(f"{gguf.architecture}.block_count"))
    after = tuple(f"blk.{il}." for il in range(model.n_layer, n_blocks))
    return [name for name in gguf.tensors if name.startswith(after) or ".nextn." in name]


def of_encoders(gguf: GGUF) -> list[str]:
    """Return the tensors of encoders of images and audio that some programs add to a text model's file, and
    tensors that a text model uses only for images."""
    if gguf.architecture == "clip":
        return []
    return [name for name in gguf.tensors if name.startswith(ENCODERS) or name.endswith(FOR_IMAGES)]


def _listed(names: Sequence[str]) -> str:
    """Return the number of names and the first three."""
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def notes(gguf: GGUF, model: Model, n_ctx: int) -> list[str]:
    lines = []
    if lacks_heads(gguf):
        lines.append(
            f"{gguf.architecture}.nextn_predict_layers is not 0, but the file has no tensors of multi-token "
            f"prediction heads (nextn); all {model.n_layer} layers are the model's own"
        )
    if skipped := ahead_tensors(gguf, model):
        lines.append(
            f"unused tensors of layers that predict tokens further ahead (nextn): {_listed(skipped)}"
            f"{'; --spec-type draft-mtp uses them' if model.predicts_ahead else ''}"
        )
    if others := of_encoders(gguf):
        lines.append(
            f"unused tensors for images or audio: {_listed(others)}; --mmproj reads encoders from a separate "
            "file"
        )
    if factors := {*ROPE_FACTORS} & model.unread() & gguf.tensors.keys():
        lines.append(f"{gguf.architecture} does not use the file's {', '.join(sorted(factors))}")
    if n_ctx > model.n_ctx_train:
        lines.append(
            f"the context of {n_ctx} tokens is longer than the {model.n_ctx_train} the model was trained with"
        )
    return lines
