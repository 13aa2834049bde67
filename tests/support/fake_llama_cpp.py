"""A module `llama_cpp` that only writes its calls to a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOURCE = '''
import ctypes, json, os, types
__version__, llama_token, LLAMA_SPLIT_MODE_NONE = "0", ctypes.c_int32, 0
def tell(**what):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(what) + chr(10))
def load(path, params):
    magic, visible = open(path, "rb").read(4).decode(), os.environ["GGML_VK_VISIBLE_DEVICES"]
    tell(magic=magic, visible=visible, **vars(params))
    return 1
def decode(context, batch):
    global batched
    batched = batch
    tell(decode=getattr(batch, "n_tokens", batch))
    return 0
def init_batch(n, *_):
    rows = {name: [0] * n for name in ("token", "pos", "logits", "n_seq_id")}
    return types.SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(n)], **rows)
def mean(context, text):
    """Return the text's tokens, positions and outputs, all added, and zeros."""
    rows = [i for i, (seq,) in enumerate(batched.seq_id) if seq == text]
    sums = [sum(getattr(batched, name)[i] for i in rows) for name in ("token", "pos", "logits")]
    return [*map(float, sums), *[0.0] * 253]
llama_backend_init = llama_synchronize = llama_get_memory = llama_memory_clear = lambda *_: None
llama_model_default_params = llama_context_default_params = types.SimpleNamespace
llama_batch_init, llama_get_embeddings_seq, llama_batch_free = init_batch, mean, lambda batch: None
llama_model_n_embd_out, LLAMA_POOLING_TYPE_MEAN = lambda model: 256, 1
llama_max_devices = lambda: 16
llama_supports_gpu_offload = lambda: True
llama_model_load_from_file = load
llama_init_from_model = lambda model, params: tell(**vars(params)) or 1
llama_batch_get_one = lambda ids, n: n
llama_decode = decode
'''


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """Make this process and its children import the module. Return a function that returns its calls."""
    calls = folder / "calls"
    (folder / "llama_cpp.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    return lambda: [json.loads(line) for line in calls.read_text(encoding="utf-8").splitlines()]
