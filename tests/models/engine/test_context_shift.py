"""The fake runner's caches store tokens, so its logits show to which position a shift has moved each
token."""

from __future__ import annotations

import pytest
from fake_runner import row_of
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import examples
from scheduling import GREEDY, check_sound, events_of, finish, make, prompt, tokens_of

from vkbackend.models.engine.messages import Cancel, CopySlot, Generate
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.ops import CELL_BLOCK

pytestmark = pytest.mark.no_vulkan


def shifted(tokens: tuple[int, ...], n: int, n_ctx: int, keep: int = 0, discard: int = 0) -> list[int]:
    held, out = list(tokens), []
    while len(out) < n:
        out.append(int(row_of(held).argmax()))
        if len(held) + 1 >= n_ctx:
            kept = min(keep, n_ctx - 4)
            left = len(held) - kept
            del held[kept : kept + min(discard or left // 2, left - 1)]
        held.append(out[-1])
    return out


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_many_shifts(data: st.DataObject) -> None:
    n_ctx = data.draw(st.sampled_from([8, 31, 64, 100]))
    how = {"n_slots": data.draw(st.integers(1, 4)), "n_ctx": n_ctx, "context_shift": True}
    how |= {"n_ubatch": data.draw(st.sampled_from([1, 16, 64])), "n_in_flight": data.draw(st.integers(1, 2))}
    fewest = -(-n_ctx // CELL_BLOCK) + 1  # An additional block for the copy of a shared block.
    how |= {"blocks": data.draw(st.sampled_from([None, fewest, fewest + 1]))}
    engine, _ = make(**how, prefix_cache=data.draw(st.booleans()))
    n_common = data.draw(st.integers(0, n_ctx))
    requests, expected = [], {}
    for i in range(data.draw(st.integers(1, 5))):
        n_prompt = data.draw(st.integers(1, n_ctx))
        tokens = (prompt(n_common) + prompt(n_ctx, i + 1))[:n_prompt]
        keep, discard = data.draw(st.integers(0, n_ctx)), data.draw(st.sampled_from([0, 1, 3, 33, 500]))
        n = data.draw(st.integers(1, 150))
        requests.append(Generate(i, tokens, n, GREEDY, n_keep=keep, n_discard=discard))
        expected[i] = shifted(tokens, n, n_ctx, keep, discard)
    done = finish(engine, requests)
    for i, tokens_of_i in expected.items():
        assert tokens_of(done[i]) == tokens_of_i
        assert done[i][-1].finish_reason == "length"
    check_sound(engine)


def test_a_token_has_one_shift() -> None:
    """After a shift of one token, the context is still full. The sequence must not shift again while it waits
    for the other sequence's step."""
    engine, runner = make(n_slots=2, n_ctx=8, n_ubatch=1, context_shift=True)
    done = finish(engine, [Generate(i, prompt(8, i), 9, GREEDY, n_discard=1) for i in range(2)])
    for i in range(2):
        assert tokens_of(done[i]) == shifted(prompt(8, i), 9, 8, discard=1)
    assert runner.n_shifts == 2 * 8


def test_counts_and_the_flag_go_on_over_shifts() -> None:
    engine, runner = make(n_ctx=64, context_shift=True)
    [*_, last] = finish(engine, [Generate(0, prompt(20), 200, GREEDY, n_keep=20)])[0]
    assert last.n_discarded > 130 and last.finish_reason == "length"
    assert last.timings is not None
    assert (last.timings.prompt_n, last.timings.decode_n) == (20, 199)
    assert runner.n_shifts > 5
    [*_, short] = finish(engine, [Generate(1, prompt(20), 5, GREEDY)])[1]
    assert not short.n_discarded


def test_without_the_option_a_full_context_ends_the_text() -> None:
    engine, runner = make(n_ctx=64)
    events = finish(engine, [Generate(0, prompt(20), 200, GREEDY, n_keep=20)])[0]
    assert len(tokens_of(events)) == 64 - 20 + 1 and runner.n_shifts == 0
    assert not events[-1].n_discarded


def test_penalties_count_discarded_tokens() -> None:
    seen: list[int] = []

    def record(history: list[int], logits: object) -> object:
        seen.append(len(history))
        return logits

    engine, _ = make(n_ctx=32, context_shift=True)
    params = SamplingParams(temperature=0, logits_processors=(record,))
    finish(engine, [Generate(0, prompt(5), 100, params)])
    assert seen == list(range(5, 105))


@pytest.mark.parametrize("keep", [0, 40, 64])
def test_shifted_blocks_are_never_shared(keep: int) -> None:
    """A prompt that equals the tokens of a shifted cache is computed again, except for the kept tokens."""
    engine, runner = make(n_slots=2, n_ctx=128, context_shift=True)
    tokens = prompt(120)
    out = tokens_of(finish(engine, [Generate(0, tokens, 30, GREEDY, n_keep=keep)])[0])
    history = [*tokens, *out]
    n_kept, n_discarded = keep, (127 - keep) // 2
    held = tuple(history[:n_kept] + history[n_kept + n_discarded : -1])
    before = runner.n_rows
    finish(engine, [Generate(1, held, 1, GREEDY)])
    assert runner.n_rows - before >= len(held) - keep
    check_sound(engine)


def test_a_slot_that_shares_the_prompt_keeps_its_blocks() -> None:
    engine, runner = make(n_slots=3, n_ctx=128, context_shift=True)
    tokens = prompt(100)
    requests = [Generate(i, tokens, n, GREEDY, n_keep=10) for i, n in enumerate((20, 90, 300))]
    done = finish(engine, requests)
    for i, n in enumerate((20, 90, 300)):
        assert tokens_of(done[i]) == shifted(tokens, n, 128, 10)
    assert runner.n_copies > 0
    check_sound(engine)


@pytest.mark.parametrize("blocks", [4, 5, 7])
def test_few_blocks(blocks: int) -> None:
    """Shared blocks need copies. If no block is free, the youngest sequence waits. Later, the tokens in its
    context are computed again."""
    engine, _ = make(n_slots=3, n_ctx=128, blocks=blocks, context_shift=True)
    done = finish(engine, [Generate(i, prompt(90), 200, GREEDY, n_keep=8) for i in range(3)])
    for i in range(3):
        assert tokens_of(done[i]) == shifted(prompt(90), 200, 128, 8)
    check_sound(engine)


def test_a_running_shifted_slot_is_copied_up_to_the_kept_tokens() -> None:
    engine, _ = make(n_slots=2, n_ctx=64, context_shift=True)
    tokens = prompt(40)
    engine.submit(Generate(0, tokens, None, GREEDY, n_keep=36))
    for _ in range(40):
        engine.step()
    engine.submit(CopySlot(1, 0, 1))
    [copied] = [event for event in events_of(engine.step()) if event.id == 1]
    assert copied.tokens == tokens[:36] and copied.error is None
    longer = (*tokens[:36], *prompt(10, 5))
    done = finish(engine, [Cancel(0), Generate(2, longer, 5, GREEDY, slot=1)])
    assert tokens_of(done[2]) == shifted(longer, 5, 64)
    check_sound(engine)
