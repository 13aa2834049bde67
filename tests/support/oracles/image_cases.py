"""Prompts with images, for transformers and for the tests: two images of random rows, and a picture of
vision.py with the rows of its projector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from oracles.fixture import N_VOCAB, Fixture
from oracles.fixtures import build
from oracles.parts import attention, base, feed_forward
from oracles.vision import GRIDS as PATCHES
from oracles.vision import build as build_projector

GRIDS = (3, 4), (5, 4)  # Height and width; 20 rows exceed the windows of the Gemma models.
N_TEXT = 20, 3, 5  # the tokens before, between and after the images
BOTH_WAYS = "gemma3", "gemma4"
DEEPSTACK = {"qwen3vl": 2}
NAMES = "qwen2vl", "qwen3vl", "gemma3", "gemma4", "gemma4+shared"
TEXT_OF = {
    "idefics3": "llama", "qwen3vl": "qwen3vl", "gemma3": "gemma3", "qwen2.5vl": "qwen2vl",
    "qwen2vl": "qwen2vl", "pixtral": "llama", "pixtral+merger": "mistral3", "gemma4v": "gemma4+shared",
    "gemma4uv": "gemma4", "lfm2": "lfm2", "internvl": "qwen3", "internvl+rms": "qwen2", "llava": "llama",
    "minicpmv": "qwen3", "llama4": "llama4", "glm4v": "glm4",
    "kimivl": "deepseek2", "kimik25": "deepseek2",
}  # fmt: skip
BREAK = N_VOCAB - 1  # the token [IMG_BREAK] of Pixtral's text models
SLICED = 900, 900  # size of a picture that MiniCPM-V cuts into 2 x 2 slices
MARKS = {"<image>": 120, "</image>": 121, "<slice>": 122, "</slice>": 123, "\n": 124}  # tokens


@dataclass(frozen=True)
class Case:
    """`tokens` is 0 at the rows of images. `images` maps the first row to float32 [n, n_embd * tables], and
    `grids` to the height and width in rows."""

    fixture: Fixture
    tokens: list[int]
    images: dict[int, np.ndarray]
    grids: dict[int, tuple[int, int]]

    @property
    def is_image(self) -> np.ndarray:
        return np.array([any(at <= i < at + len(v) for at, v in self.images.items()) for i in self.positions])

    @property
    def positions(self) -> range:
        return range(len(self.tokens))


def case(name: str) -> Case:
    fixture = build(name)
    n_deep = DEEPSTACK.get(name, 0)
    if n_deep:
        fixture.keys["n_deepstack_layers"] = n_deep
    rng = np.random.default_rng(34)
    width = fixture.keys["embedding_length"] * (1 + n_deep)
    tokens: list[int] = []
    images: dict[int, np.ndarray] = {}
    grids: dict[int, tuple[int, int]] = {}
    for n, grid in zip(N_TEXT, (*GRIDS, None), strict=True):
        tokens += rng.integers(1, N_VOCAB, n).tolist()
        if grid:
            grids[len(tokens)] = grid
            images[len(tokens)] = rng.normal(0, 1, (grid[0] * grid[1], width)).astype(np.float32)
            tokens += [0] * (grid[0] * grid[1])
    return Case(fixture, tokens, images, grids)


def text_of(name: str) -> Fixture:
    if name == "glm4v":
        return with_sections([2, 1, 1, 0])
    if name != "minicpmv":
        return build(TEXT_OF[name])
    m = Fixture("qwen3", "qwen3")  # the text model's embeddings have the width of one head of the resampler
    base(m, 4, n_kv=1, embedding_length=128)
    for il in range(4):
        attention(m, il, head_norms=True)
        feed_forward(m, il)
    return m


def with_sections(sections: list[int]) -> Fixture:
    """Return glm4 with RoPE sections. With sections, RoPE is half-split, so rows of q and k are in another
    order."""
    fixture = build("glm4")
    n_rot, head_dim = fixture.keys["rope.dimension_count"], fixture.keys["attention.key_length"]
    fixture.keys["rope.dimension_sections"] = sections
    halves = [*range(0, n_rot, 2), *range(1, n_rot, 2), *range(n_rot, head_dim)]
    for name, values in fixture.tensors.items():
        if ".attn_q." in name or ".attn_k." in name:
            heads = values.reshape(-1, head_dim, *values.shape[1:])
            fixture.tensors[name] = np.ascontiguousarray(heads[:, halves].reshape(values.shape))
    return fixture


def of_picture(name: str, rows: np.ndarray) -> Case:
    """Return a prompt with a picture. `name` is a projector of vision.py, which encoded the picture as
    `rows`."""
    fixture, projector = text_of(name), build_projector(name)
    if name == "qwen3vl":
        # The sections of the last pairs do not alternate, as in [24, 20, 20] of 64 pairs.
        fixture.keys |= {"n_deepstack_layers": DEEPSTACK[name], "rope.dimension_sections": [4, 2, 2, 0]}
    if "v.token_embd.img_break" in projector.tensors:
        table = fixture["token_embd.weight"].copy()
        table[BREAK] = projector["v.token_embd.img_break"]
        fixture.tensors["token_embd.weight"] = table
    merge = projector.keys.get("vision.spatial_merge_size", 1)
    height, width = (n // merge for n in PATCHES[name])
    before, after = text_around()
    tokens, first = [*before, *[0] * len(rows), *after], len(before)
    return Case(fixture, tokens, {first: rows}, {first: (height, width)})


def text_around() -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(35)
    before, after = (rng.integers(1, BREAK, n).tolist() for n in (N_TEXT[0], N_TEXT[-1]))
    return before, after


def of_slices(whole: np.ndarray, slices: list[np.ndarray]) -> Case:
    """Return a prompt with a picture and its 2 x 2 slices, in MiniCPM-V 2.6's format."""
    (tokens, after), images = text_around(), dict[int, np.ndarray]()
    parts: list[str | np.ndarray] = ["<image>", whole, "</image>"]
    for i, rows in enumerate(slices):
        parts += [*(["\n"] if i == 2 else []), "<slice>", rows, "</slice>"]
    for part in parts:
        if isinstance(part, str):
            tokens.append(MARKS[part])
        else:
            images[len(tokens)] = part
            tokens += [0] * len(part)
    return Case(text_of("minicpmv"), [*tokens, *after], images, {at: (1, len(v)) for at, v in images.items()})
