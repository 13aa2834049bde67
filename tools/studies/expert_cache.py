"""Counts the hits of an expert cache: `python -m vkbackend.tools.studies.expert_cache -m mixture.gguf -f
text.txt`.

Replays the choices of a router, and counts and replaces experts with the cache's code, without a GPU. The
choices are recorded while a model reads a text, a token per step. Or they are drawn by Zipf's law, and each
text of `TEXT` tokens prefers different experts. Prints hit rates, copies per token, and the bytes that a
token reads over the bus for published shapes on a 24 GB card.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vkbackend.formats import row_nbytes
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.experts.expert_cache import PERIOD
from vkbackend.models.experts.replacement import MARGIN, most_used, replacements
from vkbackend.models.experts.uses import HALF_LIFE, Uses
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.step import Run
from vkbackend.tools.measure.turns import exit_on_errors, table

PERCENTS = 10, 20, 30, 40, 50, 60, 70, 80
TEXT, N_TEXTS, N_LAYERS = 1000, 6, 6  # sizes of a trace that is drawn by Zipf's law
TASTE = 0.7  # Standard deviation of the logarithm of a text's preference for an expert.
GB = 1e9
STEP_ROWS = 2048
RESERVED_GB = 24 * 0.02 + 1.5  # for the driver, scratch memory and a KV cache


@dataclass(frozen=True)
class Shape:
    """A published mixture. `other_gb` is the size of all weights that are not experts."""

    name: str
    n_layer: int
    n_experts: int
    n_used: int
    n_embd: int
    n_ff: int
    dtype: str
    other_gb: float

    @property
    def expert_nbytes(self) -> int:
        gate_and_up = 2 * self.n_ff * row_nbytes(self.dtype, self.n_embd)
        return gate_and_up + self.n_embd * row_nbytes(self.dtype, self.n_ff)

    @property
    def token_gb(self) -> float:
        return self.n_layer * self.n_used * self.expert_nbytes / GB

    def n_slots(self, gb: float) -> int:
        left = gb - RESERVED_GB - self.other_gb
        return max(0, min(self.n_experts, int(left * GB / (self.n_layer * self.expert_nbytes))))


SHAPES = (
    Shape("gpt-oss-120b MXFP4", 36, 128, 4, 2880, 2880, "mxfp4", 2.1),
    Shape("Qwen3.5-122B-A10B Q4_K", 48, 256, 8, 3072, 1024, "q4_k", 4.0),
)


def recorded(path: str, text: str, device: str, most: int) -> tuple[np.ndarray, int]:
    """Return the experts of each token, int [tokens, layers, used], and the experts per layer."""
    with GGUF.open(path) as gguf:
        tokens = Tokenizer.from_gguf(gguf).encode(text)[:most]
    experts = (r"\.ffn_(up|down|gate)_exps", "CPU")
    options = Options.of(path, devices=[device], override_tensor=[experts], moe_cache_mib=1e6)
    runner, rows = Runner(options), []
    try:
        if (cache := runner.expert_cache) is None:
            raise SystemExit(f"error: {path} is no mixture")
        counts = np.zeros(cache.slots.n_counts, np.uint32)
        cache.after_step = lambda *_: cache.slots.take_counts(counts)  # type: ignore[method-assign]
        sizes = [t.n_experts for t in cache.slots.tables]
        for i, token in enumerate(tokens):
            at = i % (runner.n_ctx - 1)  # each context begins anew
            runner.step([token], [Run(0, 0, 1, at)], [])
            rows.append(
                [
                    np.flatnonzero(of)
                    for of in np.split(cache.slots.counts_of_experts(counts), np.cumsum(sizes)[:-1])
                ]
            )
            counts[:] = 0
    finally:
        runner.expert_cache = None  # so that closing does not save the cache's counts
        runner.close()
    return np.array(rows), max(sizes)


def drawn(s: float, n_experts: int, n_used: int, seed: int = 0) -> np.ndarray:
    """Return the experts of tokens. The popularity of the expert of rank r is r^-s, times a factor per
    text."""
    rng = np.random.default_rng(seed)
    popularity = np.stack([rng.permutation(np.arange(1, n_experts + 1.0) ** -s) for _ in range(N_LAYERS)])
    texts = []
    for _ in range(N_TEXTS):
        logits = np.log(popularity) + TASTE * rng.standard_normal(popularity.shape)
        noisy = logits + rng.gumbel(size=(TEXT, *popularity.shape))  # Samples without replacement.
        texts.append(np.argpartition(-noisy, n_used - 1, axis=2)[..., :n_used])
    return np.concatenate(texts)


def replayed(
    trace: np.ndarray, n_experts: int, n_slots: int, half_life: float, margin: float
) -> tuple[float, float]:
    """Return (hit rate, copies per token and layer). The first slots hold the first experts. Copies replace
    experts after every PERIOD tokens, and the next tokens use the new experts."""
    n_layers = trace.shape[1]
    uses = Uses([str(i) for i in range(n_layers)], [n_experts] * n_layers, half_life)
    slots = [np.arange(n_slots) for _ in range(n_layers)]
    resident = np.zeros((n_layers, n_experts), bool)
    resident[:, :n_slots] = True
    layers, hits, n_copies = np.arange(n_layers)[:, None], 0, 0
    for begin in range(0, len(trace), PERIOD):
        rows = trace[begin : begin + PERIOD]
        hits += int(resident[layers, rows].sum())
        counts = np.zeros((n_layers, n_experts))
        np.add.at(counts, (np.broadcast_to(layers, rows.shape), rows), 1)
        uses.add(counts.reshape(-1), len(rows))
        for move in replacements(uses, slots, n_layers, margin) if n_slots < n_experts else ():
            resident[move.layer, slots[move.layer][move.slot]] = False
            resident[move.layer, move.expert] = True
            slots[move.layer][move.slot] = move.expert
            n_copies += 1
    return hits / trace.size, n_copies / len(trace) / n_layers


def best_fixed(trace: np.ndarray, n_experts: int, n_slots: int) -> float:
    """Return the hit rate of the most used experts of the complete trace."""
    uses = Uses([str(i) for i in range(trace.shape[1])], [n_experts] * trace.shape[1])
    for layer, held in enumerate(uses.of_layers):
        held += np.bincount(trace[:, layer].reshape(-1), minlength=n_experts)
    chosen = most_used(uses, [n_slots] * trace.shape[1])
    return float(np.mean([np.isin(trace[:, layer], chosen[layer]).mean() for layer in range(len(chosen))]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", action="append", default=[], help="a mixture, a .gguf file")
    parser.add_argument("-f", "--file", type=Path, help="the text that the mixtures read")
    parser.add_argument("-n", type=int, default=1500, help="tokens of the text (default: %(default)s)")
    parser.add_argument("-dev", "--device", default="0", help="the device (default: %(default)s)")
    parser.add_argument("--zipf", type=float, nargs="*", default=[0.4, 0.7, 1.0, 1.3])
    parser.add_argument("--half-life", type=float, nargs="+", default=[HALF_LIFE], help="in rows")
    parser.add_argument("--margin", type=float, nargs="+", default=[MARGIN], help="in uses")
    args = parser.parse_args(argv)
    with exit_on_errors():
        text = args.file.read_text(encoding="utf-8") if args.file else ""
        for path in args.model:
            trace, n_experts = recorded(path, text, args.device, args.n)
            report(f"{Path(path).name}: {len(trace)} tokens", trace, n_experts, args)
        for shape in SHAPES:
            for s in args.zipf:
                trace = drawn(s, shape.n_experts, shape.n_used)
                name = f"{shape.n_used} of {shape.n_experts} experts by Zipf's law, s = {s}"
                report(name, trace, shape.n_experts, args, shape)


def report(
    name: str, trace: np.ndarray, n_experts: int, args: argparse.Namespace, shape: Shape | None = None
) -> None:
    rows: list[list[object]] = []
    sizes = [max(1, n_experts * percent // 100) for percent in PERCENTS]
    for half_life in args.half_life:
        for margin in args.margin:
            runs = [replayed(trace, n_experts, n_slots, half_life, margin) for n_slots in sizes]
            label = f"half-life {half_life:g}, margin {margin:g}"
            rows.append([label, *(f"{100 * hit:.0f}" for hit, _ in runs)])
            rows.append(["copies per token and layer", *(f"{n:.3f}" for _, n in runs)])
    fixed = [best_fixed(trace, n_experts, n_slots) for n_slots in sizes]
    rows.append(["the most used of the whole trace", *(f"{100 * hit:.0f}" for hit in fixed)])
    table(f"{name}: hits in %", ["% of experts in slots", *map(str, PERCENTS)], rows)
    if shape:
        on_a_card(shape, trace, args)


def on_a_card(shape: Shape, trace: np.ndarray, args: argparse.Namespace) -> None:
    """Print how many bytes a token reads over the bus. Without a cache, the same memory holds all experts of
    as many layers as fit (-ncmoe). A step of a prompt reads every expert without a slot once."""
    n_slots, gb = shape.n_slots(24), shape.token_gb
    hit, copies = replayed(trace, shape.n_experts, n_slots, args.half_life[0], args.margin[0])
    copied = copies * shape.n_layer * shape.expert_nbytes / GB
    outside = 1 - n_slots / shape.n_experts
    a_row = outside * gb * shape.n_experts / shape.n_used / STEP_ROWS
    row = [shape.name, n_slots, gb, gb * outside, gb * (1 - hit), copied, a_row]
    columns = ["slots", "experts", "-ncmoe", "misses", "copies", f"a prompt row in steps of {STEP_ROWS}"]
    table("GB per token on one card of 24 GB", ["model", *columns], [row])


if __name__ == "__main__":
    main()
