"""Measures blocks of the KV cache in host memory and files: `python -m vkbackend.tools.studies.kept_blocks -m
model.gguf -dev 0`.

A prompt is computed, restored from host memory after other prompts have evicted it, and restored from files
by a new `LLM`. Then texts are generated while each full block evicts another.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence

from vkbackend.checks import whole_number
from vkbackend.models.arguments import device_list
from vkbackend.models.llm import LLM
from vkbackend.ops import CELL_BLOCK
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.turns import exit_on_errors, table

N_TURNS = 9


def first_token(llm: LLM, prompt: Sequence[int]) -> tuple[float, int]:
    began = time.perf_counter()
    said = llm.generate(prompt, 1, temperature=0, ignore_eos=True)
    return 1e3 * (time.perf_counter() - began), int(said.timings["prompt_n"])


def per_token(llm: LLM, prompt: Sequence[int], n: int) -> float:
    began = time.perf_counter()
    llm.generate(prompt, n, temperature=0, ignore_eos=True)
    return 1e6 * (time.perf_counter() - began) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default=demo_model(), help="GGUF file (default: the demo model)")
    parser.add_argument("-dev", "--device", default="0", help="devices (default: 0)")
    parser.add_argument("-p", "--n-prompt", type=int, default=1000, help="its tokens (default: 1000)")
    args = parser.parse_args()
    with exit_on_errors(), tempfile.TemporaryDirectory() as folder:
        n = whole_number("-p", args.n_prompt, 2 * CELL_BLOCK, 1 << 17)
        devices = device_list("devices", args.device)
        rng = random.Random(3)

        def opened(ram: int, disk: str | None = None) -> LLM:
            shares = [1] * len(devices or [None])
            return LLM(
                args.model, devices=devices, tensor_split=shares, n_ctx=n + CELL_BLOCK, cache_ram=ram,
                cache_disk=disk,
            )  # fmt: skip

        def prompt(llm: LLM) -> list[int]:
            return [rng.randrange(llm.n_vocab) for _ in range(n)]

        rows: list[tuple[str, float, int]] = []
        with opened(-1, folder) as llm:
            first, others = prompt(llm), [prompt(llm) for _ in range(2)]
            first_token(llm, others[0])  # records the steps
            rows.append(("computed", *first_token(llm, first)))
            first_token(llm, others[1])
            rows.append(("from host memory", *first_token(llm, first)))
        with opened(0, folder) as llm:
            first_token(llm, [1] * CELL_BLOCK)
            rows.append(("from files", *first_token(llm, first)))
        table(
            f"{args.model}: the first token of {n} tokens",
            ("prompt", "ms", "tokens computed", "ratio"),
            [(*row, rows[0][1] / row[1]) for row in rows],
        )
        with opened(-1) as llm:
            times = [per_token(llm, prompt(llm)[: n // 8], n - n // 8) for _ in range(N_TURNS)]
            stats = llm.stats()
    token_us, block_us = statistics.median(times), stats["keep_block_us"]
    table(
        f"generated tokens while blocks are evicted; {stats['n_blocks_kept']} were kept",
        ("us a token", "us to keep a block", "of a block's tokens"),
        [(token_us, block_us, f"{block_us / CELL_BLOCK / token_us:.1%}")],
    )


if __name__ == "__main__":
    main()
