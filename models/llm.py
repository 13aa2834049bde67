"""The public Python API: `LLM` loads a GGUF model on any mix of devices and turns text or token ids into more
of it.

A thin client of the engine: it checks arguments, owns the tokenizer, and turns events into text. Several
threads may use one `LLM`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import Any, Self

import numpy as np

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.engine.answers import Answers, Mailbox
from vkbackend.models.engine.arguments import (
    MAX_AHEAD,
    MAX_LAYERS,
    device_list,
    layer_count,
    layer_range,
    override_list,
    path_string,
    scaled_files,
    share_list,
    stop_strings,
    token_ids,
    unlike,
    whole_number,
    word,
)
from vkbackend.models.engine.completion import Chunk, Completion, report
from vkbackend.models.engine.hosting import LocalEngine, RemoteEngine
from vkbackend.models.engine.messages import (
    CopySlot,
    EngineOptions,
    Generate,
    LoadState,
    Logits,
    Memory,
    Progress,
    Request,
    SaveState,
    check_tokens,
)
from vkbackend.models.engine.sampling import SamplingParams
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.stop_text import StopText
from vkbackend.models.text.tokenizer import Tokenizer, chat_template, end_ids
from vkbackend.step import MAX_ROWS, MAX_RUNS, MAX_SNAPSHOTS

MAX_CONTEXT = 1 << 24


class LLM:
    """A GGUF model on one or several Vulkan devices.

    path: a .gguf file (any part of a split one). devices: indices, UUIDs or names as `vkbackend devices`
    shows them, a list or "0,1", repeats allowed; None is the best single device. tensor_split: one share
    per device, in any unit, or "auto" to measure them and balance their time (None: auto where they
    differ, else equal). n_ctx: tokens per slot, 0 for the model's own. n_slots: sequences computed
    together, more of them queue up. n_ubatch: rows of one step. type_k, type_v: "f16",
    "f32", "bf16", "q8_0" or "q4_0". process: run the engine in a process of its own. progress: called with
    (bytes loaded, bytes in all). n_snapshots: states of recurrent layers that a slot keeps to go back to,
    where a request shares only the beginning of what is there.

    Placement, independent of the split: n_gpu_layers (None or "all", "auto": as many as fit) leaves the
    first layers in host memory, override_tensor places tensors by name ("REGEX=CPU", "REGEX=host" or
    "REGEX=INDEX"; the first that matches wins), kv_offload=False keeps the caches on the host. use_mmap:
    software devices read weights in the mapped file, which must then stay as it is, instead of a copy
    (False).

    split_mode: "tensor", "layer" (whole layers one device after another) or "none" (main_gpu alone).
    split_policy: "balanced", or "llama.cpp" for its arithmetic. reduce_type: what partial sums travel as,
    "f32", "bf16", or "auto" (bf16 for large ones). reduce_provider: where they meet, "pages", "scatter",
    "host-sum", or "auto" (what the devices can do and the size asks for).
    submit_ahead: segments handed to a device before they may run (None: the whole step). runtime: what
    drives the devices, "native" or "kompute" (None: VKBACKEND_RUNTIME, else native). exact: compute with
    F32 activations alone, where else a device may round them to fewer bits to be faster.

    control_vectors: files of control vectors, or (file, scale) pairs, which add up;
    control_vector_layer_range: the first and the last layer that they steer (None: all that they have).

    n_ctx, n_slots, n_vocab, device_names, chat_template (None without one), prediction (of measured devices)
    and notes say what was opened.
    Raises the errors of `vkbackend.errors`: InvalidArgument, GGUFError, UnsupportedModel,
    UnsupportedFeature, OutOfDeviceMemory, PlanError, DeviceLost, Timeout.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        devices: str | Sequence[str | int] | None = None,
        tensor_split: Sequence[float] | str | None = None,
        n_ctx: int = 512,
        n_slots: int = 1,
        n_ubatch: int = 512,
        type_k: str = "f16",
        type_v: str = "f16",
        process: bool = False,
        progress: Progress | None = None,
        *,
        n_gpu_layers: int | str | None = None,
        override_tensor: Sequence[str | tuple[str, str]] = (),
        kv_offload: bool = True,
        use_mmap: bool = True,
        split_mode: str = "tensor",
        main_gpu: int = 0,
        split_policy: str = "balanced",
        reduce_type: str = "auto",
        runtime: str | None = None,
        exact: bool = False,
        reduce_provider: str = "auto",
        submit_ahead: int | None = None,
        control_vectors: Sequence[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]] = (),
        control_vector_layer_range: tuple[int, int] | None = None,
        n_snapshots: int = 2,
    ) -> None:
        self._mailbox: Mailbox | None = None
        names = device_list(devices)
        options = EngineOptions(
            path=path_string(path),
            devices=names,
            tensor_split=None if tensor_split == "auto" else share_list(tensor_split, names),
            auto_split=tensor_split == "auto"
            or (tensor_split is None and split_mode == "tensor" and unlike(names)),
            n_ctx=whole_number("n_ctx", n_ctx, 0, MAX_CONTEXT, " (0: the model's own)"),
            n_slots=whole_number("n_slots", n_slots, 1, MAX_RUNS),
            n_ubatch=whole_number("n_ubatch", n_ubatch, 1, MAX_ROWS),
            n_snapshots=whole_number("n_snapshots", n_snapshots, 0, MAX_SNAPSHOTS),
            type_k=word("type_k", type_k),
            type_v=word("type_v", type_v),
            n_gpu_layers=layer_count("n_gpu_layers", n_gpu_layers),
            override_tensor=override_list(override_tensor),
            kv_offload=bool(kv_offload),
            use_mmap=bool(use_mmap),
            split_mode=word("split_mode", split_mode),
            main_gpu=whole_number("main_gpu", main_gpu, 0, MAX_LAYERS),
            split_policy=word("split_policy", split_policy),
            reduce_type=word("reduce_type", reduce_type),
            runtime=None if runtime is None else word("runtime", runtime),
            exact=bool(exact),
            reduce_provider=word("reduce_provider", reduce_provider),
            submit_ahead=None
            if submit_ahead is None
            else whole_number("submit_ahead", submit_ahead, 0, MAX_AHEAD, " or None for the whole step"),
            control_vectors=scaled_files(control_vectors),
            control_vector_layer_range=layer_range(control_vector_layer_range),
        )
        self._tokenizer: Tokenizer | None = None
        with GGUF.open(options.path) as gguf:
            self.chat_template = chat_template(gguf)
            try:
                self._tokenizer = Tokenizer.from_gguf(gguf)
                self._stop_ids = self._tokenizer.stop_ids
            except (UnsupportedModel, GGUFError) as error:
                self._no_tokenizer = str(error)
                self._stop_ids = end_ids(gguf)
        engine = (RemoteEngine if process else LocalEngine)(options, progress)
        self._mailbox = Mailbox(engine)
        self.n_ctx, self.n_vocab, self.n_slots = engine.info.n_ctx, engine.info.n_vocab, engine.info.n_slots
        self.device_names = list(engine.info.devices)
        self.prediction = list(engine.info.prediction)
        self.notes = list(engine.info.notes)

    # ---- text ----

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text, with BOS (and EOS) where the model wants them unless add_special is False.

        parse_special: control tokens written out in the text count as such. Raises UnsupportedModel without a
        usable tokenizer, InvalidArgument.
        """
        return self.tokenizer.encode(text, add_special, parse_special)

    def detokenize(self, tokens: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. Raises UnsupportedModel, InvalidArgument."""
        return self.tokenizer.decode(tokens, skip_special)

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

    def generate(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, **options: Any
    ) -> Completion:
        """Continue a text or token ids; the options are those of `stream`."""
        request = self._request(prompt, max_tokens, **options)
        chunks = list(self._stream(*request))
        ids, _, params, *_ = request
        last = chunks[-1]
        assert last.finish_reason is not None and last.timings is not None and params.seed is not None
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            tokens=[chunk.token for chunk in chunks if chunk.token is not None],
            finish_reason=last.finish_reason,
            timings=last.timings,
            prompt_tokens=list(ids),
            seed=params.seed,
            slot=last.slot,
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        *,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repeat_penalty: float = 1.0,
        repeat_last_n: int = 64,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        slot: int | None = None,
    ) -> Generator[Chunk, None, None]:
        """Yield a Chunk per token as it is made; their texts joined are `Completion.text`.

        max_tokens: None goes on until a stop token or the end of the context. The sampling options are those
        of SamplingParams. stop: strings that end the text, themselves left out. ignore_eos: do not end at the
        model's stop tokens. slot: run in that slot (waiting for it), and compute only what it does not hold
        already: the longest common beginning of the prompt and what ran or was loaded there is kept. Without
        it the lowest free slot is taken and all is computed. Streams that are read in turn are computed
        together; closing one frees its slot. Arguments are checked here, before the first token:
        InvalidArgument, and UnsupportedModel for text without a tokenizer.
        """
        options = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "repeat_penalty": repeat_penalty, "repeat_last_n": repeat_last_n, "seed": seed,
        }  # fmt: skip
        return self._stream(
            *self._request(prompt, max_tokens, stop=stop, ignore_eos=ignore_eos, slot=slot, **options)
        )

    def _request(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        slot: int | None = None,
        **sampling: Any,
    ) -> tuple[tuple[int, ...], int | None, SamplingParams, frozenset[int], tuple[str, ...], int | None]:
        if max_tokens is not None:
            max_tokens = whole_number("max_tokens", max_tokens, 0, 1 << 62, ", or None for no limit")
        params, stops = SamplingParams(**sampling), stop_strings(stop)
        if stops:
            self.tokenize("")  # raises where there is no tokenizer
        slot = None if slot is None else self._slot(slot)
        ids = self._prompt(prompt)
        return ids, max_tokens, params, frozenset() if ignore_eos else self._stop_ids, stops, slot

    def _stream(
        self,
        ids: tuple[int, ...],
        max_tokens: int | None,
        params: SamplingParams,
        stop_ids: frozenset[int],
        stops: tuple[str, ...],
        slot: int | None,
    ) -> Generator[Chunk, None, None]:
        text = StopText(stops)
        decoder = self._tokenizer.stream(at_start=False) if self._tokenizer else None
        events = self._ask(lambda id_: Generate(id_, ids, max_tokens, params, stop_ids, slot))
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
        slot, path = self._slot(slot), os.path.abspath(path_string(path, "a file to save to"))
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
        slot, path = self._slot(slot), os.path.abspath(path_string(path, "a saved state"))
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
        ids = tuple(self.tokenize(prompt)) if isinstance(prompt, str) else token_ids(prompt)
        check_tokens(ids, self.n_vocab, self.n_ctx)
        return ids

    def _ask(self, make: Callable[[int], Request]) -> Answers:
        assert self._mailbox is not None
        return self._mailbox.ask(make)

    def _check_open(self) -> None:
        assert self._mailbox is not None
        self._mailbox.open_engine()

    # ---- the end ----

    def close(self) -> None:
        """Release devices, memory and the engine's process. May be called twice; what is in work ends with an
        error.
        """
        if self._mailbox is not None:
            self._mailbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()
