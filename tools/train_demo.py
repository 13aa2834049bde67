"""Makes the demo model: a grammar of little stories, a vocabulary of its own, a small llama, one Q8_0 GGUF.

Knows PyTorch (imported only when training) and the GGUF writer; knows nothing of Vulkan or of the engine that
runs the file. Tensors bear their GGUF names from the start, so that export needs no table of names.
Longer than 400 lines because the grammar, 250 lines of text, is part of the script: it is the only data.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import gguf
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    import torch

console = Console(stderr=True, highlight=False)

# ---- the grammar ----
# A group of alternatives is a block of lines. Templates are filled with: h the hero's name, k the hero's
# kind, s/S o p/P the hero's pronouns, a/t the thing with its indefinite and definite article, f/F the
# friend, nf the friend when met, fs fp the friend's pronouns, home/thome the home, gift, trait, most (the
# trait's superlative). The first alternative is twice as likely as any other: among equals the most likely
# token would hang on rounding, and greedy text would differ from one set of devices to the next.

NAMES = {
    "she": "Mia Lily Rosa Nora Ella Ivy Ruby Clara Zoe Hazel Poppy Daisy Anna Emma Luna Sara Olive Willa",
    "he": "Tom Ben Sam Leo Max Finn Hugo Otto Oscar Milo Theo Jasper Jack Noah Felix Arlo Pip Emil",
}
ONSETS = "b c d f g h k l m n p r s t v w y z bl br dr fl gr st th tr".split()
CODAS = ["", "", "", "", "", "", "", "", "l", "n", "r", "s", "x"]
PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}
CHILDREN = {"she": "girl", "he": "boy"}
ANIMALS = "mouse fox rabbit bear squirrel kitten duckling hedgehog puppy otter"
MOODS = "small old young sleepy lonely grumpy polite little"
TRAITS = {
    "kind": "kindest",
    "brave": "bravest",
    "clever": "cleverest",
    "gentle": "gentlest",
    "wise": "wisest",
    "merry": "merriest",
    "bold": "boldest",
}
HOMES = """
a white house by the sea
a village below the mountains
a mill beside the river
a cottage near the forest
a barn on a green hill
a lighthouse on the rocky shore
a tiny house under an oak tree
a house boat on the lake
"""
FRIENDS = {  # and what the friend gives
    "owl": "a soft feather",
    "hedgehog": "a red apple",
    "frog": "a white water lily",
    "turtle": "a pearly shell",
    "squirrel": "a golden acorn",
    "fox": "a bunch of wild mint",
    "bear": "a pot of honey",
    "crow": "a shiny button",
    "beaver": "a carved spoon",
    "goat": "a ball of wool",
    "mouse": "a tiny piece of cheese",
    "badger": "a smooth blue stone",
}
# The thing and its short name; two troubles of the friend; two ways to end them with the thing.
QUESTS = """
a small brass lantern: lantern
It was growing dark, and {f} was afraid to walk home alone.
{F} could not find the way home, because the sun had gone down.
{h} lit the lantern and held it high, and together they walked home along the bright path.
So {h} lit the lantern, and its warm light showed them the way to {fp} door.

a big yellow umbrella: umbrella
Rain began to fall, and {f} had nowhere to hide.
Dark clouds had come, and {f} was wet from nose to tail.
{h} opened the umbrella, and they sat under it side by side until the rain was over.
Quickly {h} opened the umbrella, and under it they stayed dry and told each other jokes.

a long strong rope: rope
{F} had fallen into a deep hole and could not climb out.
{F} was stuck in the mud and could not move a single foot.
{h} tied the rope to a tree and threw down the other end, and soon {f} was free.
{F} held one end of the rope, and {h} pulled and pulled, until {fs} was free.

an old silver key: key
{F} stood in front of a little green door that would not open.
{F} had a wooden box full of songs, but the box was locked.
{h} put the key into the lock and turned it twice, and with a soft click it opened.
The key was just the right size. {h} turned it slowly, and there was a happy little click.

a warm woolen blanket: blanket
{F} was shivering in the cold wind.
Snow had fallen in the night, and {f} was as cold as ice.
{h} put the blanket around {f}, and soon {fs} was as warm as toast.
They sat down under the blanket together, and {f} stopped shivering and began to smile.

a little copper bell: bell
A thick fog had come, and {f} had lost {fp} family.
{F} was calling for {fp} brother, but {fp} voice was too small.
{h} rang the bell again and again, until a happy voice answered out of the white fog.
{h} rang the bell as loud as {s} could, and soon the whole family came running.

a small wooden boat: boat
{F} wanted to visit {fp} grandmother, but the river was too wide to swim.
{F} was sitting on a rock in the lake, and the water was too deep.
{h} pushed the boat into the water and rowed {f} safely to the other side.
They climbed into the boat, and {h} rowed slowly over the water until they reached the shore.

an old paper map: map
{F} had been walking in circles all day and was quite lost.
{F} did not know which of the three roads to take.
{h} opened the map, turned it around twice, and found the right road at last.
They looked at the map together, and {h} showed {f} the right way past the mill.

a needle with blue thread: needle
The wind had torn the sail of {fp} little ship.
{F} was sad, because there was a big hole in {fp} best coat.
{h} took the needle and sewed it up with tiny blue stitches, until it was as good as new.
The needle went in and out, in and out, and {h} did not stop until the hole was gone.

a bag of flower seeds: seeds
{F} was sad, because {fp} garden was bare and gray.
{F} wished for flowers, but nothing grew in {fp} garden.
They planted the seeds in neat rows, and after a week the whole garden was full of flowers.
{h} planted the seeds and gave them water, and soon the first red flower opened.

a painted wooden flute: flute
{F} was too sad to dance at the summer party.
{F} could not fall asleep, because the night was too quiet.
{h} played a merry song on the flute, and soon {f} was humming along.
{h} played the flute so sweetly that even the stars listened, and {f} felt much better.

a fresh loaf of bread: bread
{F} had not eaten anything since yesterday.
{F} was so hungry that {fp} tummy growled like thunder.
{h} broke the bread in two and gave {f} the bigger half.
They sat down in the grass and shared the bread, and not one crumb was left.

a tall wooden ladder: ladder
{F} had a red kite, but it was stuck at the top of a tree.
{F} wanted to pick a pear, but the branch was much too high.
{h} leaned the ladder against the tree, climbed to the very top, and brought it down.
{F} held the ladder, and {h} climbed up and up until {s} could reach it.

a good straw broom: broom
So many leaves had fallen that {f} could not open {fp} door.
{F} was sad, because a storm had filled {fp} house with sand.
{h} took the broom and swept and swept, until everything was clean and bright.
{h} swept with the broom, {f} sang a song, and before noon all the work was done.

a blue tin bucket: bucket
It had not rained for weeks, and the apple tree of {f} was thirsty.
There was a hole in the roof, and water was dripping on the bed of {f}.
{h} filled the bucket and emptied it, ten times in all, and then everything was fine.
With the bucket {h} ran back and forth until the trouble was over.

a shiny telescope: telescope
{F} was waiting for a ship, but could not see so far.
{F} was looking for {fp} little sister, who had run off to play.
{h} looked through the telescope, far and wide, and laughed when {s} saw somebody wave.
{h} climbed up high and looked through the telescope, first left, then right, and there it was!
"""
# The beats of a story in order. Those that begin with "?" are left out at random, and of a story too long.
BEATS = """
Once upon a time, there was a {trait} little {k} named {h}. {S} lived in {home}.
Once upon a time, in {home}, there lived a {trait} little {k} named {h}.
Once upon a time, a {trait} little {k} named {h} lived in {home}.
Once upon a time there lived a {trait} little {k}. {P} name was {h}, and {p} home was {home}.
{h} was a {trait} little {k} who lived in {home}.
There was once a {trait} little {k} named {h}, and {s} lived in {home}.
Long ago, in {home}, there lived a little {k} named {h}. Everyone knew that {s} was very {trait}.

One sunny morning,
One windy morning,
One spring morning,
One quiet morning,
One summer day,
One day,

{h} found {a} under a bush.
{h} found {a} in the tall grass.
{h} found {a} beside the road.
{h} looked behind the old gate and found {a}.
{h} looked under the stairs and found {a}.
{p} grandmother gave {h} {a}. "Take good care of it," said Grandmother.
{h} went to the market and bought {a} for one shiny coin.

?"What a lovely thing!" said {h}. "I will take it with me."
?"How nice!" said {h}. "I wonder what it is good for."
?"I am sure this will be useful," thought {h}.
?{S} was so happy that {s} danced around in a circle.

Then {s} went
{h} took {t} and walked
With {t}, {s} walked

through the singing forest.
along the sparkling river.
over the windy hill.
across the green meadow.
down the long and dusty road.
past the golden fields.

By the old bridge,
Near the round pond,
Next to a hollow tree,
Beside the stone well,
On a mossy rock,
At the crooked fence,

{s} met {nf}.
{s} saw {nf}.
there sat {nf}.

?"Good morning, little {k}," said {f}.
?"What is the matter?" asked {h}.
?"Hello! Why do you look so sad?" asked {h}.

{trouble}

?"Please, can you help me?" asked {f}.
?"Oh dear," said {f}, "what shall I do?"
?{F} sighed, and a tear ran down {fp} cheek.

"Do not worry," said {h}. "I have {a}!"
At first {h} did not know what to do. Then {s} remembered {t}!
"Wait," said {h}, "I know what to do!" {S} still had {t}.
{h} thought and thought. Then {s} looked at {t} and smiled.

{deed}

"Thank you, {h}!" said {f}. "You are the {most} {k} I have ever met."
"Thank you, dear {h}," said {f}. "You are the {most} {k} in the whole world."
"You are the {most} {k} of all," said {f}, and gave {h} a big hug.

?To say thank you, {f} gave {h} {gift}.
?Then {f} gave {o} {gift}, and they had tea together.

?In the evening, {h} went back to {thome} and told everyone about {f}.
?When the moon came up, {h} was back in {thome}, tired and happy.
?Then {h} went home to {thome}, and {s} sang all the way.

From that day on, {h} and {f} were the best of friends.
And whenever {h} saw {t}, {s} thought of {f} and smiled.
That night, {h} put {t} next to {p} bed and dreamed of {f}.
{h} never forgot that a {trait} heart can make a new friend.

?The end.
"""
WORDS_MIN, WORDS_MAX = 60, 150


@dataclass(frozen=True, slots=True)
class Story:
    """One story and what it must remember: the tests compare the text with these."""

    text: str
    hero: str
    kind: str
    pronoun: str
    thing: str
    friend: str
    home: str


T = TypeVar("T")


@cache
def _groups(block: str) -> list[list[str]]:
    """Groups of lines: alternatives of a beat, or the five lines of a quest."""
    return [group.splitlines() for group in block.strip().split("\n\n")]


def _choose(rng: random.Random, alternatives: Sequence[T]) -> T:
    return rng.choices(alternatives, [2] + [1] * (len(alternatives) - 1))[0]


def _invent_name(rng: random.Random) -> str:
    syllables = (rng.choice(ONSETS) + rng.choice("aaeioou") + rng.choice(CODAS) for _ in range(3))
    return "".join(islice(syllables, rng.choice((2, 2, 3)))).capitalize()


def _definite(phrase: str) -> str:
    return "the " + phrase.split(" ", 1)[1]


def tell_story(rng: random.Random) -> Story:
    """One story of 60 to 150 words, ASCII; the same state of rng gives the same story.

    A quarter of the heroes bear invented names, so that the model learns to copy a name it
    has never seen instead of choosing from a list.
    """
    pronoun = _choose(rng, ("she", "he"))
    s, o, p = PRONOUNS[pronoun]
    hero = _invent_name(rng) if rng.random() < 0.25 else _choose(rng, NAMES[pronoun].split())
    kind = CHILDREN[pronoun] if rng.random() < 0.4 else _choose(rng, ANIMALS.split())
    friend = _choose(rng, [name for name in FRIENDS if name != kind])
    fs, _, fp = PRONOUNS[_choose(rng, ("she", "he"))]
    mood, home, trait = (
        _choose(rng, MOODS.split()),
        _choose(rng, _groups(HOMES)[0]),
        _choose(rng, list(TRAITS)),
    )
    things, *lines = _choose(rng, _groups(QUESTS))
    thing, short = things.split(": ")
    fill = {
        "h": hero, "k": kind, "s": s, "o": o, "p": p, "S": s.capitalize(), "P": p.capitalize(),
        "a": thing, "t": f"the {short}", "f": f"the {friend}", "F": f"The {friend}", "fs": fs, "fp": fp,
        "nf": f"{'an' if mood[0] in 'aeiou' else 'a'} {mood} {friend}", "gift": FRIENDS[friend],
        "home": home, "thome": _definite(home), "trait": trait, "most": TRAITS[trait],
    }  # fmt: skip
    fill["trouble"] = _choose(rng, lines[:2]).format(**fill)
    fill["deed"] = _choose(rng, lines[2:]).format(**fill)
    told = [_choose(rng, alternatives) for alternatives in _groups(BEATS)]
    told = [line for line in told if not line.startswith("?") or rng.random() < 0.6]
    while True:
        text = " ".join(line.removeprefix("?").format(**fill) for line in told)
        if len(text.split()) <= WORDS_MAX:
            return Story(text, hero, kind, pronoun, short, friend, home)
        told.remove(rng.choice([line for line in told if line.startswith("?")]))


# ---- the vocabulary ----

SPACE = "\u2581"
UNK, BOS, EOS = 0, 1, 2
N_SPECIAL = 3 + 256
# A message is the beginning of a story, which the answer tells to its end.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ bos_token }}{{ m.content }}{% endif %}{% endfor %}"
)
N_VOCAB_MIN = N_SPECIAL + 64  # the stories have 56 characters
# No piece crosses the border of two chunks, so encoding chunk by chunk equals SPM on the whole text.
CHUNK = re.compile(rf"{SPACE}?[A-Za-z]+|'[a-z]+|{SPACE}?\"|[.,!?]+\"?|{SPACE}|.", re.DOTALL)


class Vocabulary:
    """SentencePiece-like: <unk> <s> </s>, 256 byte tokens, pieces of several and of one character."""

    def __init__(self, pieces: list[str], scores: list[float]) -> None:
        self.pieces, self.scores = pieces, scores
        self._ids = {piece: i for i, piece in enumerate(pieces)}
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of the text with a space in front, without <s> and </s>."""
        ids: list[int] = []
        for chunk in CHUNK.findall(SPACE + text.replace(" ", SPACE)):
            if chunk not in self._cache:
                self._cache[chunk] = self._encode_chunk(chunk)
            ids += self._cache[chunk]
        return ids

    def _encode_chunk(self, chunk: str) -> list[int]:
        """Merges the adjacent pair with the best score, leftmost first, until no pair is a piece."""
        symbols = list(chunk)
        while pairs := [
            (-self.scores[self._ids[a + b]], i)
            for i, (a, b) in enumerate(pairwise(symbols))
            if a + b in self._ids
        ]:
            i = min(pairs)[1]
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        ids: list[int] = []
        for symbol in symbols:
            ids += [self._ids[symbol]] if symbol in self._ids else [3 + byte for byte in symbol.encode()]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of the ids without the first space; control tokens vanish."""
        raw = b"".join(bytes([i - 3]) if i < N_SPECIAL else self.pieces[i].encode() for i in ids if i > EOS)
        return raw.decode("utf-8", "replace").replace(SPACE, " ").removeprefix(" ")


def train_vocabulary(n_vocab: int, seed: int, n_stories: int = 6000) -> Vocabulary:
    """BPE merges learned on n_stories stories; a merge's rank becomes the piece's SentencePiece score."""
    from tokenizers import Tokenizer, models, trainers

    rng = random.Random(seed)
    chunks = (
        chunk
        for _ in range(n_stories)
        for chunk in CHUNK.findall(SPACE + tell_story(rng).text.replace(" ", SPACE))
    )
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=n_vocab - N_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(chunks, trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    characters = [piece for piece, _ in learned if len(piece) == 1]
    merges = [piece for piece, _ in learned if len(piece) > 1]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0] * N_SPECIAL + [-float(rank) for rank in range(len(learned))]
    return Vocabulary(special + merges + characters, scores)


# ---- the model ----


@dataclass(frozen=True, slots=True)
class Config:
    """6 KV heads with 32 attention columns each and 9 ffn blocks of 32: even on 3 devices, nearly so on 2.

    Every row is a multiple of 32 long, so that all matrices can be Q8_0; the output matrix is token_embd.
    """

    n_vocab: int = 1024
    n_ctx: int = 512
    n_embd: int = 192
    n_layer: int = 4
    n_head: int = 12
    n_head_kv: int = 6
    n_ff: int = 288
    eps: float = 1e-5
    rope_base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def refusal(self, dtype: str) -> str:
        """What makes a model of these sizes impossible, with matrices of that type in its file."""
        if self.n_embd % (2 * self.n_head) or self.n_head % self.n_head_kv:
            return (
                f"{self.n_embd} columns are no {self.n_head} heads of an even size over {self.n_head_kv} kv "
                "heads; choose n_embd as a multiple of 2 n_head, and n_head as one of n_head_kv"
            )
        if dtype == "Q8_0" and (self.n_embd % 32 or self.n_ff % 32):
            return (
                f"Q8_0 has blocks of 32, and rows are {self.n_embd} and {self.n_ff} long; choose --type F16"
            )
        if self.n_vocab < N_VOCAB_MIN:
            return f"{self.n_vocab} tokens do not hold the stories' characters; choose at least {N_VOCAB_MIN}"
        return ""


SIZES = {size.name: size.default for size in fields(Config) if size.type == "int"}
Weights = dict[str, "torch.Tensor"]


def init_weights(config: Config, seed: int) -> Weights:
    """Random weights under their GGUF names, [n_out, n_in] as GGUF stores them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    d, kv = config.n_embd, config.n_head_kv * config.head_dim
    shapes = {"token_embd.weight": (config.n_vocab, d), "output_norm.weight": (d,)}
    for i in range(config.n_layer):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (d,),
            f"blk.{i}.attn_q.weight": (d, d),
            f"blk.{i}.attn_k.weight": (kv, d),
            f"blk.{i}.attn_v.weight": (kv, d),
            f"blk.{i}.attn_output.weight": (d, d),
            f"blk.{i}.ffn_norm.weight": (d,),
            f"blk.{i}.ffn_gate.weight": (config.n_ff, d),
            f"blk.{i}.ffn_up.weight": (config.n_ff, d),
            f"blk.{i}.ffn_down.weight": (d, config.n_ff),
        }
    weights: Weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        # matrices that write into the residual start smaller, so that depth does not add variance
        writes_residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
        std = 0.02 if name == "token_embd.weight" else shape[1] ** -0.5
        std *= (2 * config.n_layer) ** -0.5 if writes_residual else 1.0
        weights[name] = torch.randn(shape, generator=generator) * std
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def forward(w: Weights, config: Config, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [batch, n, n_vocab] of tokens [batch, n]: llama with RoPE on adjacent pairs and GQA."""
    import torch
    import torch.nn.functional as F

    batch, n = tokens.shape
    half = config.head_dim // 2
    inv_freq = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(n, dtype=torch.float64), inv_freq)
    cos, sin = angle.cos().float(), angle.sin().float()  # [n, half]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (config.n_embd,), w[name], config.eps)

    def heads(x: torch.Tensor, n_head: int) -> torch.Tensor:
        return x.view(batch, n, n_head, config.head_dim).transpose(1, 2)  # [batch, n_head, n, head_dim]

    def rope(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    h = F.embedding(tokens, w["token_embd.weight"])
    for i in range(config.n_layer):
        blk = f"blk.{i}."
        x = norm(h, blk + "attn_norm.weight")
        q = rope(heads(x @ w[blk + "attn_q.weight"].T, config.n_head))
        k = rope(heads(x @ w[blk + "attn_k.weight"].T, config.n_head_kv))
        v = heads(x @ w[blk + "attn_v.weight"].T, config.n_head_kv)
        group = config.n_head // config.n_head_kv
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + mixed.transpose(1, 2).reshape(batch, n, -1) @ w[blk + "attn_output.weight"].T
        x = norm(h, blk + "ffn_norm.weight")
        gate = F.silu(x @ w[blk + "ffn_gate.weight"].T)
        h = h + (gate * (x @ w[blk + "ffn_up.weight"].T)) @ w[blk + "ffn_down.weight"].T
    return norm(h, "output_norm.weight") @ w["token_embd.weight"].T


# ---- training ----


def token_rows(vocabulary: Vocabulary, seed: int, n: int) -> Iterator[list[int]]:
    """Rows of n + 1 ids, each beginning with a story: <s> story </s> <s> story ..., cut at the end."""
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
    """AdamW with a cosine schedule that ends after `steps` steps or `minutes` minutes, whichever comes first.

    Four fifths run on rows of half the context, where a story ends; the rest on rows of the whole context.
    Validation stories come from a seed that training never uses.
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


def sample(w: Weights, config: Config, ids: list[int], temperature: float, seed: int) -> list[int]:
    """Ids continued until </s> or a full context; temperature 0 takes the best token."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = list(ids)
    while len(ids) < config.n_ctx and ids[-1] != EOS:
        with torch.no_grad():
            logits = forward(w, config, torch.tensor([ids]))[0, -1]
        if temperature > 0:
            ids.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
        else:
            ids.append(int(logits.argmax()))
    return ids


# ---- the file ----


def write_gguf(
    path: Path, weights: dict[str, np.ndarray], vocabulary: Vocabulary, config: Config, dtype: str = "Q8_0"
) -> None:
    """Writes weights {GGUF name: float32 [n_out, n_in] or [n]} as a llama GGUF: matrices in `dtype`, norms
    in F32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("vkbackend demo")
    writer.add_description("Little stories from a grammar; made by tools/train_demo.py")
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
    kinds += [gguf.TokenType.NORMAL] * (config.n_vocab - N_SPECIAL)
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
    for name, weight in weights.items():
        if weight.ndim == 1:
            writer.add_tensor(name, weight.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, matrices), raw_dtype=matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_weights(path: Path) -> Weights:
    """What the file holds, dequantized to float32: the sample shows what users of the file will see."""
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
    """The command: 0 when the file is written, 2 with one line on stderr when something is missing."""
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
