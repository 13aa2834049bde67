"""Build the header of a small model of any architecture, without tensor data, to query its properties without
a file.

A `Sketch` replaces an opened GGUF file; its metadata values come from Synthetic.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vkbackend.errors import GGUFError
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.registry import load_model, model_class
from vkbackend.models.gguf.header import TensorInfo
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.measure.synthetic import Values

N_LAYER, N_EMBD, N_VOCAB = 8, 256, 512
KEYS: dict[str, Any] = {
    "block_count": N_LAYER,
    "context_length": 4096,
    "embedding_length": N_EMBD,
    "feed_forward_length": 512,
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.dimension_count": 32,
    "rope.freq_base": 10_000.0,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 4,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 256,
}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64}
LATENT: dict[str, Any] = {  # In models with latent attention, these metadata keys replace or extend KEYS.
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
}
INDEXER = {  # DeepSeek's sparse attention
    "attention.q_lora_rank": 64,
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 64,
}
CURVES = {f"xielu.{name}": 1.0 for name in ("alpha_p", "alpha_n", "beta", "eps")}  # apertus only
SHORT_CONV = {"attention.head_count_kv": [0, 0, 0, 4] * (N_LAYER // 4), "shortconv.l_cache": 3}
ONE_OF_THREE = {  # A layer is a scan, attention or an FFN.
    "attention.head_count_kv": [0, 4, 0, 0] * (N_LAYER // 4),
    "feed_forward_length": [0, 0, 512, 0] * (N_LAYER // 4),
}
KDA = LATENT | {"attention.head_count_kv": [0, 0, 0, 1] * (N_LAYER // 4), "kda.head_dim": 32}
SHARED_INDEXER = LATENT | INDEXER | {"attention.indexer.types": [1, 1, 0, 0] * (N_LAYER // 4)}
RWKV = {"wkv.head_size": 32} | {
    f"attention.{name}_lora_rank": 16 for name in ("decay", "iclr", "value_residual_mix", "gate")
}
OWN: dict[str, dict[str, Any]] = {
    "granitehybrid": {"attention.head_count_kv": [0, 0, 0, 4] * (N_LAYER // 4)},
    "jamba": {"attention.head_count_kv": [0, 0, 0, 4] * (N_LAYER // 4)},
    "rwkv7": RWKV,
    "nemotron_h": ONE_OF_THREE,
    "nemotron_h_moe": ONE_OF_THREE,
    "deepseek2": LATENT,
    "minicpm3": {**LATENT, "attention.q_lora_rank": 64},
    "mistral4": LATENT,
    "deepseek32": LATENT | INDEXER,
    "hy_v4": SHARED_INDEXER | {"hyper_connection.count": 4},
    "glm-dsa": SHARED_INDEXER,
    "gemma3n": {
        "embedding_length_per_layer_input": 32,
        "activation_sparsity_scale": [1.6] + [-np.inf] * (N_LAYER - 1),
    },
    "minimax-m3": {
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 32,
        "attention.indexer.block_size": 32,
        "attention.indexer.top_k": 8,
        "attention.indexer.local_blocks": 1,
    },
    "grovemoe": {"experts_per_group": 2, "expert_chunk_feed_forward_length": 32},
    "cohere2moe": {"attention.layer_norm_rms_epsilon": 0.0, "attention.sliding_window_pattern": 4},
    "llama4": {"expert_used_count": 1, "interleave_moe_layer_step": 1},
    "lfm2": SHORT_CONV,
    "lfm2moe": SHORT_CONV,
    "kimi-linear": KDA,
    "kimi-k3": KDA | {"attn_res.block_size": 2, "activation.situ_beta": 1.0},
    "glm5-next": {
        **KDA,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 0,
        "attention.q_lora_rank": 64,
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 64,
        "attention.indexer.kpool": 16,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
    },
    "qwen4exp": {
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": 32,
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 64,
        "attention.compress_ratios": [0, 0, 0, 16] * (N_LAYER // 4),
    },
    "deepseek4": {
        "attention.head_count_kv": 1,
        "rope.dimension_count": 16,
        "attention.q_lora_rank": 64,
        "attention.output_group_count": 4,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": [0, 4, 128, 4] * (N_LAYER // 4),
        "attention.compress_rope_freq_base": 160_000.0,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
    },
    "bailingmoe3": KDA | {"kda.gate_lower_bound": -5.0},
}


class Sketch(GGUF):
    """The header of a small model, which has experts and a window if the architecture supports them."""

    def __init__(self, arch: str, experts: bool = True) -> None:
        model = model_class(arch)
        values = KEYS | (EXPERTS if experts and model.mixture else {}) | OWN.get(arch, {})
        if model.windows:
            values["attention.sliding_window"] = 64
        named = {f"{arch}.{key}": value for key, value in values.items()} | CURVES
        self.metadata = Values({"general.architecture": arch, **named})  # type: ignore[assignment]
        self.paths = [Path(arch)]
        self._parts = [None]  # type: ignore[list-item]
        self.tensors = {}
        for name, shape in (
            ("token_embd.weight", (N_VOCAB, N_EMBD)),
            # gemma4 reads these scales on the host
            *((f"blk.{il}.ffn_gate_inp.scale", (N_EMBD,)) for il in range(N_LAYER)),
            *([("blk.0.ffn_up.weight", (512, N_EMBD))] if arch == "grok" else []),  # tells Grok-2 from Grok-1
        ):
            self.tensors[name] = TensorInfo(name, shape, "f32", 0, 0, 0)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        return np.ones(self.tensors[name].shape, np.float32).reshape(-1).view(np.uint8)


def sketches(arch: str) -> list[Model]:
    """Return a model with experts, and a dense model, if the architecture supports them."""
    models = [load_model(Sketch(arch))]
    if models[0].n_used:
        with suppress(GGUFError):
            models.append(load_model(Sketch(arch, experts=False)))
    return models
