from __future__ import annotations

import asyncio
import gc
import math
from pathlib import Path
from typing import Any

import fake_runner
import numpy as np
import pytest
from fake_runner import LOST, N_VOCAB, SLOW, continuation
from gguf_files import U32, gguf_bytes, key
from hypothesis import given
from hypothesis import strategies as st
from words import ENDS, Make, engine_of

from vkbackend import LLM
from vkbackend.errors import (
    DeadlineExceeded,
    DeviceLost,
    GGUFError,
    InvalidArgument,
    UnsupportedModel,
    VkbackendError,
)
from vkbackend.models.engine import channel
from vkbackend.models.text.stop_text import StopText

# ---- text ----


def test_generate_is_the_joined_stream(make: Make) -> None:
    llm = make()
    prompt = llm.tokenize("w1. w2.")
    assert prompt[0] == 1
    done = llm.generate("w1. w2.", 12, temperature=0)
    chunks = list(llm.stream(prompt, 12, temperature=0))
    expected = continuation(prompt, 12)
    assert done.tokens == [c.token for c in chunks] == expected[: len(done.tokens)]
    assert done.text == "".join(c.text for c in chunks) == llm.tokenizer.decode(done.tokens, at_start=False)
    assert done.prompt_tokens == prompt and done.finish_reason == chunks[-1].finish_reason
    assert (
        [c.finish_reason for c in chunks[:-1]]
        == [None] * (len(chunks) - 1)
        == [c.timings for c in chunks[:-1]]
    )
    assert done.timings["prompt_n"] == len(prompt) and done.timings["decode_n"] == len(done.tokens) - 1
    assert done.timings["decode_tokens_per_second"] > 0 and done.timings["reduce_us"] == pytest.approx(5)


def test_repr_names_the_opened_model(make: Make, model: Path) -> None:
    llm = make(n_slots=2)
    devices = ", ".join(llm.device_names)
    assert repr(llm) == f"<LLM {str(model)!r} on {devices}, n_ctx=64, n_slots=2>"
    llm.close()
    assert repr(llm).endswith(", n_slots=2, closed>")


def test_a_seed_repeats_the_run_and_is_reported(make: Make) -> None:
    llm = make()
    first = llm.generate([1, 9], 20, temperature=1.5, top_k=0, min_p=0)
    again = llm.generate([1, 9], 20, temperature=1.5, top_k=0, min_p=0, seed=first.seed)
    assert again.tokens == first.tokens
    assert llm.generate([1, 9], 20, temperature=1.5, top_k=0, min_p=0).seed != first.seed


def test_stop_strings_cut_the_text_and_free_the_slot(make: Make) -> None:
    llm = make(n_ctx=40)
    plain = llm.generate([1, 9], 20, temperature=0, ignore_eos=True)
    stop = plain.text[8:12]
    cut = llm.generate([1, 9], 20, temperature=0, ignore_eos=True, stop=["never there", stop])
    assert cut.text == plain.text[: plain.text.index(stop)] and cut.finish_reason == "stop"
    assert cut.tokens == plain.tokens[: len(cut.tokens)] and len(cut.tokens) < 20
    assert cut.timings["prompt_n"] == 1, "the slot holds the other one"
    assert llm.generate([1, 9], 3, temperature=0).tokens == plain.tokens[:3]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_text(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    finder, out = StopText(stops), ""
    for i, piece in enumerate(pieces):
        out += finder.push(piece, last=i == len(pieces) - 1)
        if finder.found:
            break
    begins = [i for i in range(len(text)) if text.startswith(tuple(stops), i)] if stops else []
    assert finder.found == bool(begins) and out == (text[: begins[0]] if begins else text)


def test_the_stop_string_that_begins_first_counts() -> None:
    finder = StopText(["bc", "abcd"])
    assert (finder.push("xabc"), finder.found) == ("x", False)
    assert (finder.push("d"), finder.found) == ("", True)
    finder = StopText(["bc", "abcd"])
    assert [finder.push("xabc"), finder.push("e")] == ["x", "a"] and finder.found
    finder = StopText(["bc", "abcd"])
    assert [finder.push("xabc"), finder.push("", last=True)] == ["x", "a"] and finder.found


def test_control_tokens_of_a_prompt(make: Make) -> None:
    llm = make()
    text = "<s>w1.</s>"
    assert llm.generate(text, 1).prompt_tokens == llm.tokenize(text, parse_special=True)
    plain = llm.generate(text, 1, parse_special=False).prompt_tokens
    assert plain == llm.tokenize(text) and 2 not in plain


def test_rows_beyond_the_vocabulary_have_no_text(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fake_runner, "row_of", lambda tokens: np.eye(N_VOCAB, dtype=np.float32)[44 - len(tokens)]
    )
    done = make().generate([9], 8, temperature=0)
    assert done.tokens == [*range(43, 35, -1)] and done.text == " w31. w30. w29. w28."


def test_without_a_tokenizer_ids_work_and_text_raises(make: Make, model: Path) -> None:
    model.write_bytes(
        gguf_bytes([key("general.architecture", 8, "llama"), key("tokenizer.ggml.eos_token_id", U32, 5)])
    )
    llm = make()
    done = llm.generate([1, 2], 6, temperature=0, ignore_eos=True)
    assert done.tokens == continuation([1, 2], 6, [5]) and done.text == ""
    assert llm.logits([1, 2]).shape == (2, N_VOCAB)
    assert 5 in continuation([1, 4], 60) and llm.generate([1, 4], 60, temperature=0).tokens[-1] == 5
    for call in (lambda: llm.generate("text", 1), lambda: llm.tokenize("text"), lambda: llm.detokenize([1]),
                 lambda: llm.generate([1], 1, stop="x")):  # fmt: skip
        with pytest.raises(UnsupportedModel, match="no usable tokenizer"):
            call()


# ---- arguments ----


@pytest.mark.parametrize(
    "options",
    [{"devices": value} for value in ([], "", "0,", [None], [True], 0, ["0", " "], 1.5)]
    + [{"devices": [0, 0], "tensor_split": value}
       for value in ([1], [1, 1, 1], [0, 0], [-1, 2], [1, math.nan], [1, math.inf], "1,1", ["a", 1], 3)]
    + [{"n_ctx": value} for value in (-1, 1.5, "512", None, True, 1 << 40)]
    + [{"n_slots": value} for value in (0, 129, -1, 2.0)]
    + [{"n_ubatch": value} for value in (-1, 4097)]
    + [{"type_k": 1}, {"type_v": None}, {"tensor_split": [1, 1]}],
    ids=repr,
)  # fmt: skip
def test_bad_options(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        make(**options)


@pytest.mark.parametrize("path", [None, 3, "", "/nowhere/model.gguf", "."])
def test_bad_paths(model: Path, path: Any) -> None:
    with pytest.raises((InvalidArgument, GGUFError)):
        LLM(path)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "no tokens"), ([1] * 65, "65 tokens and the context holds 64"), ([50], "0..49"), ([-1], "-1"),
     ([1.5], "token ids"), ([True], "token ids"), (None, "token ids"), (5, "token ids"), (b"ab", "token ids"),
     (np.zeros((2, 2), int), "token ids"), (["1", 2], "token ids"), ("w1." * 65, "the context holds 64")],
)  # fmt: skip
def test_bad_prompts(make: Make, prompt: Any, message: str) -> None:
    llm = make()
    for call in (llm.generate, llm.stream, *([llm.logits] if not isinstance(prompt, str) else [])):
        with pytest.raises(InvalidArgument, match=message):
            call(prompt)
    assert not engine_of(llm).runner.steps and not llm._mailbox.channel.readers  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": -2}, {"max_tokens": 1.0}, {"max_tokens": math.nan}, {"temperature": -1},
     {"top_p": math.nan}, {"stop": ""}, {"stop": ["a", ""]}, {"stop": [3]}, {"stop": 3}, {"seed": -2},
     {"top_k": -1}],
    ids=repr,
)  # fmt: skip
def test_bad_generation_options(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        make().stream([1], **options)


def test_plain_values_are_accepted(make: Make) -> None:
    llm = make(devices="0, 1", tensor_split=(np.float32(1), 3), n_slots=np.int64(2))
    assert llm.generate(np.array([1, 8]), np.int32(2), temperature=0).tokens == continuation([1, 8], 2)
    assert llm.generate("", 1).prompt_tokens == [1]


# ---- batches, asyncio ----


def test_a_list_of_prompts_gives_a_list(make: Make) -> None:
    llm = make(n_slots=3)
    prompts = [[8 + i % 30, i % 7] for i in range(40)]
    done = llm.generate(prompts, 5, temperature=0, ignore_eos=True)
    assert [c.tokens for c in done] == [continuation(p, 5, ENDS) for p in prompts]
    assert [c.prompt_tokens for c in done] == prompts
    texts = llm.generate(["w1.w2.", "w3."], 2, temperature=0, ignore_eos=True)
    assert [c.prompt_tokens for c in texts] == [llm.tokenize("w1.w2."), llm.tokenize("w3.")]
    assert llm.generate([[8, 9]], 3, temperature=0, ignore_eos=True)[0].tokens == continuation(
        [8, 9], 3, ENDS
    )
    assert engine_of(llm).scheduler.free == {0, 1, 2}


def test_several_continuations_share_their_prompt_and_differ_by_seed(make: Make) -> None:
    llm = make(n_slots=4, n_ctx=256)
    prompt = [8 + i % 30 for i in range(100)]
    done = llm.generate(prompt, 6, n=4, seed=7, temperature=1.5, ignore_eos=True)
    assert [c.seed for c in done] == [7, 8, 9, 10] and len({tuple(c.tokens) for c in done}) > 1
    for c in done:
        assert c.tokens == llm.generate(prompt, 6, seed=c.seed, temperature=1.5, ignore_eos=True).tokens
    assert llm.stats()["prompt_tokens_cached"] >= 3 * 96
    nested = llm.generate([prompt, [8]], 2, n=2, temperature=0, ignore_eos=True)
    assert [len(rows) for rows in nested] == [2, 2]
    assert nested[1][0].tokens == nested[1][1].tokens == continuation([8], 2, ENDS)


def test_an_error_of_one_prompt_ends_the_list(make: Make) -> None:
    llm = make(n_slots=2)
    with pytest.raises(InvalidArgument, match=r"0\.\.49"):
        llm.generate([[8], [99], [9]], 3)
    with pytest.raises(VkbackendError, match="largest logit"):
        llm.generate([[8], [fake_runner.NAN], [9] * 30], 30)
    with pytest.raises(InvalidArgument, match="slot=0: one slot has room for one text"):
        llm.generate([[8], [9]], 3, slot=0)
    for wrong in (0, -1, True, "2"):
        with pytest.raises(InvalidArgument, match="n="):
            llm.generate([8], 3, n=wrong)
    assert llm.generate([8], 2, temperature=0, ignore_eos=True).tokens == continuation([8], 2, ENDS)
    assert not engine_of(llm)._by_id


def test_stop_strings_in_a_batch(make: Make) -> None:
    llm = make(n_slots=2)
    plain = [llm.generate([8 + i], 9, temperature=0, ignore_eos=True) for i in range(6)]
    stop = plain[0].text[4:8]
    done = llm.generate([[8 + i] for i in range(6)], 9, temperature=0, stop=[stop], ignore_eos=True)
    assert [c.text for c in done] == [p.text.split(stop)[0] for p in plain]
    assert all(c.timings["prompt_n"] >= 1 for c in done)


def test_asyncio(make: Make) -> None:
    llm = make(n_slots=4, n_ubatch=1)
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}

    async def stream(i: int) -> list[int | None]:
        return [chunk.token async for chunk in llm.astream([8 + i], 6, **greedy)]

    async def run_all() -> None:
        wanted = [continuation([8 + i], 6, ENDS) for i in range(12)]
        assert await asyncio.gather(*(stream(i) for i in range(12))) == wanted
        assert (await llm.agenerate([8, 9], 4, **greedy)).tokens == continuation([8, 9], 4, ENDS)
        batch = await llm.agenerate([[8], [9]], 4, **greedy)
        assert [c.tokens for c in batch] == [continuation([i], 4, ENDS) for i in (8, 9)]
        task = asyncio.create_task(llm.agenerate([SLOW] * 60, None))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in llm.astream([SLOW] * 60, None):
            break
        gc.collect()
        assert (await llm.agenerate([8], 2, **greedy)).tokens == continuation([8], 2, ENDS)

    asyncio.run(run_all())
    assert llm.stats()["n_running"] == 0


def test_a_lost_device_is_raised_with_asyncio(make: Make) -> None:
    llm = make(n_slots=2)

    async def lost() -> None:
        with pytest.raises(DeviceLost):
            await llm.agenerate([[8], [LOST]], 9)
        with pytest.raises(DeviceLost):
            async for _ in llm.astream([8], 9):
                pass

    asyncio.run(lost())


def test_unread_streams_do_not_accumulate_answers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MOST_UNREAD", 10)
    llm = make(n_slots=2, n_ctx=400)
    slow = llm.stream([8], 300, temperature=0, ignore_eos=True)
    first = [next(slow).token]
    other = llm.generate([9], 300, temperature=0, ignore_eos=True)
    assert other.tokens == continuation([9], 300, ENDS)
    running = [s for s in engine_of(llm).scheduler.running if s.request.tokens == (8,)]
    assert running[0].is_paused and running[0].n_generated <= 13
    assert first + [chunk.token for chunk in slow] == continuation([8], 300, ENDS)


def test_deadlines_and_priorities_are_checked(make: Make) -> None:
    llm = make()
    with pytest.raises(DeadlineExceeded, match="within its deadline of 0 s"):
        llm.generate([8], 5, deadline_s=0)
    for wrong in ({"deadline_s": -1}, {"deadline_s": math.nan}, {"priority": 1.5}, {"priority": 10**9}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            llm.generate([8], 5, **wrong)  # type: ignore[call-overload]
    assert llm.generate(
        [8], 5, deadline_s=60, priority=-3, temperature=0, ignore_eos=True
    ).tokens == continuation([8], 5, ENDS)
