"""Train the demo model on generated stories, and write vocabulary and weights as one GGUF file.

Only training needs PyTorch. The script uses neither Vulkan nor the engine.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vkbackend.tools.demo.stories import tell_story
from vkbackend.tools.demo.transformer import SIZES, Config, Weights, forward, init_weights, sample
from vkbackend.tools.demo.vocabulary import BOS, EOS, N_SPECIAL, TEMPLATE, UNK, Vocabulary, train_vocabulary

if TYPE_CHECKING:
    import torch

console = Console(stderr=True, highlight=False)


def token_rows(vocabulary: Vocabulary, seed: int, n: int) -> Iterator[list[int]]:
    """Yield rows of n + 1 token ids, which begin with a story and end anywhere: <s> story </s> <s> story."""
    rng = random.Random(seed)
    while True:
        row: list[int] = []
        while len(row) < n + 1:
            row += [BOS, *vocabulary.encode(tell_story(rng).text), EOS]
        yield row[: n + 1]


def _loss(w: Weights, config: Config, rows: list[list[int]]) -> torch.Tensor:
    import torch
    import torch.nn.functional as F

    ids = torch.tensor(rows)
    logits = forward(w, config, ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(
    config: Config, vocabulary: Vocabulary, steps: int, minutes: float, batch: int, lr: float, seed: int
) -> Weights:
    """Train with AdamW and a cosine schedule that ends after `steps` steps, or after `minutes` minutes if
    that is sooner.

    In the first four fifths of the time, rows have half the context's length, in which most stories fit.
    Later rows have the full length. Validation stories come from a seed that training never uses.
    """
    import torch

    w = init_weights(config, seed)
    matrices = [weight for weight in w.values() if weight.dim() > 1]
    norms = [weight for weight in w.values() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))
    short, whole = (
        token_rows(vocabulary, seed + 1, config.n_ctx // 2),
        token_rows(vocabulary, seed + 2, config.n_ctx),
    )
    held_out = token_rows(vocabulary, seed + 1_000_003, config.n_ctx // 2)
    validation = [next(held_out) for _ in range(16)]
    columns = (TextColumn("train"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    start = time.monotonic()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=1.0)
        step, done = 0, 0.0
        while done < 1.0:
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = (
                lr * min(1.0, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
            )
            rows = (
                [next(short) for _ in range(batch)]
                if done < 0.8
                else [next(whole) for _ in range(max(1, batch // 2))]
            )
            loss = _loss(w, config, rows)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(w.values()), 1.0)
            optimizer.step()
            step += 1
            seconds = time.monotonic() - start
            done = max(step / steps, seconds / (60 * minutes))
            progress.update(task, completed=done, description=f"step {step} loss {loss.item():.3f}")
            if step % 200 == 0 or done >= 1.0:
                with torch.no_grad():
                    held = _loss(w, config, validation).item()
                console.print(
                    f"step {step:5d}  {seconds:5.0f} s  loss {loss.item():.3f}  validation {held:.3f}"
                )
    return {name: weight.detach() for name, weight in w.items()}


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    vocabulary: Vocabulary,
    config: Config,
    dtype: str = "Q8_0",
    name: str = "vkbackend demo",
    description: str = "Little stories from a grammar; made by tools/train_demo.py",
) -> None:
    """Write a llama GGUF with matrices [n_out, n_in] in `dtype` and norms [n] in F32, by their GGUF names."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_description(description)
    writer.add_license("MIT")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{dtype}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.n_vocab)
    writer.add_context_length(config.n_ctx)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head_kv)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_base)
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [
        gguf.TokenType.BYTE
    ] * 256
    kinds += [gguf.TokenType.NORMAL] * (config.n_vocab - N_SPECIAL - vocabulary.n_marks)
    kinds += [gguf.TokenType.CONTROL] * vocabulary.n_marks
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary.pieces)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    writer.add_chat_template(TEMPLATE)
    matrices = gguf.GGMLQuantizationType[dtype]
    for tensor, weight in weights.items():
        if weight.ndim == 1:
            writer.add_tensor(tensor, weight.astype(np.float32))
        else:
            writer.add_tensor(tensor, gguf.quants.quantize(weight, matrices), raw_dtype=matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_weights(path: Path) -> Weights:
    """Return the file's dequantized weights, so that the sample includes quantization errors."""
    import torch

    tensors = gguf.GGUFReader(path).tensors
    return {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in tensors}


def _parser() -> argparse.ArgumentParser:
    def positive(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and value > 0):
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    def count(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is less than 1")
        return int(text)

    parser = argparse.ArgumentParser(
        prog="train_demo",
        description="Train the demo model (llama architecture, 1.3 M parameters, Q8_0), or one of other "
        "sizes, on stories from a grammar. Needs PyTorch, the extra 'train'.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default_out = Path(__file__).resolve().parent.parent / "models" / "demo" / "demo.gguf"
    parser.add_argument("--steps", type=count, default=6000, help="optimizer steps at most")
    parser.add_argument(
        "--minutes",
        type=positive,
        default=13.0,
        help="training time at most, in minutes; only a run that ends by --steps is repeatable",
    )
    parser.add_argument("--batch", type=count, default=8, help="rows of 256 tokens per step")
    parser.add_argument("--lr", type=positive, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, vocabulary and stories")
    parser.add_argument("--threads", type=count, default=2, help="CPU threads")
    parser.add_argument("--out", type=Path, default=default_out, help="GGUF file to write")
    parser.add_argument("--type", default="Q8_0", choices=("F16", "Q8_0"), help="type of the matrices")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, default=size, help="size of the model")
    parser.add_argument(
        "--stories", type=count, metavar="N", help="only print N stories of the grammar (needs no PyTorch)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Return 0 if the file was written. If something is missing, print a line to stderr and return 2."""
    args = _parser().parse_args(argv)
    if args.stories:
        rng = random.Random(args.seed)
        print("\n\n".join(tell_story(rng).text for _ in range(args.stories)))
        return 0
    config = Config(**{name: getattr(args, name) for name in SIZES})
    if refusal := config.refusal(args.type):
        console.print(f"cannot train this model: {refusal}")
        return 2
    try:
        import torch
    except ImportError:
        console.print("train_demo needs PyTorch, which is not installed: pip install 'vkbackend\\[train]'")
        return 2
    if not args.out.parent.is_dir():
        console.print(
            f"cannot write {args.out}: the folder {args.out.parent} does not exist; create it first"
        )
        return 2
    torch.set_num_threads(args.threads)
    vocabulary = train_vocabulary(config.n_vocab, args.seed)
    weights = train(config, vocabulary, args.steps, args.minutes, args.batch, args.lr, args.seed)
    write_gguf(
        args.out, {name: weight.numpy() for name, weight in weights.items()}, vocabulary, config, args.type
    )
    n_params = sum(weight.numel() for weight in weights.values())
    console.print(f"{args.out}: {n_params:,} parameters, {args.out.stat().st_size:,} bytes")
    prompt = [BOS, *vocabulary.encode("Once upon a time")]
    written = read_weights(args.out)
    for temperature in (0.0, 0.8):
        ids = sample(written, config, prompt, temperature, args.seed)
        print(f"[temperature {temperature}] {vocabulary.decode(ids)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
