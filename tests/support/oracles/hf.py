"""Uses Hugging Face `transformers` as an oracle, in float32 with eager attention. A conversion to GGUF
changes names, interleaves rows of llama's q and k, adds 1 to some norm weights, and fuses projections. The
builders undo this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from typing import Any

import numpy as np
import torch
import transformers
from oracles.fixture import Fixture
from oracles.hf_parts import BUILDERS, MAKERS

FAMILIES = (
    "alibi",
    "dense",
    "earlier",
    "gemma",
    "grok",
    "kimi_delta",
    "latent",
    "layer_norm",
    "mixtures",
    "near_llama",
    "recurrent",
    "sigmoid_mixtures",
    "softmax_mixtures",
    "state_space",
    "uneven",
)
for _name in FAMILIES:
    import_module(f"oracles.hf_{_name}")


def versions() -> str:
    return f"transformers {version('transformers')}, torch {version('torch')}"


def logits(
    fixture: Fixture, batches: Sequence[Sequence[int]], steering: Mapping[int, np.ndarray] | None = None
) -> np.ndarray:
    """Return the logits of consecutive batches, float32 [n_tokens, n_vocab]. `steering` maps layers to
    control vectors."""
    network = model(fixture)
    for il, direction in (steering or {}).items():
        base = getattr(network, "model", network.base_model)  # Llama4ForCausalLM is its own base_model
        layers = next(getattr(base, name) for name in ("layers", "h", "blocks") if hasattr(base, name))
        layers[il].register_forward_hook(_adder(torch.from_numpy(direction)))
    return run(network, batches)


def _adder(direction: torch.Tensor) -> Callable[[Any, Any, Any], Any]:
    def add(layer: Any, inputs: Any, output: Any) -> Any:
        h, *others = output if isinstance(output, tuple) else (output,)
        h = h + direction.repeat(h.shape[-1] // len(direction))  # add it to each stream of a wide residual
        return (h, *others) if isinstance(output, tuple) else h

    return add


def model(fixture: Fixture) -> Any:
    config, state = BUILDERS[fixture.name](fixture)
    config._attn_implementation = "eager"
    class_ = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"), None)
    make = class_._from_config if class_ else transformers.AutoModelForCausalLM.from_config
    other = MAKERS.get(type(config))
    network = (other(config) if other else make(config, dtype=torch.float32)).eval()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in state.items()}
    if config.tie_word_embeddings and "model.embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    missing = network.load_state_dict(tensors, strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    return network


@torch.no_grad()
def run(network: Any, batches: Sequence[Sequence[int]]) -> np.ndarray:
    cache, rows = None, []
    name = "cache_params" if "cache_params" in signature(network.forward).parameters else "past_key_values"
    for tokens in batches:
        out = network(torch.tensor([list(tokens)]), use_cache=True, **{name: cache})
        cache = out[name]
        rows.append(out.logits[0].numpy())
    return np.concatenate(rows)
