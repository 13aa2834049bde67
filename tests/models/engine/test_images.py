"""Test rows of images in the steps of a text model, against float64 and against the same rows as tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_float64
import numpy as np
import pytest
from device_sets import DEVICE_SETS, nmse, product, wide
from drafts import Guesses
from image_prompts import image_of, on_hosts, watched
from oracles.fixture import Fixture, write
from oracles.fixtures import build
from oracles.heads import with_head
from oracles.parts import attention, base, feed_forward
from runners import F32, load_runner
from scheduling import Everything, drafting, finish, tokens_of

from vkbackend.errors import InvalidArgument
from vkbackend.formats import dequantize
from vkbackend.meta.step_kind import Wanted
from vkbackend.models.drafting.drafter import Want
from vkbackend.models.drafting.ngram import Ngrams
from vkbackend.models.engine.cache import image_spans
from vkbackend.models.engine.cache.image_spans import SequenceImages, Span, row_ids, with_row_ids
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate, LoadState, SaveState
from vkbackend.models.engine.runner.draft_runner import HeadRunner
from vkbackend.models.engine.runner.micro_batch import BatchImages, MicroBatch
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.sampling.sampler import Sampler
from vkbackend.models.vision.rows import ImageRows
from vkbackend.step import Run

TEXT = [5, 17, 40, 33, 21]
NUMPY = pytest.param(["numpy"], id="numpy")


def sets(*default: str) -> list[Any]:
    """Return all sets of devices. By default, only some of them run."""
    return [p if p.id in default else wide(p) for p in (NUMPY, *DEVICE_SETS)]


def products(rows: Any, name: str, devices: str) -> list[Any]:
    """Pair each of `rows` with all sets of devices. Without --all, one set runs."""
    return [p if p.id == f"{name}-{devices}" else wide(p) for p in product(rows, (NUMPY, *DEVICE_SETS))]


def numbers(*values: int) -> list[Any]:
    return [pytest.param(n, id=str(n)) for n in values]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fixture = Fixture("small", "llama")
    base(fixture, 2)
    for il in range(2):
        attention(fixture, il)
        feed_forward(fixture, il)
    return write(fixture, tmp_path_factory.mktemp("images") / "small.gguf")


def embeddings(path: Path, tokens: list[int]) -> np.ndarray:
    with GGUF.open(path) as gguf:
        t = gguf.tensors["token_embd.weight"]
        return dequantize(gguf.data(t.name), t.type, t.shape)[tokens].astype(np.float32)


@pytest.mark.parametrize("devices", sets("0,0"))
def test_rows_equal_to_embeddings_of_words_give_their_logits(small: Path, devices: list[str]) -> None:
    words = [9, 30, 77, 12, 55, 61, 8]
    image = ImageRows(b"k" * 16, embeddings(small, words), (1, 7), both_ways=False)
    with watched(small, devices, prefix_cache=False) as w:
        [want] = w.run([*TEXT, *words, 11], n=5)
        logits = w.logits
        assert w.run([*TEXT, image, 11], n=5) == [want]
        assert all(np.array_equal(a, b) for a, b in zip(w.logits, logits, strict=True))


@pytest.mark.parametrize(("n_ubatch", "devices"), products(numbers(64, 4), "4", "0"))
def test_logits_after_an_image(small: Path, n_ubatch: int, devices: list[str]) -> None:
    image = image_of(1, 9, 64)
    with watched(small, devices, n_ubatch=n_ubatch) as w:
        prompt = [*TEXT, image, 11, 12, image_of(2, 3, 64)]
        [[token]] = w.run(prompt)
        rows = {5: image.values, 16: image_of(2, 3, 64).values}
        want = llama_float64.forward(small, [*TEXT, *[0] * 9, 11, 12, *[0] * 3], images=rows)[-1]
        assert nmse(w.logits[-1], want) <= 1e-9
        assert token == want.argmax()


LONG = [3 + 7 * i % 120 for i in range(20)]


@pytest.mark.parametrize("devices", sets("numpy"))
def test_the_prefix_cache_shares_equal_images_only(small: Path, devices: list[str]) -> None:
    """A prompt of 20 tokens, 50 rows and 3 tokens has two full blocks, and the second ends in the image."""
    prompts = [[*LONG, image_of(seed, 50, 64), 11, 12, 13] for seed in (1, 2)]
    with watched(small, devices, n_ctx=128) as w:
        [first] = w.run(prompts[0], n=4)
        alone = w.logits
        assert w.n_rows == [73, 1, 1, 1]
        assert w.run(prompts[0], n=4) == [first] and w.n_rows[0] == 1
        # The other slot is empty. This slot gets the cached blocks and continues in the middle of the image.
        longer = [*prompts[0][:-1], 14]
        assert w.run(prompts[0], longer, n=4)[0] == first
        assert sum(w.n_rows) <= 1 + 9 + 2 * 3
        w.run(prompts[1], n=4)
        assert w.n_rows[0] == 53, "a slot holds the same text, and another image"
        other = w.logits
    with watched(small, devices, n_ctx=128, prefix_cache=False) as w:
        w.run(prompts[1], n=4)
        assert nmse(np.array(other), np.array(w.logits)) <= 1e-9 < nmse(np.array(alone), np.array(w.logits))


def test_without_the_hash_images_would_mix(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ids did not depend on the image's key, different images of equal size would share cells."""
    monkeypatch.setattr(image_spans, "row_ids", lambda key, n_rows: row_ids(b"", n_rows))
    with watched(small, ["numpy"], n_ctx=128) as w:
        w.run([*LONG, image_of(1, 50, 64), 11])
        w.run([*LONG, image_of(2, 50, 64), 11])
        assert w.n_rows == [1]


def test_an_image_twice_in_a_conversation_is_computed_once(small: Path) -> None:
    image = image_of(3, 40, 64)
    with watched(small, ["numpy"], n_ctx=256) as w:
        [answer] = w.run([*LONG, image, 11, 12], n=6)
        w.run([*LONG, image, 11, 12, *answer, 9, image, 10], n=2)
        # The slot does not contain the answer's last token.
        assert w.n_rows[0] == 1 + 1 + 40 + 1


def test_ids_of_rows() -> None:
    ids = row_ids(b"a" * 16, 4000)
    assert len(set(ids) | set(row_ids(b"b" * 16, 4000))) == 8000
    assert row_ids(b"a" * 16, 10) == ids[:10]
    assert all(-(1 << 56) <= token < 0 for token in ids)


@pytest.mark.parametrize("devices", sets("0"))
def test_images_and_texts_in_one_batch_equal_each_alone(small: Path, devices: list[str]) -> None:
    prompts: list[list[int | ImageRows]] = [
        [*TEXT, image_of(1, 9, 64), 11],
        [*LONG, 7],
        [image_of(2, 33, 64)],
        [*TEXT, 8],
    ]
    with watched(small, devices, n_slots=4, n_ubatch=16, prefix_cache=False) as w:
        alone = [w.run(prompt, n=3)[0] for prompt in prompts]
        assert w.run(*prompts, n=3) == alone
        assert len(w.n_rows) < 4 * 3 + 3


def test_a_preempted_image_is_computed_again(small: Path) -> None:
    prompts = [[*LONG, image_of(seed, 30, 64), 11] for seed in (1, 2)]
    with watched(small, ["numpy"], n_ctx=96, kv_cells=128, prefix_cache=False) as w:
        alone = [w.run(prompt, n=20)[0] for prompt in prompts]
        assert w.engine.scheduler.n_preempted == 0
        assert w.run(*prompts, n=20) == alone
        assert w.engine.scheduler.n_preempted > 0


def test_sampling_sees_no_rows_of_images(small: Path) -> None:
    image = image_of(1, 9, 64)
    params = SamplingParams(
        temperature=0, repeat_penalty=1.5, repeat_last_n=-1, dry_multiplier=0.8, dry_sequence_breakers=()
    )
    with watched(small, ["numpy"]) as w:
        tokens, images = with_row_ids([*TEXT, image, 11])
        events = finish(w.engine, [Generate(1, tokens, 8, params, images=images)])[1]
        assert not events[-1].error and len(tokens_of(events)) == 8
        history = [*TEXT, 11]
        for event, logits in zip(events, w.logits, strict=True):
            assert Sampler(params).sample(logits, history) == event.token
            history.append(event.token)


def test_drafts_after_an_image(small: Path) -> None:
    image, text = image_of(1, 9, 64), [4, 9, 12, 30, 4, 9, 12]

    def truth(drafted: Want) -> list[int]:
        assert min(drafted.history) >= 0 and list(drafted.tokens) == list(drafted.history)
        return want[len(drafted.history) - len(TEXT) - len(text) :]

    with watched(small, ["numpy"]) as w:
        [want] = w.run([*TEXT, image, *text], n=16)
        guesses = Guesses(truth, 0.8, 1, w.runner.n_vocab)
        w.engine = Engine(w.runner, Everything(), drafting(w.runner, Ngrams(2, 96), guesses))
        assert w.run([*TEXT, image, *text], n=16) == [want]
        assert 0 < w.engine.stats()["n_accepted"] < w.engine.stats()["n_drafted"]


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (image_of(1, 5, 65), "takes float32 [n, 64]"),
        (ImageRows(b"k" * 16, np.zeros((5, 64)), (1, 5), False), "rows float64 (5, 64)"),
        (ImageRows(b"k" * 16, np.full((5, 64), np.nan, np.float32), (1, 5), False), "not finite"),
        (ImageRows(b"k" * 16, np.zeros((5, 64), np.float32), (2, 2), False), "a grid of 2 x 2"),
        (image_of(1, 17, 64, both_ways=True), "more rows (n_ubatch, -ub)"),
    ],
)  # fmt: skip
def test_images_that_do_not_fit_are_refused(small: Path, image: ImageRows, words: str) -> None:
    with watched(small, ["numpy"], n_ubatch=16) as w:
        with pytest.raises(InvalidArgument) as caught:
            w.run([*TEXT, image])
        assert words in str(caught.value)
        tokens, images = with_row_ids([*TEXT, image_of(1, 5, 64)])
        moved = [Span(images[0].first + 1, images[0].image)]
        with pytest.raises(InvalidArgument, match="not the rows of their image"):
            image_spans.check_images(tokens, moved, 64, 16)
    with watched(small, ["numpy"], mmproj=None) as w, pytest.raises(InvalidArgument, match="mmproj"):
        w.run([*TEXT, image])


def test_a_saved_state_with_an_image(small: Path, tmp_path: Path) -> None:
    image, path = image_of(1, 9, 64), str(tmp_path / "state")
    prompt = [*TEXT, image, 11]
    with watched(small, ["numpy"]) as w:
        [want] = w.run([*prompt, 12, 13], n=3)
        logits = w.logits
        w.run(prompt)
        w.engine.submit(SaveState(98, path, 0))
        assert not w.engine.step().answers[0].error  # type: ignore[union-attr]
    with watched(small, ["numpy"]) as w:
        w.engine.submit(LoadState(99, path, 0))
        [answer] = w.engine.step().answers
        assert not isinstance(answer, int) and answer.tokens == (
            *with_row_ids(prompt)[0],
            *answer.tokens[15:],
        )
        assert w.run([*prompt, 12, 13], n=3) == [want] and w.n_rows[0] == 2
        assert nmse(np.array(w.logits), np.array(logits)) <= 1e-9


@pytest.fixture(scope="module")
def qwen3vl_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fixture = build("qwen3vl")
    fixture.keys["n_deepstack_layers"] = 2
    return write(fixture, tmp_path_factory.mktemp("images") / "qwen3vl.gguf")


def qwen3vl_case(
    width: int,
) -> tuple[list[int | ImageRows], dict[int, np.ndarray], list[tuple[int, int, int]]]:
    """Return a prompt with two images, each image's rows by the index of its first token, and the position of
    each token. As in Qwen3-VL, an image of 3 x 4 rows has positions from 5, two tokens follow at 9, and then
    an image of 5 x 2 rows."""
    images = [image_of(1, 12, width, grid=(3, 4)), image_of(2, 10, width, grid=(5, 2))]
    positions = [(i, i, i) for i in range(5)]
    positions += [(5, 5 + y, 5 + x) for y in range(3) for x in range(4)]
    positions += [(9, 9, 9), (10, 10, 10)]
    positions += [(11, 11 + y, 11 + x) for y in range(5) for x in range(2)]
    positions += [(i, i, i) for i in range(16, 30)]
    rows = {5: images[0].values, 19: images[1].values}
    return [*TEXT, images[0], 11, 12, images[1], 13], rows, positions


@pytest.mark.parametrize(("n_ubatch", "devices"), products(numbers(64, 7), "7", "0,0"))
def test_positions_and_deepstack_rows(qwen3vl_path: Path, n_ubatch: int, devices: list[str]) -> None:
    with watched(qwen3vl_path, devices, n_ubatch=n_ubatch, n_ctx=64) as w:
        prompt, rows, positions = qwen3vl_case(w.runner.image_width)
        assert w.runner.image_width == 3 * w.runner.n_embd
        [answer] = w.run(prompt, n=4)
        tokens = [*TEXT, *[0] * 12, 11, 12, *[0] * 10, 13, *answer[:-1]]
        at = np.array(positions[: len(tokens)])
        want = llama_float64.forward(qwen3vl_path, tokens, images=rows, positions=at)
        assert nmse(np.array(w.logits), want[-4:]) <= 1e-9


@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id == "0,0"])
def test_images_in_both_halves_of_a_step(qwen3vl_path: Path, devices: list[str]) -> None:
    """The first half of a 90-row step has 48 rows, and both halves contain rows of the image."""
    image = image_of(3, 70, 3 * 64, grid=(7, 10))
    with watched(qwen3vl_path, devices, n_ubatch=128, n_ctx=128, interleave=True) as w:
        w.run([*LONG[:15], image, *TEXT])
        assert any(kind.halves and kind.images for kind in w.runner.mesh.steps.by_kind)
        positions = SequenceImages([Span(15, image)], has_sections=True).positions(0, 90)
        tokens = [*LONG[:15], *[0] * 70, *TEXT]
        rows = {15: image.values}
        want = llama_float64.forward(qwen3vl_path, tokens, images=rows, positions=positions)
        assert nmse(w.logits[-1], want[-1]) <= 1e-9


@pytest.mark.parametrize("devices", sets("numpy"))
def test_an_image_with_positions_continues_after_cached_rows(qwen3vl_path: Path, devices: list[str]) -> None:
    with watched(qwen3vl_path, devices, n_ctx=128) as w:
        image = image_of(3, 48, w.runner.image_width, grid=(6, 8))
        prompt = [*TEXT, image, 11, 12]
        alone = w.run(prompt, n=4)
        logits = w.logits
        other = [*prompt[:-1], 13]
        # The second sequence shares one block with the first, and begins at row 27 of the image.
        assert w.run(prompt, other, n=4)[0] == alone[0] and sum(w.n_rows) == 1 + 23 + 2 * 3
        assert nmse(np.array(w.run(prompt, n=4) and w.logits), np.array(logits)) <= 1e-9


@pytest.mark.parametrize(("n_ubatch", "devices"), products(numbers(64, 12), "12", "0"))
def test_rows_of_an_image_attend_to_each_other(small: Path, n_ubatch: int, devices: list[str]) -> None:
    """With 12 rows per step, the text of 20 tokens is divided, but the images are not."""
    images = [image_of(1, 10, 64, both_ways=True), image_of(2, 9, 64, both_ways=True)]
    prompt = [*LONG, images[0], images[1], 11, 12]
    rows = {20: images[0].values, 30: images[1].values}
    with watched(small, devices, n_ubatch=n_ubatch) as w:
        [answer] = w.run(prompt, n=3)
        assert w.n_rows == ([41, 1, 1] if n_ubatch == 64 else [12, 8, 10, 11, 1, 1])
        tokens = [*LONG, *[0] * 19, 11, 12, *answer[:-1]]
        want = llama_float64.forward(small, tokens, images=rows, both_ways=True)[-3:]
        assert nmse(np.array(w.logits), want) <= 1e-9
        causal = llama_float64.forward(small, tokens, images=rows)[-3:]
        assert nmse(causal, want) > 1e-4
        # The cache has the prompt's first 32 rows, so 7 rows of the second image and two tokens must be
        # computed.
        logits = w.logits
        w.run(prompt, [*prompt[:-1], 13])
        assert sum(w.n_rows) == 1 + 9 and nmse(w.logits[0], logits[0]) <= 1e-9


def test_images_that_need_one_step_and_other_sequences(small: Path) -> None:
    prompts: list[list[int | ImageRows]] = [
        [*TEXT, image_of(1, 13, 64, both_ways=True), image_of(4, 12, 64, both_ways=True)],
        [*LONG, 7],
        [image_of(2, 13, 64, both_ways=True), image_of(3, 1, 64, both_ways=True), 9],
        [*TEXT, 8, *LONG],
    ]
    with watched(small, ["numpy"], n_slots=4, n_ubatch=16, prefix_cache=False) as w:
        alone = [w.run(prompt, n=3)[0] for prompt in prompts]
        assert w.run(*prompts, n=3) == alone
        assert w.run(*reversed(prompts), n=3) == alone[::-1]


@pytest.mark.parametrize("split_mode", ["tensor", wide(pytest.param("hosts"))])
def test_images_on_two_hosts(qwen3vl_path: Path, split_mode: str) -> None:
    places = ["0/numpy", "1/numpy"]
    both = [image_of(4, 9, 3 * 64, both_ways=True, grid=(3, 3))]
    with on_hosts(qwen3vl_path, places, split_mode=split_mode) as hosts:
        prompt, *_ = qwen3vl_case(hosts.runner.image_width)
        answers = hosts.run(prompt, [*TEXT, *both, 3], n=3)
        logits = hosts.logits
    with watched(qwen3vl_path, ["numpy"]) as w:
        assert w.run(prompt, [*TEXT, *both, 3], n=3) == answers
        assert nmse(np.array(logits), np.array(w.logits)) <= 1e-9


def test_a_head_drafts_at_the_positions_after_an_image(tmp_path: Path) -> None:
    """If all RoPE positions are 7 beyond the cells, the drafts do not change."""
    path = write(with_head("qwen35"), tmp_path / "model.gguf")
    runner, drafts = load_runner(path, devices=["numpy"], n_ctx=64, speculation="mtp", mmproj="x", **F32), []
    for offset, of_draft in ((0, 0), (7, 7), (7, 0)):
        at = np.repeat(np.arange(offset, 9 + offset)[:, None], 3, axis=1)
        batch = MicroBatch(LONG[:9], [Run(0, 0, 9, 0)], [8], images=BatchImages((), at))
        runner.collect(runner.launch(batch, Wanted()))
        first, _ = HeadRunner(runner).draft([5], [0], [9], True, offsets=[of_draft])
        drafts.append((first, *HeadRunner(runner).draft(first.tolist(), [0], [10], True, offsets=[of_draft])))
    runner.close()
    chances = [float(of_case[2][0]) for of_case in drafts]
    assert abs(chances[1] - chances[0]) <= 1e-5 < abs(chances[2] - chances[0]), chances


def test_blocks_with_images_are_kept_in_files(small: Path, tmp_path: Path) -> None:
    """Another process finds the blocks of the same image, but no blocks for another image."""
    prompts = [[*LONG, image_of(seed, 50, 64), 11, 12] for seed in (1, 2)]
    kept: dict[str, Any] = {"cache_disk": str(tmp_path), "cache_disk_mib": 64, "n_ctx": 128}
    with watched(small, ["numpy"], **kept) as w:
        [want] = w.run(prompts[0], n=3)
        logits = w.logits
    with watched(small, ["numpy"], **kept) as w:
        assert w.run(prompts[0], n=3) == [want] and w.n_rows[0] == 72 - 64
        assert nmse(np.array(w.logits), np.array(logits)) <= 1e-9
    with watched(small, ["numpy"], **kept) as w:
        w.run(prompts[1])
        assert w.n_rows[0] == 72


def test_positions_of_images_are_not_shifted() -> None:
    with pytest.raises(InvalidArgument, match="context_shift"):
        Options.of("x", mmproj="y", context_shift=True)
