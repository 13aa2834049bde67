"""PEFT adapters of the fixtures, whose random values depend only on the names of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
INVOCATION = (7, 3)


@dataclass(frozen=True)
class PeftCase:
    """`config` contains fields of PEFT's LoraConfig. The prompt contains INVOCATION."""

    fixture: str
    modules: tuple[str, ...] = MODULES
    config: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "llama": PeftCase("llama"),
    "llama rslora": PeftCase("llama", config={"use_rslora": True}),
    "llama activated": PeftCase("llama", config={"alora_invocation_tokens": list(INVOCATION)}),
    "qwen3 patterns": PeftCase(
        "qwen3",
        config={
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 6},
            "alpha_pattern": {"k_proj": 3, r"layers\.2\..*": 5, "^model.layers.0.mlp.down_proj": 1},
        },
    ),
    "phi3": PeftCase("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "gemma3": PeftCase("gemma3"),
    "granite": PeftCase("granite", (*MODULES, "lm_head")),
    "gpt2": PeftCase("gpt2", ("c_attn", "c_proj", "c_fc"), {"fan_in_fan_out": True}),
    "qwen3moe": PeftCase("qwen3moe", MODULES[:4]),
    "mamba2": PeftCase("mamba2", ("in_proj",)),
    "falcon-h1": PeftCase("falcon-h1", (*MODULES, "in_proj")),
}
RANK, ALPHA = 4, 6.0
PROMPT = [*range(20, 30), *INVOCATION, *range(40, 46)]


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(crc32(name.encode()))
    gain = 1 / shape[1] ** 0.5 if ".lora_A" in name else 0.3
    return (gain * rng.normal(size=shape)).astype(np.float32)
