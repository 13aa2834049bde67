"""Converts PEFT's module names (as in `transformers`) to names of GGUF tensors, and reorders rows as
llama.cpp's converter does."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from vkbackend.errors import AdapterError, UnsupportedModel

# GGUF files of these architectures store the rows of q and k in pairs. `transformers` stores them in halves.
PAIRED_ROWS = (
    "llama", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3", "arcee", "bailingmoe", "deci",
    "deepseek", "baichuan", "internlm2", "minicpm", "muse-glimmer", "olmo", "xverse",
)  # fmt: skip
# Modules whose rows or columns llama.cpp's converter reorders in other ways.
REORDERED = {
    "bloom": r"\.query_key_value",
    "falcon": r"\.query_key_value",
    "gptneox": r"\.query_key_value",
    "hy_v4": r"\.self_attn\.(q_b_proj|kv_a_proj|indexer)",
    "maincoder": r"\.self_attn\.[qk]_proj",
    "plamo": r"\.self_attn\.[qko]_proj",
    "qwen35": r"\.linear_attn\.",
    "qwen35moe": r"\.linear_attn\.",
    "qwen3next": r"\.linear_attn\.in_proj_qkvz",
}
PREFIXES = ("base_model.model.", "language_model.")
EXPERT = re.compile(r"(?P<layer>.*\.layers\.\d+)\..*experts\.(?P<expert>\d+)\.(?P<matrix>\w+)")
EXPERT_MATRICES = {
    **dict.fromkeys(("gate_proj", "w1"), "ffn_gate_exps"),
    **dict.fromkeys(("up_proj", "w3"), "ffn_up_exps"),
    **dict.fromkeys(("down_proj", "w2"), "ffn_down_exps"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """The GGUF tensor of a module. If `expert` is not None, the tensor stacks experts, and the module is this
    expert."""

    tensor: str
    expert: int | None = None


class PeftNames:
    """`head_dim` is the size of a head of q and k."""

    def __init__(self, path: str, architecture: str, n_layer: int, head_dim: int) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        if architecture not in known:
            raise UnsupportedModel(
                f"{path}: the names of modules of {architecture!r} models are not known; convert the adapter "
                "to GGUF with llama.cpp's convert_lora_to_gguf.py"
            )
        self._path, self._arch, self._head_dim = path, architecture, head_dim
        self._map = get_tensor_name_map(known[architecture], n_layer)

    def target(self, module: str) -> Target:
        """Return the tensor of a module such as base_model.model.model.layers.0.self_attn.q_proj. Raises
        AdapterError for an unknown module, and UnsupportedModel for a module in REORDERED."""
        name = plain_name(module)
        if self._arch in REORDERED and re.search(REORDERED[self._arch], name):
            raise UnsupportedModel(
                f"{self._path}: {module}: GGUF files have its weights in another order; convert the adapter "
                "to GGUF with llama.cpp's convert_lora_to_gguf.py, or train it without this module"
            )
        if (match := EXPERT.fullmatch(name)) and (matrix := EXPERT_MATRICES.get(match["matrix"])):
            layer = match["layer"].rpartition(".")[2]
            return Target(f"blk.{int(layer)}.{matrix}.weight", int(match["expert"]))
        for word in (name, name.replace("model.layers.", "backbone.layers.", 1)):
            if (tensor := self._map.get_name(word)) is not None:
                return Target(f"{tensor}.weight")
        raise AdapterError(
            f"{self._path}: {module} is not a module of {self._arch!r} models that GGUF files have; is it "
            "the adapter of another base model?"
        )

    def rows(self, tensor: str, b: np.ndarray) -> np.ndarray:
        """Return B [n_out, rank] with rows in the order of the GGUF tensor."""
        if self._arch not in PAIRED_ROWS or not re.search(r"\.attn_[qk]\.weight$", tensor):
            return b
        if b.shape[0] % self._head_dim:
            return b  # a later check refuses the shape
        halves = b.reshape(-1, 2, self._head_dim // 2, b.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(b.shape))


def plain_name(module: str) -> str:
    name = module
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("model.language_model.", "model.", 1)
