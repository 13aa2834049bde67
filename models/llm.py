"""The public Python API: `LLM` loads a GGUF model on any mix of devices and turns text or token ids into more
of it.

A thin client of the engine: it checks arguments, owns the tokenizer, and turns events into text. Several
threads may use one `LLM`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, Unpack

import numpy as np

from vkbackend.checks import refused, switch, whole_number
from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.arguments import path_string, text_of, token_ids, token_limit
from vkbackend.models.engine.answers import Answers, Mailbox
from vkbackend.models.engine.completion import Chunk, Completion, report
from vkbackend.models.engine.hosting import LocalEngine, RemoteEngine
from vkbackend.models.engine.messages import (
    CopySlot,
    Generate,
    LoadState,
    Logits,
    Memory,
    Progress,
    Request,
    SaveState,
    check_tokens,
)
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import MAX_CONTEXT, GenerateKeywords, GenerateOptions, Keywords, Options
from vkbackend.models.text.stop_text import StopText
from vkbackend.models.text.tokenizer import Tokenizer, chat_template, end_ids
from vkbackend.options import takes

PROMPT = "expected a text or a sequence of token ids"


@dataclass(frozen=True, slots=True)
class _Request:
    """A generation that was asked for, checked."""

    ids: tuple[int, ...]
    max_tokens: int | None
    options: GenerateOptions


class LLM:
    """A GGUF model on one or several Vulkan devices.

    path: a .gguf file (any part of a split one). process: run the engine in a process of its own. progress:
    called with (bytes loaded, bytes in all). All other keywords are described in `Keywords`
    (models/options.py): `devices`, `tensor_split`, `n_ctx`, `n_slots` and more.

    n_ctx, n_slots, n_vocab, device_names, chat_template (None without one), prediction (of measured devices)
    and notes say what was opened.
    Raises the errors of `vkbackend.errors`: InvalidArgument, GGUFError, UnsupportedModel,
    UnsupportedFeature, OutOfDeviceMemory, PlanError, DeviceLost, Timeout, and ForkedProcess in a process that
    was forked after the model was made.
    """

    @takes(Keywords, Options)
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        process: bool = False,
        progress: Progress | None = None,
        **options: Unpack[Keywords],
    ) -> None:
        self._mailbox: Mailbox | None = None
        apart, wanted = switch("process", process), Options.of(path, **options)
        if progress is not None and not callable(progress):
            raise refused("progress", progress, "expected a function of (bytes loaded, bytes in all)")
        self._tokenizer: Tokenizer | None = None
        with GGUF.open(wanted.path) as gguf:
            self.chat_template = chat_template(gguf)
            try:
                self._tokenizer = Tokenizer.from_gguf(gguf)
                self._stop_ids = self._tokenizer.stop_ids
            except (UnsupportedModel, GGUFError) as error:
                self._no_tokenizer = str(error)
                self._stop_ids = end_ids(gguf)
        self._mailbox = Mailbox(partial(RemoteEngine if apart else LocalEngine, wanted), progress)
        info = self._mailbox.info
        self.n_ctx, self.n_vocab, self.n_slots = info.n_ctx, info.n_vocab, info.n_slots
        self.device_names, self.prediction = list(info.devices), list(info.prediction)
        self.notes = list(info.notes)

    # ---- text ----

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text, with BOS (and EOS) where the model wants them unless add_special is False.

        parse_special: control tokens written out in the text count as such. Raises UnsupportedModel without a
        usable tokenizer, InvalidArgument.
        """
        tokenizer = self.tokenizer
        special = switch("add_special", add_special), switch("parse_special", parse_special)
        return tokenizer.encode(text_of("text", text), *special)

    def detokenize(self, tokens: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. Raises UnsupportedModel, InvalidArgument."""
        tokenizer = self.tokenizer
        return tokenizer.decode(token_ids("tokens", tokens), switch("skip_special", skip_special))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises UnsupportedModel where it has none that can be used."""
        self._check_open()
        if self._tokenizer is None:
            raise UnsupportedModel(self._no_tokenizer)
        return self._tokenizer

    # ---- the model ----

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits after every token, float32 [n_tokens, n_vocab], from position 0 in a slot of its own.

        Waits its turn while all slots are taken. Raises InvalidArgument and what devices raise.
        """
        ids = self._prompt(tokens)
        result = np.empty((len(ids), self.n_vocab), np.float32)
        n_rows = 0
        for event in self._ask(lambda id_: Logits(id_, ids)):
            assert event.logits is not None
            result[n_rows : n_rows + len(event.logits)] = event.logits
            n_rows += len(event.logits)
        return result

    @takes(GenerateKeywords, GenerateOptions)
    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Completion:
        """Continue a text or token ids, as `stream` does, and wait for the end."""
        request = self._request(prompt, max_tokens, options)
        # Without stop strings every token is wanted, so the engine need not wait to be asked for the next.
        chunks = list(self._stream(request, eager=not request.options.stop))
        last, seed = chunks[-1], request.options.seed
        assert last.finish_reason is not None and last.timings is not None and seed is not None
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            tokens=[chunk.token for chunk in chunks if chunk.token is not None],
            finish_reason=last.finish_reason,
            timings=last.timings,
            prompt_tokens=list(request.ids),
            seed=seed,
            slot=last.slot,
        )

    @takes(GenerateKeywords, GenerateOptions)
    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Generator[Chunk, None, None]:
        """Yield a Chunk per token as it is made; their texts joined are `Completion.text`.

        max_tokens: None or -1 goes on until a stop token or the end of the context. The other keywords
        (sampling, stop, ignore_eos, slot) are described in `GenerateKeywords`. Streams that are read in turn
        are computed together; closing one frees its slot. Arguments are checked here, before the first token:
        InvalidArgument, and UnsupportedModel for text without a tokenizer.
        """
        return self._stream(self._request(prompt, max_tokens, options))

    def _request(
        self, prompt: str | Sequence[int], max_tokens: int | None, options: GenerateKeywords
    ) -> _Request:
        most, checked = token_limit("max_tokens", max_tokens), GenerateOptions.of(**options)
        if checked.stop:
            self.tokenize("")  # raises where there is no tokenizer
        if checked.slot is not None:
            checked = replace(checked, slot=self._slot(checked.slot))
        return _Request(self._prompt(prompt), most, checked)

    def _stream(self, request: _Request, *, eager: bool = False) -> Generator[Chunk, None, None]:
        ids, max_tokens, options = request.ids, request.max_tokens, request.options
        stop_ids = frozenset[int]() if options.ignore_eos else self._stop_ids
        text = StopText(options.stop)
        decoder = self._tokenizer.stream(at_start=False) if self._tokenizer else None
        slot = options.slot
        events = self._ask(lambda id_: Generate(id_, ids, max_tokens, options, stop_ids, slot), eager=eager)
        try:
            for event in events:
                piece = ""
                # A table of embeddings may have more rows than the vocabulary has tokens: those stand for no
                # text.
                if decoder and event.token is not None and event.token < self._tokenizer.n_vocab:  # type: ignore[union-attr]
                    piece = decoder.push(event.token)
                if decoder and event.done:
                    piece += decoder.flush()
                piece = text.push(piece, last=event.done)
                reason = "stop" if text.found else event.finish_reason
                timings = report(event.timings) if reason else None
                yield Chunk(piece, event.token, reason, timings, event.slot or 0)
                if text.found:
                    return
        finally:
            events.close()

    # ---- what a slot holds ----

    def save_state(
        self, path: str | os.PathLike[str], slot: int = 0, *, first: int = 0, last: int | None = None
    ) -> None:
        """Save what a slot holds to a file (docs/state_format.md): K and V of its positions, and its tokens.

        A slot holds its last sequence, prompt and generated tokens, until another one runs there; it may be
        saved while a stream is at work in it. first, last: save these positions alone, last excluded (None:
        all, and the newest token, which has not run yet). The file is replaced whole or not at all.
        Raises InvalidArgument for a slot or positions that are not there, StateError.
        """
        slot, path = self._slot(slot), os.path.abspath(path_string("path", path, "a file to save to"))
        first = whole_number("first", first, 0, MAX_CONTEXT)
        last = last if last is None else whole_number("last", last, 0, MAX_CONTEXT, ", or None for all")
        list(self._ask(lambda id_: SaveState(id_, path, slot, first, last)))

    def load_state(self, path: str | os.PathLike[str], slot: int = 0) -> list[int]:
        """Put a saved state into a slot; returns the tokens of the sequence that the slot then holds.

        `generate(tokens + more, slot=slot)` goes on from there and computes what is new alone. The model
        and the cache types must be those the state was saved with; devices, split, slot and n_ctx may differ.
        A file saved with `first` continues what the slot holds, which must be what it held then. Sampling is
        no part of a state: a seeded run starts its random numbers anew. Raises StateError, and the slot keeps
        what it had; InvalidArgument where a sequence is at work in it.
        """
        slot, path = self._slot(slot), os.path.abspath(path_string("path", path, "a saved state"))
        (event,) = self._ask(lambda id_: LoadState(id_, path, slot))
        assert event.tokens is not None
        return list(event.tokens)

    def copy_slot(self, source: int, target: int) -> list[int]:
        """Put what slot `source` holds into slot `target`, on the devices; returns the sequence's tokens.

        Both then go on by themselves: a long prompt is read once and continued in several ways. Raises
        InvalidArgument where a sequence is at work in the target.
        """
        source, target = self._slot(source), self._slot(target)
        (event,) = self._ask(lambda id_: CopySlot(id_, source, target))
        assert event.tokens is not None
        return list(event.tokens)

    def _slot(self, slot: int) -> int:
        return whole_number("slot", slot, 0, self.n_slots - 1, " (n_slots says how many there are)")

    def memory(self) -> list[dict[str, Any]]:
        """Per device, in order, bytes by purpose: "device" (its name), "weights", "mapped" (weights read in
        the file, pages that the system may drop), "kv", "scratch", "host" (slices and caches placed there),
        "shared" (tables that all devices read, counted for the first), "staging", and what was "free_before"
        loading and is "free" now (None: the driver does not tell)."""
        (event,) = self._ask(Memory)
        assert event.memory is not None
        return event.memory

    def _prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        self._check_open()
        ids = tuple(self.tokenize(prompt)) if isinstance(prompt, str) else token_ids("prompt", prompt, PROMPT)
        check_tokens(ids, self.n_vocab, self.n_ctx)
        return ids

    def _ask(self, make: Callable[[int], Request], *, eager: bool = True) -> Answers:
        assert self._mailbox is not None
        return self._mailbox.ask(make, eager=eager)

    def _check_open(self) -> None:
        assert self._mailbox is not None
        self._mailbox.check_open()

    # ---- the end ----

    def close(self) -> None:
        """Release devices, memory and the engine's process. May be called twice, and again after an
        interrupt; what is in work ends with an error.
        """
        if self._mailbox is not None:
            self._mailbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            if self._mailbox is not None:
                self._mailbox.end()
