"""Builds an encoder of `transformers` from a fixture, in float32 with eager attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from oracles.fixture import N_VOCAB, Fixture
from oracles.vision import GRIDS, TEXT_WIDTH, pixels_of, size

Inputs = dict[str, torch.Tensor]
Builder = Callable[[Fixture], tuple[Any, Inputs]]
ROWS: dict[str, Callable[[Fixture], np.ndarray]] = {}
# A model, and its arguments for the fixture's picture.
COMPLETE: dict[str, Builder] = {}
TEXT = {
    "vocab_size": N_VOCAB, "hidden_size": TEXT_WIDTH, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip

# The names of a layer's tensors in GGUF and in transformers' SigLIP.
SIGLIP = {
    "ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip


def oracle(name: str) -> Callable[[Callable[[Fixture], np.ndarray]], Callable[[Fixture], np.ndarray]]:
    def add(rows: Callable[[Fixture], np.ndarray]) -> Callable[[Fixture], np.ndarray]:
        ROWS[name] = rows
        return rows

    return add


def complete(name: str) -> Callable[[Builder], Builder]:
    def add(build: Builder) -> Builder:
        @torch.no_grad()
        def rows(m: Fixture) -> np.ndarray:
            network, how = build(m)
            return features(network.get_image_features(**how))

        COMPLETE[name], ROWS[name] = build, rows
        return build

    return add


def sizes(m: Fixture) -> dict[str, int]:
    return {
        "hidden_size": size(m, "embedding_length"),
        "intermediate_size": size(m, "feed_forward_length"),
        "num_hidden_layers": size(m, "block_count"),
        "num_attention_heads": size(m, "attention.head_count"),
    }


def renamed(
    m: Fixture, layers: str, names: Mapping[str, str], outer: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Return the fixture's tensors under transformers' names. `layers` is the prefix of transformers' layer
    names."""
    state = {}
    for name, values in m.tensors.items():
        stem, _, kind = name.rpartition(".")
        if name.startswith("v.blk."):
            _, _, il, part = stem.split(".", 3)
            state[f"{layers}.{il}.{names[part]}.{kind}"] = values
        else:
            state[f"{outer[stem]}.{kind}"] = values
    return state


def load(network: Any, state: Mapping[str, np.ndarray], vision: tuple[str, ...]) -> Any:
    """Load the tensors. `state` must contain every parameter of the modules in `vision`."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in state.items()}
    left = network.load_state_dict(tensors, strict=False)
    missing = [name for name in left.missing_keys if name.startswith(vision)]
    assert not missing and not left.unexpected_keys, (missing, left.unexpected_keys)
    return network.eval()


def planes(m: Fixture) -> torch.Tensor:
    """Return the picture as [1, 3, height, width]."""
    pixels = pixels_of(m.name, size(m, "patch_size"))
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]


def made(class_: Any, config: Any) -> Any:
    config._attn_implementation = "eager"
    return class_._from_config(config, dtype=torch.float32)


def features(output: Any) -> np.ndarray:
    rows = getattr(output, "pooler_output", output)
    rows = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
    return rows.reshape(-1, rows.shape[-1]).numpy()


def raster(m: Fixture, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a picture's patches, each with its pixels in the order (y, x, channel), and the (x, y) of each
    patch."""
    height, width = GRIDS[m.name]
    pixels = pixels_of(m.name, side).reshape(height, side, width, side, 3)
    squares = pixels.transpose(0, 2, 1, 3, 4).reshape(1, height * width, -1)
    at = [[(i % width, i // width) for i in range(height * width)]]
    return torch.from_numpy(np.ascontiguousarray(squares)), torch.tensor(at)


def by_pixel(matrix: np.ndarray, side: int) -> np.ndarray:
    """Return columns (channel, y, x) in the order (y, x, channel)."""
    rows = matrix.reshape(-1, 3, side, side).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(rows).reshape(*matrix.shape[:-1] if matrix.ndim < 4 else matrix.shape[:1], -1)
