"""Train the vision demo on generated pictures, and write a text model and a projector as GGUF files.

Only training needs PyTorch. The script uses neither Vulkan nor the engine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from rich.console import Console

from vkbackend.tools.demo.shapes import draw, new_picture, training_scene
from vkbackend.tools.demo.transformer import Config, Weights, init_weights, states
from vkbackend.tools.demo.vision import VisionSizes, encode, init_vision, patches_of, write_mmproj
from vkbackend.tools.demo.vocabulary import BOS, EOS, Vocabulary, learned_vocabulary
from vkbackend.tools.train_demo import write_gguf

if TYPE_CHECKING:
    import torch

FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"
# The text after the picture. Most prompts have none.
QUESTIONS = ("", "", "", "", "Describe the picture.", "What is in the picture?")
SIZES = VisionSizes()
BATCH = 64
N_CHECKED = 500
TEXT = "demo-vision.gguf"
PROJECTOR = "mmproj-demo-vision.gguf"
console = Console(stderr=True, highlight=False)


def vocabulary(seed: int) -> Vocabulary:
    """Return a vocabulary with all words of the sentences and questions, and with the control tokens around a
    picture."""
    rng = random.Random(seed)
    texts = [training_scene(rng).sentence for _ in range(3000)] + [*QUESTIONS] * 50
    return learned_vocabulary(1024, texts, (FAKE, GLOBAL))


class Examples:
    """Batches of pictures, and the token ids around their rows. A check uses a `seed` that training never
    uses."""

    def __init__(self, words: Vocabulary, seed: int) -> None:
        self.words, self._rng, self._pixels = words, random.Random(seed), np.random.default_rng(seed)
        self.marks = len(words.pieces) - 2, len(words.pieces) - 1

    def batch(self, n: int, questions: bool = True) -> tuple[np.ndarray, list[list[int]], list[list[int]]]:
        """Return patches, the ids of each prompt after the rows (all ask the same question), and the ids of
        each sentence with </s>."""
        scenes = [training_scene(self._rng) for _ in range(n)]
        pixels = np.stack([draw(scene, self._pixels) for scene in scenes])
        text = self._rng.choice(QUESTIONS) if questions else ""
        prompts = [[self.marks[0], *(self.words.encode(text) if text else [])]] * n
        return patches_of(pixels, SIZES), prompts, [[*self.words.encode(s.sentence), EOS] for s in scenes]


def logits(
    w: Weights, config: Config, rows: torch.Tensor, before: list[int], after: torch.Tensor
) -> torch.Tensor:
    """Return the logits after each token of `after` [batch, n], which follows the ids `before` and the
    rows."""
    import torch
    import torch.nn.functional as F

    table = w["token_embd.weight"]
    begin = F.embedding(torch.tensor(before), table).expand(len(rows), -1, -1)
    h = states(w, config, torch.cat([begin, rows, F.embedding(after, table)], dim=1))
    return h[:, -after.shape[1] :] @ table.T


def loss_of(w: Weights, config: Config, examples: Examples) -> torch.Tensor:
    import torch
    import torch.nn.functional as F

    patches, prompts, answers = examples.batch(BATCH)
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.zeros((BATCH, longest), dtype=torch.long)
    wanted = torch.full((BATCH, longest), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[i, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        wanted[i, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
    rows = encode(w, SIZES, torch.from_numpy(patches))
    out = logits(w, config, rows, [BOS, *examples.marks], ids)
    return F.cross_entropy(out.flatten(0, 1), wanted.flatten(), ignore_index=-100)


def share_right(w: Weights, config: Config, words: Vocabulary, n: int, seed: int) -> float:
    """Return the share of new pictures whose greedy sentence is right word for word."""
    import torch

    examples = Examples(words, seed)
    patches, prompts, answers = examples.batch(n, questions=False)
    with torch.no_grad():
        rows = encode(w, SIZES, torch.from_numpy(patches))
        ids = torch.tensor(prompts)
        for _ in range(max(map(len, answers))):
            best = logits(w, config, rows, [BOS, *examples.marks], ids)[:, -1].argmax(-1)
            ids = torch.cat([ids, best[:, None]], dim=1)
    return float(np.mean([ids[i, 1 : 1 + len(a)].tolist() == a for i, a in enumerate(answers)]))


def train(config: Config, words: Vocabulary, minutes: float, steps: int, lr: float, seed: int) -> Weights:
    """Train matrices with Muon, which needs half of AdamW's steps here, and other weights with AdamW. The
    rates are constant at first, and fall to zero by `steps` steps, or after `minutes` minutes if that is
    sooner."""
    import torch

    w = {**init_weights(config, seed), **init_vision(SIZES, config.n_embd, seed)}
    tables = "token_embd.weight", "v.position_embd.weight"
    matrices = [weight for name, weight in w.items() if weight.dim() > 1 and name not in tables]
    rest = [weight for name, weight in w.items() if weight.dim() == 1 or name in tables]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, weight_decay=0.01),
        torch.optim.AdamW(rest, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    rates = lr, 0.2 * lr
    examples, step, done, began = Examples(words, seed + 1), 0, 0.0, time.monotonic()
    while done < 1.0:
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 30, 1.5 * (1 - done) + 0.01)
        loss = loss_of(w, config, examples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(w.values()), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        seconds = time.monotonic() - began
        done = max(step / steps, seconds / (60 * minutes))
        if step % 200 == 0 or done >= 1.0:
            right = share_right(w, config, words, 100, seed + 2)
            console.print(f"step {step:5}  {seconds:5.0f} s  loss {loss.item():.4f}  right {right:.0%}")
    return {name: weight.detach() for name, weight in w.items()}


def main(argv: list[str] | None = None) -> int:
    """Return 0 if both files were written, and 2 if something is missing."""
    parser = argparse.ArgumentParser(
        prog="train_vision_demo",
        description="Train the vision demo (0.5 M weights), which describes pictures of shapes. "
        "Needs PyTorch, the extra 'train'.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default_out = Path(__file__).resolve().parent.parent / "models" / "demo"
    parser.add_argument(
        "--steps", type=int, default=2000, help=f"optimizer steps of {BATCH} pictures at most"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="training time at most, in minutes")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of Muon")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, vocabulary and pictures")
    parser.add_argument("--out", type=Path, default=default_out, help="folder for the files")
    parser.add_argument(
        "--pictures", type=int, metavar="N", help="only draw N new pictures into --out (needs no PyTorch)"
    )
    args = parser.parse_args(argv)
    if args.pictures:
        for number in range(args.pictures):
            pixels, scene = new_picture(number)
            Image.fromarray(pixels).save(args.out / f"shapes-{number}.png")
            print(f"shapes-{number}.png: {scene.sentence}")
        return 0
    try:
        import torch
    except ImportError:
        console.print("train_vision_demo needs PyTorch: pip install 'vkbackend\\[train]'")
        return 2
    torch.set_num_threads(1)
    words = vocabulary(args.seed)
    config = Config(
        n_vocab=len(words.pieces), n_ctx=512, n_embd=96, n_layer=2, n_head=6, n_head_kv=6, n_ff=192
    )
    weights = train(config, words, args.minutes, args.steps, args.lr, args.seed)
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    vision = {name: value for name, value in arrays.items() if name.startswith(("v.", "mm."))}
    text = {name: value for name, value in arrays.items() if name not in vision}
    about = "Describes pictures of shapes; made by tools/train_vision_demo.py"
    write_gguf(args.out / TEXT, text, words, config, "F16", "vkbackend vision demo", about)
    write_mmproj(args.out / PROJECTOR, vision, SIZES, config.n_embd)
    right = share_right(weights, config, words, N_CHECKED, args.seed + 3)
    n_params = sum(value.size for value in arrays.values())
    console.print(f"{n_params:,} weights; {right:.1%} of {N_CHECKED} new pictures right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
