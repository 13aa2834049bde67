"""Measures token latency while a long prompt is read: `python -m vkbackend.tools.studies.long_prompt -m
model.gguf -dev 0`.

Four sequences decode when a prompt of 4,000 tokens arrives. Prints the milliseconds between the sequences'
tokens before, during and after the prompt, for equal numbers of tokens. Compare the time during the prompt
with the times before and after, because tokens get slower as a text grows.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

from vkbackend.checks import whole_number
from vkbackend.models.arguments import device_list
from vkbackend.models.llm import LLM
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.parallel import quantile
from vkbackend.tools.measure.turns import exit_on_errors, table

N_DECODING = 4
UNDISTURBED = 200


async def measure(llm: LLM, n_prompt: int) -> tuple[list[float], list[float], list[float], float]:
    rng = random.Random(7)
    gaps: list[float] = []
    over = asyncio.Event()

    async def decoder(i: int) -> None:
        last = 0.0
        async for _ in llm.astream([1 + i] * 8, None, ignore_eos=True, seed=i):
            now = time.perf_counter()
            if last:
                gaps.append(1e3 * (now - last))
            last = now
            if over.is_set():
                return

    tasks = [asyncio.create_task(decoder(i)) for i in range(N_DECODING)]
    while len(gaps) < 50 * N_DECODING:
        await asyncio.sleep(0.01)
    gaps.clear()
    while len(gaps) < UNDISTURBED * N_DECODING:
        await asyncio.sleep(0.01)
    before, began = list(gaps), time.perf_counter()
    gaps.clear()
    await llm.agenerate([rng.randrange(llm.n_vocab) for _ in range(n_prompt)], 1)
    took, during = time.perf_counter() - began, list(gaps)
    gaps.clear()
    while len(gaps) < UNDISTURBED * N_DECODING:
        await asyncio.sleep(0.01)
    after = list(gaps)
    over.set()
    await asyncio.gather(*tasks)
    return before, during, after, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default=demo_model(), help="GGUF file (default: the demo model)")
    parser.add_argument("-dev", "--device", default="0", help="devices (default: 0)")
    parser.add_argument("-p", "--n-prompt", type=int, default=4000, help="its tokens (default: 4000)")
    args = parser.parse_args()
    with exit_on_errors():
        n = whole_number("-p", args.n_prompt, 1, 1 << 17)
        devices = device_list("devices", args.device)
        with LLM(args.model, devices=devices, n_slots=N_DECODING + 1, n_ctx=2 * n) as llm:
            asyncio.run(measure(llm, min(n, 600)))
            before, during, after, took = asyncio.run(measure(llm, n))
    rows = []
    for name, q in (("median", 0.5), ("p99", 0.99), ("most", 1.0)):
        alone, beside = quantile(before + after, q), quantile(during, q)
        rows.append((name, quantile(before, q), quantile(after, q), beside, beside / alone))
    columns = "from token to token", "ms before", "ms after", "ms during", "ratio to both"
    title = f"{args.model}: a prompt of {n} tokens next to {N_DECODING} that decode, read in {took:.1f} s"
    table(title, columns, rows)


if __name__ == "__main__":
    main()
