"""Biases of the positions in a block, which a compressor adds to its gates (DeepSeek V4, GLM-5.3-Flash).
Files may quantize them, so they are dequantized when the file is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.formats import dequantize
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF


def read_biases(gguf: GGUF) -> dict[str, np.ndarray]:
    """Return the biases in float32 by the names of their tensors."""
    return {
        name: dequantize(gguf.data(name), info.type, info.shape)
        for name, info in gguf.tensors.items()
        if name.endswith("_compressor_ape.weight")
    }


def place_weight(biases: Mapping[str, np.ndarray], name: str, il: int, shape: tuple[int, ...]) -> WeightSpec:
    """Return the weight `{name}_places` of layer `il`, with a row per position of a block. Raises GGUFError
    if the file's tensor has another shape."""
    stored = f"blk.{il}.{name}_ape.weight"
    values = biases.get(stored)
    if values is not None and values.shape != shape:
        raise GGUFError(f"{stored} is {values.shape}, expected {shape}")
    return WeightSpec(f"{name}_places", shape, source=stored, values=values, f32=True)
