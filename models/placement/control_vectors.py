"""Control vectors (Zou et al. 2023, arXiv:2310.01405), which are added to the residual after layers.

A GGUF file of the architecture "controlvector" has a tensor direction.N, f32 [n_embd], for each layer N from
1 on. Several files are added, each multiplied by its scale.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from vkbackend.errors import GGUFError, InvalidArgument
from vkbackend.models.gguf.reader import GGUF

ARCHITECTURE = "controlvector"
_NAME = re.compile(r"direction\.(\d+)")


def read_control_vectors(
    files: Sequence[tuple[str, float]], n_layer: int, n_embd: int, layers: tuple[int, int] | None = None
) -> dict[int, np.ndarray]:
    """Return the sum of scale times direction for each of `layers` (first, last, both included), f32
    [n_embd]. Raises GGUFError, and InvalidArgument for layers outside the model."""
    first, last = layers or (1, n_layer - 1)
    if not 0 <= first <= last < n_layer:
        raise InvalidArgument(
            f"control vectors for layers {first} to {last}: expected the first and the last layer, in "
            f"0..{n_layer - 1}"
        )
    sums: dict[int, np.ndarray] = {}
    for path, scale in files:
        for il, direction in _directions(path, n_layer, n_embd).items():
            if first <= il <= last:
                sums[il] = sums.get(il, np.zeros(n_embd)) + scale * direction
    return {il: sums[il].astype(np.float32) for il in sorted(sums)}


def _directions(path: str, n_layer: int, n_embd: int) -> dict[int, np.ndarray]:
    with GGUF.open(path) as gguf:
        if gguf.architecture != ARCHITECTURE:
            raise GGUFError(f"{path} is a {gguf.architecture} model, expected control vectors")
        directions = {}
        for name, info in gguf.tensors.items():
            match = _NAME.fullmatch(name)
            il = int(match[1]) if match else 0
            if not il or (info.type, info.shape) != ("f32", (n_embd,)):
                raise GGUFError(
                    f"{path}: {name} is {info.type} {info.shape}, expected direction.N (N from 1), f32 "
                    f"({n_embd},)"
                )
            if il >= n_layer:
                raise GGUFError(f"{path}: {name}, but the model's layers are 0..{n_layer - 1}")
            directions[il] = gguf.data(name).view("<f4").astype(np.float64)
        if not directions:
            raise GGUFError(f"{path}: no tensor direction.N")
        return directions


def marked(fingerprint: str, control: Mapping[int, np.ndarray]) -> str:
    if not control:
        return fingerprint
    digest = hashlib.sha256(fingerprint.encode())
    for il, vector in control.items():
        digest.update(il.to_bytes(4, "little") + vector.tobytes())
    return digest.hexdigest()
