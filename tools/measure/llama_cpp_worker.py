"""Runs llama.cpp in a separate process for `--compare llama-cpp`. Needs llama-cpp-python.

In `python -m vkbackend.tools.measure.llama_cpp_worker JSON`, JSON describes the model. The first line of
output describes the build. For each line of input, a JSON object (n_prompt, n_gen, n_depth, tokens), the
process writes {"seconds": S}. The time includes a wait for every decode, as in llama-bench. If the input is
{"texts": T} with lists of token ids, the process writes {"seconds": S, "cpu_s": S, "embeddings": the mean of
each text's states}.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_backends() -> None:
    """Load backends that are separate libraries (GGML_BACKEND_DL) from LLAMA_CPP_LIB_PATH, where
    llama-cpp-python looks for llama.cpp's libraries."""
    if folder := os.environ.get("LLAMA_CPP_LIB_PATH"):
        ggml = ctypes.CDLL(str(Path(folder) / "libggml.so"))
        if not ggml.ggml_backend_dev_count():
            ggml.ggml_backend_load_all_from_path(folder.encode())


class Loaded:
    """A model and context of llama.cpp, opened through the C interface with defaults."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._n_ubatch = wanted["n_ubatch"]
        load_backends()
        llama_cpp.llama_backend_init()
        model: Any = llama_cpp.llama_model_default_params()
        layers = wanted["n_gpu_layers"]
        # all layers; earlier versions of llama.cpp read -1 as no layers
        model.n_gpu_layers = 0x7FFF_FFFF if layers is None else layers
        model.split_mode = getattr(llama_cpp, f"LLAMA_SPLIT_MODE_{wanted['split_mode'].upper()}")
        self._shares = (ctypes.c_float * llama_cpp.llama_max_devices())(*wanted["tensor_split"])
        if wanted["tensor_split"]:
            model.tensor_split = self._shares
        self._model = llama_cpp.llama_model_load_from_file(wanted["path"].encode(), model)
        if not self._model:
            raise SystemExit("llama.cpp does not load the file")
        context: Any = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = wanted["n_ctx"], self._n_ubatch, self._n_ubatch
        # llama-cpp-python uses this many host threads. The C interface's default of four is too many for few
        # cores.
        context.n_threads = context.n_threads_batch = max(1, (os.cpu_count() or 1) // 2)
        context.offload_kqv = wanted["kv_offload"]
        context.type_k, context.type_v = wanted["type_k"], wanted["type_v"]
        if wanted["n_texts"]:
            context.embeddings, context.pooling_type = True, llama_cpp.LLAMA_POOLING_TYPE_MEAN
            context.n_seq_max = wanted["n_texts"]
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise SystemExit("llama.cpp makes no context of that size")

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def decode(self, tokens: Sequence[int]) -> None:
        """Decode tokens in micro-batches, and compute logits for the last token."""
        for at in range(0, len(tokens), self._n_ubatch):
            part = tokens[at : at + self._n_ubatch]
            ids = (self._lib.llama_token * len(part))(*part)
            if code := self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(ids, len(part))):
                raise SystemExit(f"llama_decode returned {code}")
        self._lib.llama_synchronize(self._context)

    def embed(self, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Compute as many texts at once as fit into a micro-batch."""
        lib, left, rows = self._lib, list(texts), list[list[float]]()
        width = lib.llama_model_n_embd_out(self._model)
        began, cpu = time.perf_counter(), time.process_time()
        while left:
            group, n_tokens = list[Sequence[int]](), 0
            while left and n_tokens + len(left[0]) <= self._n_ubatch:
                group.append(left.pop(0))
                n_tokens += len(group[-1])
            if not group:
                raise SystemExit("a text is longer than a micro-batch")
            self.clear()
            batch = lib.llama_batch_init(n_tokens, 0, 1)
            for text, tokens in enumerate(group):
                for at, token in enumerate(tokens):
                    i = batch.n_tokens
                    batch.token[i], batch.pos[i], batch.logits[i] = token, at, 1
                    batch.n_seq_id[i], batch.seq_id[i][0] = 1, text
                    batch.n_tokens += 1
            if code := lib.llama_decode(self._context, batch):
                raise SystemExit(f"llama_decode returned {code}")
            # llama_get_embeddings_seq waits for the devices
            vectors = [lib.llama_get_embeddings_seq(self._context, text) for text in range(len(group))]
            rows += [vector[:width] for vector in vectors]
            lib.llama_batch_free(batch)
        took = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        return {**took, "embeddings": rows}

    def seconds(self, ask: dict[str, Any]) -> float:
        tokens, depth, prompt = ask["tokens"], ask["n_depth"], ask["n_prompt"]
        self.clear()
        self.decode(tokens[:depth])
        began = time.perf_counter()
        self.decode(tokens[depth : depth + prompt])
        for at in range(depth + prompt, depth + prompt + ask["n_gen"]):
            self.decode(tokens[at : at + 1])
        return time.perf_counter() - began


def main() -> None:
    import llama_cpp

    loaded = Loaded(json.loads(sys.argv[1]))
    gpu = bool(llama_cpp.llama_supports_gpu_offload())
    _answer({"version": llama_cpp.__version__, "gpu": gpu})
    for line in sys.stdin:
        ask = json.loads(line)
        _answer(loaded.embed(ask["texts"]) if "texts" in ask else {"seconds": loaded.seconds(ask)})


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
