"""Measures the cost of structured output: `python -m vkbackend.tools.studies.grammars [-m MODEL]`.

Prints the milliseconds to compile a grammar, and the microseconds per token to compute the allowed tokens and
to advance the grammar. The microseconds are the median and the maximum of 100 tokens in random texts. Also
prints the time to mask a row of logits on the host. Reads only the model's vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import numpy as np

from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.grammar.compiler import Compiler, Matcher, mask_words
from vkbackend.models.grammar.structure import Structure
from vkbackend.models.model_tokens import vocabulary_of
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.sampling.sampler import Sampler
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.studies.sampling import best_s

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "home": {"type": "object", "properties": {"zip": {"pattern": "^[0-9]{5}$"}}},
    },
    "required": ["name", "age"],
}  # fmt: skip
KINDS: dict[str, Structure] = {
    "a JSON object": Structure("json_schema", '{"type":"object"}'),
    "a schema": Structure("json_schema", json.dumps(PERSON)),
    "an enum of 2,000": Structure("json_schema", json.dumps({"enum": [f"value {i}" for i in range(2000)]})),
    "a date": Structure("regex", r"[0-9]{4}-[01][0-9]-[0-3][0-9]"),
    "arithmetic, GBNF": Structure(
        "grammar", 'root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" expr ")"'
    ),
}
N_TOKENS = 100


def walk(
    matcher: Matcher, n_vocab: int, rng: random.Random, take_us: list[float], find_us: list[float]
) -> bool:
    began = time.perf_counter()
    matcher.find()
    ready = time.perf_counter()
    token = int(rng.choice(matcher.allowed(n_vocab)))
    chosen = time.perf_counter()
    matcher.take(token)
    take_us.append((time.perf_counter() - chosen) * 1e6)
    find_us.append((ready - began) * 1e6)
    return not matcher.is_over


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vkbackend.tools.studies.grammars", description=__doc__)
    parser.add_argument(
        "-m", "--model", default=demo_model(), help="its vocabulary is read (default: the demo's)"
    )
    path = parser.parse_args().model
    with GGUF.open(path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    began = time.perf_counter()
    vocabulary = vocabulary_of(tokenizer)
    pieces_s = time.perf_counter() - began
    compiler, n = Compiler(vocabulary), tokenizer.n_vocab
    began = time.perf_counter()
    compiler.compile(Structure("regex", "a")).result()
    tree_s = time.perf_counter() - began
    print(f"{n:,} tokens: their bytes {pieces_s:.2f} s, llguidance's tree {tree_s:.2f} s, once\n")
    print("| grammar | compiled, ms | found, us | slowest | taken, us | slowest |\n|---|---|---|---|---|---|")
    for name, structure in KINDS.items():
        began = time.perf_counter()
        compiled = compiler.compile(structure).result()
        compile_ms = (time.perf_counter() - began) * 1e3
        rng, find_us, take_us = random.Random(0), list[float](), list[float]()
        while len(find_us) < N_TOKENS:
            matcher = compiler.start(compiled)
            while len(find_us) < N_TOKENS and walk(matcher, n, rng, take_us, find_us):
                pass
        figures = (compile_ms, np.median(find_us), max(find_us), np.median(take_us), max(take_us))
        print(f"| {name} |" + "".join(f" {figure:.1f} |" for figure in figures))
    rows(compiler, n)
    compiler.close()


def rows(compiler: Compiler, n: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, n).astype(np.float32)
    free, bound = Sampler(SamplingParams(0.0, seed=1)), Sampler(SamplingParams(0.0, seed=1), True)
    bound.matcher = compiler.start(compiler.compile(KINDS["a schema"]).result())
    bound.matcher.find()
    matcher = bound.matcher

    def choose() -> None:
        assert len(matcher.allowed(n))

    free_us = best_s(lambda: free.sample(logits, ()), 30) * 1e6
    mask_us, nbytes = best_s(choose, 30) * 1e6, 4 * mask_words(n)
    print(f"\na row on the host: free {free_us:.0f} us, its mask {mask_us:.0f} us more;")
    print(f"a device reads {nbytes:,} bytes of mask instead")


if __name__ == "__main__":
    main()
