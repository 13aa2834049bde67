"""The public Python API. `LLM` checks arguments, owns the tokenizer, and turns the engine's events into text.
Threads may share one `LLM`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Self, Unpack, overload

import numpy as np

from vkbackend.checks import refused, switch
from vkbackend.errors import GGUFError, UnsupportedModel, VkbackendError
from vkbackend.meta.load import Progress
from vkbackend.models.active_adapters import ActiveAdapters
from vkbackend.models.arguments import adapter_scales, text_of, token_ids
from vkbackend.models.chats.methods import Chats
from vkbackend.models.embeddings.heads import Heads
from vkbackend.models.embeddings.methods import Embeddings
from vkbackend.models.engine.answers import Answers, Mailbox
from vkbackend.models.engine.channel import Channel
from vkbackend.models.engine.completion import Chunk, Completion
from vkbackend.models.engine.engine_process import Hosted, LocalEngine, RemoteEngine
from vkbackend.models.engine.messages import Logits, Memory, Request, Stats
from vkbackend.models.generate_options import GenerateKeywords, GenerateOptions
from vkbackend.models.generation import Generation, arun_all, astream, run_all, stream
from vkbackend.models.generation_maker import GenerationMaker, Prompt, Prompts
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.hub import fetch, fetch_projector
from vkbackend.models.keywords import Keywords
from vkbackend.models.model_tokens import ModelTokens, suppressed_ids
from vkbackend.models.options import Options
from vkbackend.models.pictures import KEPT_NBYTES, MediaPrompt, Pictures, vision_steps
from vkbackend.models.slots import Slots
from vkbackend.models.text.infill import infill_prompt
from vkbackend.models.text.tokenizer import Tokenizer, chat_templates, end_ids
from vkbackend.options_class import takes


class LLM(Chats, Slots, Embeddings):
    """A GGUF model on one or several Vulkan devices.

    `path` is a .gguf file, or any part of a split model. `process` runs the engine in a separate process.
    `progress` is called with (bytes loaded, total bytes). `Keywords` in models/keywords.py describes the
    other keywords.

    The attributes are path, n_ctx, n_slots, n_vocab, device_names, chat_template (or None), chat_templates
    (by name), prediction (for measured devices), notes, speculation (names of drafters), is_encoder (the
    model generates no text) and n_text (the maximum number of tokens of a text to embed).

    Raises InvalidArgument, GGUFError, UnsupportedModel, UnsupportedFeature, OutOfDeviceMemory, PlanError,
    DeviceLost, Timeout, and ForkedProcess in a forked process.
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
        self._apart, wanted = switch("process", process), Options.of(path, **options)
        if progress is not None and not callable(progress):
            raise refused("progress", progress, "expected a function of (bytes loaded, bytes in all)")
        self._tokenizer: Tokenizer | None = None
        with GGUF.open(wanted.path) as gguf:
            self.chat_templates, suppressed = chat_templates(gguf), suppressed_ids(gguf)
            self.heads = Heads.read(gguf)
            self.chat_template = self.chat_templates.get("default")
            no_tokenizer = ""
            try:
                self._tokenizer = Tokenizer.from_gguf(gguf)
                stop_ids = self._tokenizer.stop_ids
            except (UnsupportedModel, GGUFError) as error:
                no_tokenizer = str(error)
                stop_ids = end_ids(gguf)
        self.n_keep, self.speculation = wanted.n_keep, wanted.speculation
        self._mailbox = Mailbox(partial(self._engine(wanted), wanted), progress)
        tokens = ModelTokens(stop_ids, suppressed, self._tokenizer)
        info = self._mailbox.info
        self._adapters = ActiveAdapters(info.adapters)
        pictures = None
        if wanted.mmproj is not None:
            steps = vision_steps(wanted, partial(self._mailbox.ask, eager=True))
            pictures = Pictures(steps, KEPT_NBYTES if wanted.prefix_cache else 0)
        self._maker = GenerationMaker(
            self._mailbox, tokens, self._adapters, self.n_keep, self._apart, no_tokenizer, pictures
        )
        self.n_ctx, self.n_vocab, self.n_slots = info.n_ctx, info.n_vocab, info.n_slots
        self.is_encoder, self.n_text = info.encodes, info.n_text
        self.path = wanted.path
        self.device_names, self.prediction = list(info.devices), list(info.prediction)
        self.notes = list(info.notes)

    def _engine(self, options: Options) -> Callable[[Options, Channel], Hosted]:
        if options.hostfile is None:
            return RemoteEngine if self._apart else LocalEngine
        from vkbackend.models.hosts.group_engine import GroupEngine  # needs the extra `hosts`

        self._apart = True
        return GroupEngine

    @classmethod
    def from_pretrained(cls, name: str, file: str | None = None, **options: Any) -> Self:
        """Open a model from the Hugging Face Hub. `name` is "user/repo:Q4_K_M" or "user/repo", and `file` is
        a file of the repository. `mmproj="auto"` opens the repository's projector, too.

        Also raises InvalidArgument for an unknown name, repository or file, and VkbackendError without a
        connection or disk space.
        """
        file = None if file is None else text_of("file", file)
        if options.get("mmproj") == "auto":
            options["mmproj"] = fetch_projector(name, file)
        return cls(fetch(name, file), **options)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text. `add_special` adds BOS and EOS if the model wants them.
        `parse_special` converts texts such as <|im_start|> to special tokens.

        Raises UnsupportedModel without a usable tokenizer, and InvalidArgument.
        """
        self._check_open()
        tokenizer = self.tokenizer
        special = switch("add_special", add_special), switch("parse_special", parse_special)
        return tokenizer.encode(text_of("text", text), *special)

    def detokenize(self, tokens: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD. Raises UnsupportedModel,
        InvalidArgument."""
        self._check_open()
        tokenizer = self.tokenizer
        return tokenizer.decode(token_ids("tokens", tokens), switch("skip_special", skip_special))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, also after `close`. Raises UnsupportedModel without a usable tokenizer."""
        return self._maker.tokenizer

    @property
    def pictures(self) -> Pictures | None:
        """None if the model reads only text."""
        return self._maker.pictures

    @property
    def adapters(self) -> list[dict[str, Any]]:
        """Return a dict per LoRA adapter: "id", "name", "path", "scale" (the default scale), "rank",
        "task_name", "prompt_prefix" (texts of its file) and "invocation_tokens"."""
        return self._adapters.table()

    def set_adapters(self, scales: Mapping[str | int, float] | Sequence[tuple[str | int, float]]) -> None:
        """Set the default scales, by name or number, for requests that begin later. Adapters that are not
        listed get 0. Raises InvalidArgument."""
        self._adapters.set_defaults(adapter_scales("lora", scales) or ())

    def logits(
        self,
        tokens: Sequence[int],
        *,
        lora: Mapping[str | int, float] | Sequence[tuple[str | int, float]] | None = None,
    ) -> np.ndarray:
        """Return the logits after every token, float32 [n_tokens, n_vocab], from position 0 on. `lora` is as
        for `generate`.

        Waits for a free slot. Raises InvalidArgument and device errors.
        """
        ids, adapters = self._maker.ids_of(tokens), self._adapters.resolved(adapter_scales("lora", lora))
        result = np.empty((len(ids), self.n_vocab), np.float32)
        n_rows = 0
        for event in self._ask(lambda id_: Logits(id_, ids, adapters=adapters)).events():
            assert event.logits is not None
            result[n_rows : n_rows + len(event.logits)] = event.logits
            n_rows += len(event.logits)
        return result

    @overload
    def generate(
        self, prompt: Prompt, max_tokens: int | None = None, *, n: None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Completion: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Prompt, max_tokens: int | None = None, *, n: int, **options: Unpack[GenerateKeywords]
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompt: Prompts, max_tokens: int | None = None, *, n: None = None,
        **options: Unpack[GenerateKeywords],
    ) -> list[Completion]: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Prompts, max_tokens: int | None = None, *, n: int,
        **options: Unpack[GenerateKeywords],
    ) -> list[list[Completion]]: ...  # fmt: skip

    @takes(GenerateKeywords, GenerateOptions)
    def generate(
        self,
        prompt: Prompt | Prompts,
        max_tokens: int | None = None,
        *,
        n: int | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Continue a text or token ids, like `stream`, and wait for the end.

        A list of prompts returns a list of answers in order. Up to `n_slots` prompts run together. If `n` is
        set, each prompt is computed once and returns a list of n continuations. If a seed is set,
        continuation i uses seed + i. If a continuation fails, its error is raised and the others are
        cancelled.
        """
        batch = self._maker.batch(prompt, max_tokens, n, options)
        done = run_all(self._open_mailbox(), batch.generations, self._tokenizer, 4 * self.n_slots)
        return batch.shaped(done)

    @takes(GenerateKeywords, GenerateOptions)
    def infill(
        self,
        prefix: str,
        suffix: str,
        max_tokens: int | None = None,
        *,
        files: Mapping[str, str] | None = None,
        suffix_first: bool = False,
        **options: Unpack[GenerateKeywords],
    ) -> Completion:
        """Generate the text between `prefix` and `suffix`, with a model trained for infilling. The prompt has
        the format of llama-server's `/infill`.

        `files` maps names of other project files to texts. `suffix_first` puts the suffix first, as some
        models expect. Raises UnsupportedModel if the vocabulary lacks infill tokens, and the errors of
        `generate`.
        """
        if files is not None and not isinstance(files, Mapping):
            raise refused("files", files, "expected texts by name, a mapping")
        texts = {text_of("a name in files", name): text_of(f"files[{name!r}]", text)
                 for name, text in (files or {}).items()}  # fmt: skip
        before, after = text_of("prefix", prefix), text_of("suffix", suffix)
        first = switch("suffix_first", suffix_first)
        prompt = infill_prompt(self.tokenizer, before, after, files=texts, suffix_first=first)
        return self.generate(prompt, max_tokens, **options)

    @takes(GenerateKeywords, GenerateOptions)
    async def agenerate(
        self,
        prompt: Prompt | Prompts,
        max_tokens: int | None = None,
        *,
        n: int | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Run `generate` in asyncio. Cancelling the task cancels its generations."""
        batch = await asyncio.to_thread(self._maker.batch, prompt, max_tokens, n, options)
        done = await arun_all(self._open_mailbox(), batch.generations, self._tokenizer, 4 * self.n_slots)
        return batch.shaped(done)

    @takes(GenerateKeywords, GenerateOptions)
    def stream(
        self, prompt: Prompt, max_tokens: int | None = None, **options: Unpack[GenerateKeywords]
    ) -> Generator[Chunk, None, None]:
        """Yield a Chunk per token. The joined texts equal `Completion.text`.

        If `max_tokens` is None or -1, the text continues to a stop token or the end of the context. A prompt
        with images has llama-server's form: {"prompt_string": "<__media__> is a", "multimodal_data": [image]}
        (docs/vision.md).
        `GenerateKeywords` describes the other keywords. Streams that are read alternately are computed
        together. Closing a stream frees its slot.

        The arguments are checked at the call, before the first token. Raises InvalidArgument, and
        UnsupportedModel if the arguments need a tokenizer that the model lacks.
        """
        generation = self._generation(prompt, max_tokens, options)
        return stream(self._open_mailbox(), generation, self._tokenizer)

    @takes(GenerateKeywords, GenerateOptions)
    def astream(
        self, prompt: Prompt, max_tokens: int | None = None, **options: Unpack[GenerateKeywords]
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for asyncio: `async for chunk in llm.astream(...)`."""
        if isinstance(prompt, Mapping | MediaPrompt):
            return self._astream_images(prompt, max_tokens, options)
        generation = self._generation(prompt, max_tokens, options)
        # An engine in another process always computes ahead, so `eager` only saves messages.
        return astream(self._open_mailbox(), generation, self._tokenizer, eager=self._apart)

    async def _astream_images(
        self, prompt: Prompt, max_tokens: int | None, options: GenerateKeywords
    ) -> AsyncGenerator[Chunk, None]:
        """Encode images in a thread when the first chunk is requested."""
        generation = await asyncio.to_thread(self._generation, prompt, max_tokens, options)
        chunks = astream(self._open_mailbox(), generation, self._tokenizer, eager=self._apart)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    def generation(
        self, prompt: Prompt, max_tokens: int | None = None, **options: Unpack[GenerateKeywords]
    ) -> Generation:
        """Return the checked request of `stream`, for `stream_of` and `aresume`. Images are encoded."""
        return self._generation(prompt, max_tokens, options)

    def stream_of(self, generation: Generation) -> Generator[Chunk, None, None]:
        """Run a generation that `generation` returned, like `stream`."""
        return stream(self._open_mailbox(), generation, self._tokenizer)

    def aresume(self, generation: Generation, tokens: Sequence[int]) -> AsyncGenerator[Chunk, None]:
        """Run a generation that `generation` returned, or continue it after another engine of this model was
        lost.

        `tokens` are the lost engine's tokens. Their chunks are yielded again, without logprobs. With the same
        seed, the text is the same as without the loss, except with xtc and mirostat. Raises PromptTooLong if
        the context was shifted.
        """
        resumed = self._resumed(generation, tokens)
        return astream(self._open_mailbox(), resumed, self._tokenizer, eager=self._apart)

    def _resumed(self, generation: Generation, tokens: Sequence[int]) -> Generation:
        return self._maker.resumed(generation, tokens)

    def _generation(self, prompt: Prompt, max_tokens: int | None, options: GenerateKeywords) -> Generation:
        return self._maker.generation(prompt, max_tokens, options)

    def memory(self) -> list[dict[str, Any]]:
        """Return a dict per device, in order, and one for a projector. "device" is the name. These keys give
        bytes: "weights", "kv", "scratch", "staging", "free_before" (before loading) and "free" (now).
        "adapters" counts LoRA adapters, which "weights" or "host" count as well. "mapped" counts weights in
        the mapped file, whose pages the system may drop. "host" counts slices and caches on the host.
        "stream" is memory for weights that stay in the file. "shared" counts tables of all devices, for the
        first device. A device's free memory is None if unknown."""
        (event,) = self._ask(Memory).events()
        assert event.memory is not None
        return event.memory

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters. Current values count requests (waiting, running, decoding), slots,
        and KV cells (total, used, cached, and shared by several slots).

        If the model reads images, image_n, image_cache_n, image_ms and its parts are sums of all requests.
        Images that are kept take image_kept_nbytes of host memory.

        Values since the start count prompt tokens, cached prompt tokens (also as a share), preemptions, steps
        and all-reduces. Values of the last 256 steps are milliseconds (median, 99th percentile), rows, and
        host microseconds of an all-reduce.
        """
        (event,) = self._ask(Stats).events()
        assert event.stats is not None
        return event.stats if self.pictures is None else event.stats | self.pictures.stats()

    def _ask(self, make: Callable[[int], Request], *, eager: bool = True) -> Answers:
        return self._open_mailbox().ask(make, eager=eager)

    def _open_mailbox(self) -> Mailbox:
        self._check_open()
        assert self._mailbox is not None
        return self._mailbox

    @property
    def is_open(self) -> bool:
        """Return False if the engine is closed or lost."""
        try:
            self._check_open()
        except VkbackendError:
            return False
        return True

    def _check_open(self) -> None:
        assert self._mailbox is not None
        self._mailbox.check_open()

    def close(self) -> None:
        """Release devices and the engine's process. Running requests end with an error. `close` may be called
        again, also after an interrupt."""
        if self._mailbox is not None:
            self._mailbox.close()

    def __repr__(self) -> str:
        where = ", ".join(self.device_names)
        end = "" if self.is_open else ", closed"
        return f"<LLM {self.path!r} on {where}, n_ctx={self.n_ctx}, n_slots={self.n_slots}{end}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            if self._mailbox is not None:
                self._mailbox.end()
