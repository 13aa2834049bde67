"""Makes the K and IQ files of the models in this folder, and llama.cpp's logits and tokens for every file.

    PYTHONPATH=tests/support python tests/data/make_models.py [quantize] [goldens]

Needs xllamacpp, and the trained models (README.md has the commands).
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from derived import DERIVED, derive, load, store
from llama_float64 import forward
from oracles import llama_cpp

from vkbackend.tools.demo.stories import tell_story
from vkbackend.tools.demo.vocabulary import BOS, Vocabulary

DATA = Path(__file__).resolve().parent
SOURCE = DATA / "stories-w256-F16.gguf"
TYPES = "Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_S IQ3_XXS IQ2_S IQ2_XS IQ2_XXS IQ1_S IQ1_M".split()
WEIGHED = ("IQ3", "IQ2", "IQ1")  # formats quantized with the columns' importance, as users of llama.cpp do
N_STORIES, N_TOKENS = 64, 256
N_PROMPTS, N_WORDS = 40, 4
N_GREEDY = 48


# ---- K and IQ files ----


def importance() -> dict[str, np.ndarray]:
    """Return the mean square of each column's input by matrix, over stories of the grammar (llama.cpp:
    imatrix)."""
    fields = gguf.GGUFReader(SOURCE).fields
    vocabulary = Vocabulary(*(fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores")))
    rng, squares = random.Random(5), dict[str, np.ndarray]()
    for _ in range(N_STORIES):
        forward(SOURCE, [BOS, *vocabulary.encode(tell_story(rng).text)][:N_TOKENS], squares=squares)
    return {f"{name}.weight": values / values.mean() for name, values in squares.items()}


def quantize(folder: Path) -> Iterator[Path]:
    model, weights = load(SOURCE), importance()

    def quantized(name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        return llama_cpp.quantized(values, kind, weights[name] if kind.name.startswith(WEIGHED) else None)

    for dtype in TYPES:
        yield store(folder / f"stories-w256-{dtype}.gguf", model, dtype, quantized)


# ---- golden logits and tokens ----


def llama_cpp_answer(path: Path, prompt: str) -> tuple[dict[str, object], np.ndarray]:
    """Return llama.cpp's greedy text for a prompt, and the logits of the prompt's tokens."""
    vocabulary = llama_cpp.Vocabulary(path)
    tokens = vocabulary.encode(prompt, True, True)
    n_vocab = len(gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].data)
    context = llama_cpp.Context(path, n_vocab)
    logits = rows = context.decode(tokens)
    greedy: list[int] = []
    margins: list[float] = []
    while len(greedy) < N_GREEDY:
        second, first = np.sort(rows[-1])[-2:]
        margins.append(float(first - second))
        greedy.append(int(rows[-1].argmax()))
        rows = context.decode(greedy[-1:])
    context.close()
    text = b"".join(map(vocabulary.piece, greedy)).decode(errors="replace")
    vocabulary.close()
    return {
        "prompt": prompt,
        "prompt_tokens": tokens,
        "greedy_tokens": greedy,
        "greedy_text": text,
        "min_margin": round(min(margins), 4),
    }, logits


def prompts() -> list[str]:
    rng, texts = random.Random(6), ["Once upon a time"]
    while len(texts) < N_PROMPTS:
        words = tell_story(rng).text.split()
        at = rng.randrange(len(words) - N_WORDS) if len(texts) % 2 else 0
        texts.append(" ".join(words[at : at + N_WORDS]))
    return list(dict.fromkeys(texts))


def goldens(files: list[Path], folder: Path) -> None:
    """Write each file's golden logits and tokens for the prompt whose greedy text has the widest margins."""
    expected, every = {}, {}
    for path in files:
        tried = [llama_cpp_answer(path, prompt) for prompt in prompts()]
        expected[path.stem], every[path.stem] = max(tried, key=lambda pair: float(str(pair[0]["min_margin"])))
        answer = expected[path.stem]
        print(
            f"{path.stem:24} {answer['min_margin']:7} {answer['prompt']!r} {answer['greedy_text']!r}",
            flush=True,
        )
    folder.mkdir(exist_ok=True)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    np.savez_compressed(folder / "expected_logits.npz", **every)


def main() -> None:
    asked = sys.argv[1:] or ["quantize", "goldens"]
    if "quantize" in asked:
        for path in quantize(DATA):
            held, want = load(path).tensors, load(SOURCE).tensors
            error = max(np.square(held[name] - v).sum() / np.square(v).sum() for name, v in want.items())
            print(
                f"{path.name} {path.stat().st_size} bytes, NMSE of a matrix {error:.1e} at most", flush=True
            )
    if "goldens" in asked:
        goldens(sorted(DATA.glob("stories-*.gguf")), DATA)
        with tempfile.TemporaryDirectory() as folder:
            derive(DATA, Path(folder))
            goldens([Path(folder) / f"{name}.gguf" for name in sorted(DERIVED)], DATA / "derived")


if __name__ == "__main__":
    main()
