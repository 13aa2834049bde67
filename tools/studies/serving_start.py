"""Times the start of a server: `python -m vkbackend.tools.studies.serving_start -dev 0 [-m MODEL]`.

Measures the time from the start of `vkbackend serve` until it listens, until the model is ready, and until
the first token of a first and a second stream. Also measures the CPU seconds of all server processes.
`--vocab FILE` isolates the vocabulary's cost with a model of two small random layers.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np

from vkbackend.errors import VkbackendError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.http_load import Endpoint, Text, text_of

STEPS = "listening", "ready", "first token", "second request", "CPU"
N_EMBD, N_HEAD, N_LAYER = 64, 2, 2
POLL_S = 0.01
READY_S = 300.0


def tiny(vocab: str, path: Path, n_layer: int = N_LAYER, n_embd: int = N_EMBD) -> None:
    with GGUF.open(vocab) as source:
        kept = {key: value for key, value in source.metadata.items() if key.startswith("tokenizer.")}
    n_vocab = len(kept["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in kept.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, np.asarray(value).tolist())
    writer.add_block_count(n_layer)
    writer.add_context_length(512)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(2 * n_embd)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(n_embd // N_HEAD)
    rng = np.random.default_rng(1)

    def add(name: str, *shape: int) -> None:
        ones = len(shape) == 1
        values = np.ones(shape) if ones else rng.standard_normal(shape) / np.sqrt(shape[-1])
        writer.add_tensor(f"{name}.weight", values.astype(np.float32 if ones else np.float16))

    add("token_embd", n_vocab, n_embd)
    add("output_norm", n_embd)
    for i in range(n_layer):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{norm}", n_embd)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{name}", n_embd, n_embd)
        for name, rows, columns in (("gate", 2, 1), ("up", 2, 1), ("down", 1, 2)):
            add(f"blk.{i}.ffn_{name}", rows * n_embd, columns * n_embd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


async def first_token(endpoint: Endpoint) -> Text:
    body = {"prompt": "Once upon a time", "max_tokens": 2, "stream": True, "temperature": 0}
    text = await text_of(endpoint, "/completions", body | {"ignore_eos": True})
    if text.error:
        raise SystemExit(f"the server failed: {text.error}")
    return text


async def start_times(endpoint: Endpoint, began: float) -> list[float]:
    """Return the seconds until the model is ready, to the first token, and to a second request's first
    token."""
    while time.perf_counter() - began < READY_S:
        with suppress(VkbackendError):
            if (await endpoint.ask("GET", "/health"))[0] == 200:
                break
        await asyncio.sleep(POLL_S)
    ready = time.perf_counter()
    texts = [await first_token(endpoint), await first_token(endpoint)]
    return [ready - began, texts[0].times[0] - began, texts[1].times[0] - texts[1].began]


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(path: str, device: str) -> list[float]:
    flags = ["-m", path, "-dev", device, "-c", "512", "--port", "0"]
    command = [sys.executable, "-m", "vkbackend", "serve", *flags]
    began, cpu_s = time.perf_counter(), children_s()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8") as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if urls := re.findall(r"listening at (http://\S+)", line):
                    break
            else:
                raise SystemExit("the server did not start")
            listening = time.perf_counter() - began
            found_s = [listening, *asyncio.run(start_times(Endpoint.of(urls[0]), began))]
        finally:
            server.terminate()
            server.stderr.read()
    return [*found_s, children_s() - cpu_s]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vkbackend.tools.studies.serving_start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-m", "--model", default=demo_model(), help="the model (default: the demo's)")
    add("--vocab", metavar="FILE", help="in its place: a tiny model with this .gguf file's vocabulary")
    add("-dev", "--device", default="0", help="device list (default: %(default)s)")
    add("-r", "--repetitions", type=int, default=5, help="starts (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if args.vocab:
            tiny(args.vocab, Path(path := str(Path(folder) / "tiny.gguf")))
        rounds = [measure(path, args.device) for _ in range(args.repetitions)]
    for name, values in zip(STEPS, zip(*rounds, strict=True), strict=True):
        print(f"{name:15} {statistics.median(values):6.2f} s ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
