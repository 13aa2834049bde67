"""llama.cpp behind a pipe, for `vkbackend bench --compare llama-cpp`: runs in a process of its own.

Started as `python -m vkbackend.tools.llama_cpp_worker FILE N_CTX N_UBATCH N_GPU_LAYERS`; reads one JSON
object a line (n_prompt, n_gen, n_depth, tokens) and answers with {"seconds": S}. The first line it writes
describes the build. Needs the llama-cpp-python package.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    import llama_cpp

    path, n_ctx, n_ubatch, n_gpu_layers = sys.argv[1], *map(int, sys.argv[2:5])
    llm = llama_cpp.Llama(
        path,
        n_ctx=n_ctx,
        n_batch=n_ubatch,
        n_ubatch=n_ubatch,
        n_gpu_layers=n_gpu_layers,
        verbose=False,
    )
    gpu = bool(llama_cpp.llama_supports_gpu_offload())
    _answer({"version": llama_cpp.__version__, "gpu": gpu})
    for line in sys.stdin:
        ask = json.loads(line)
        tokens, depth, prompt = ask["tokens"], ask["n_depth"], ask["n_prompt"]
        llm.reset()
        if depth:
            llm.eval(tokens[:depth])
        began = time.perf_counter()
        if prompt:
            llm.eval(tokens[depth : depth + prompt])
        for at in range(depth + prompt, depth + prompt + ask["n_gen"]):
            llm.eval(tokens[at : at + 1])
        _answer({"seconds": time.perf_counter() - began})


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
