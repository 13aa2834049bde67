"""Facts of a model file that llama-server shows at /v1/models and /props."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Any

from vkbackend.errors import VkbackendError
from vkbackend.models.gguf.reader import GGUF

# the values of llama.cpp's enum llama_vocab_type
VOCABULARIES = {"none": 0, "llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6}


@lru_cache(maxsize=16)
def facts_of(path: str, loaded_at: float) -> dict[str, Any]:
    """Return `vocab_type`, `n_ctx_train`, `n_embd`, `n_params`, `size` in bytes, and `ftype`, the type of
    most weights. Facts that the file lacks are missing. The file is read once per load, because it may be
    replaced between loads, and its file system may hang later."""
    try:
        with GGUF.open(path) as gguf:
            tensors = gguf.tensors.values()
            n_bytes: Counter[str] = Counter()
            for tensor in tensors:
                n_bytes[str(tensor.type)] += tensor.nbytes
            kind = gguf.string("tokenizer.ggml.model", "none")
            head = gguf.architecture
            facts = {
                "vocab_type": VOCABULARIES.get(kind, VOCABULARIES["gpt2"]),
                "n_ctx_train": gguf.u32(f"{head}.context_length", None),
                "n_embd": gguf.u32(f"{head}.embedding_length", None),
                "n_params": sum(math.prod(tensor.shape) for tensor in tensors),
                "size": sum(tensor.nbytes for tensor in tensors),
                "ftype": n_bytes.most_common(1)[0][0].upper() if n_bytes else None,
            }
    except (VkbackendError, OSError):
        return {}
    return {name: value for name, value in facts.items() if value is not None}
