"""Checks the arguments of `LLM.generate` and `LLM.stream`, and creates a `Generation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from vkbackend.checks import refused
from vkbackend.errors import UnsupportedModel
from vkbackend.models.active_adapters import ActiveAdapters
from vkbackend.models.arguments import (
    ONLY_EMBEDS,
    continuation_count,
    slot_number,
    text_of,
    token_ids,
    token_limit,
)
from vkbackend.models.engine.answers import Mailbox
from vkbackend.models.engine.cache.image_spans import Span, check_images, with_row_ids, without_images
from vkbackend.models.engine.messages import SetVocabulary, check_tokens
from vkbackend.models.generate_options import GenerateKeywords, GenerateOptions
from vkbackend.models.generation import Batch, Generation, are_prompts
from vkbackend.models.model_tokens import ModelTokens, vocabulary_of
from vkbackend.models.pictures import ImageTimes, MediaPrompt, Pictures
from vkbackend.models.prompt_pieces import read_media_prompt
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.models.vision.rows import ImageRows

PROMPT = "expected a text or a sequence of token ids"
# A mapping has the keys `prompt_string` and `multimodal_data` (prompt_pieces.py).
Prompt = str | Sequence[int | ImageRows] | MediaPrompt | Mapping[str, Any]
Prompts = list[str] | list[list[int]] | list[Mapping[str, Any]]


class GenerationMaker:
    """Makes generations for the engine of `mailbox`. `n_keep` is the option's default. `apart` is True if the
    engine runs in another process. `no_tokenizer` says why `tokens` has no tokenizer. `pictures` is None if
    the model reads only text."""

    def __init__(
        self,
        mailbox: Mailbox,
        tokens: ModelTokens,
        adapters: ActiveAdapters,
        n_keep: int,
        apart: bool,
        no_tokenizer: str,
        pictures: Pictures | None = None,
    ) -> None:
        self.pictures = pictures
        self._mailbox, self._tokens, self._info = mailbox, tokens, mailbox.info
        self._adapters = adapters
        self._n_keep, self._apart, self._no_tokenizer = n_keep, apart, no_tokenizer
        self._engine_has_vocabulary, self._sending = False, Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, also after the engine is closed or lost. Raises UnsupportedModel without a usable
        tokenizer."""
        if self._tokens.tokenizer is None:
            raise UnsupportedModel(self._no_tokenizer)
        return self._tokens.tokenizer

    def batch(
        self, prompt: Prompt | Prompts, max_tokens: int | None, n: int | None, options: GenerateKeywords
    ) -> Batch:
        several = continuation_count("n", n)
        is_list = not isinstance(prompt, str) and are_prompts(prompt)
        prompts: Sequence[Prompt] = prompt if is_list else [prompt]  # type: ignore[assignment,list-item]
        if len(prompts) * (several or 1) > 1 and options.get("slot") is not None:
            raise refused("slot", options["slot"], "one slot has room for one text; leave it out")
        first = [self.generation(item, max_tokens, options) for item in prompts]
        generations = [copy for generation in first for copy in generation.several(several or 1)]
        return Batch(generations, is_list, several)

    def generation(self, prompt: Prompt, max_tokens: int | None, options: GenerateKeywords) -> Generation:
        most, checked = token_limit("max_tokens", max_tokens), GenerateOptions.of(**options)
        if checked.stop:
            _ = self.tokenizer  # raises without a tokenizer
        if checked.slot is not None:
            checked = replace(checked, slot=slot_number("slot", checked.slot, self._info.n_slots))
        if self._apart and checked.logits_processors:
            expected = "the engine has a process of its own; open the model with process=False"
            raise refused("logits_processors", list(checked.logits_processors), expected)
        checked = self._tokens.resolved(checked, self._info.n_vocab)
        if checked.structure:
            self._send_vocabulary()
        times = ImageTimes()
        if isinstance(prompt, Mapping):
            prompt = read_media_prompt(self.tokenizer, self.pictures, prompt, checked.parse_special)
        if isinstance(prompt, MediaPrompt):
            times, prompt = prompt.times, self._encoded(prompt)
        if isinstance(prompt, list | tuple) and any(isinstance(piece, ImageRows) for piece in prompt):
            ids, images = self._ids_with_images(prompt)
            if checked.prompt_logprobs is not None:
                raise refused("prompt_logprobs", checked.prompt_logprobs, "rows of images have none")
        else:
            ids, images = self.ids_of(prompt, checked.parse_special), ()  # type: ignore[arg-type]
        echo = ""
        if checked.echo:
            text = without_images(ids)
            echo = prompt if isinstance(prompt, str) else self.tokenizer.decode(text, skip_special=False)
        kept, adapters = self._kept(checked, len(ids)), self._adapters.resolved(checked.lora)
        stop_ids = frozenset(checked.stop_token_ids)
        return Generation(ids, most, kept, stop_ids, echo, adapters=adapters, images=images,
                          image_times=times.report())  # fmt: skip

    def _encoded(self, prompt: MediaPrompt) -> list[int | ImageRows]:
        """Return the prompt with the rows of its images. Its length is checked before images are encoded."""
        assert self.pictures is not None
        check_tokens([0] * len(prompt), self._info.n_vocab, self._info.n_ctx)
        pieces: list[int | ImageRows] = []
        for piece in prompt.pieces:
            if isinstance(piece, int):
                pieces.append(piece)
            else:
                pieces.append(self.pictures.rows(piece.image, prompt.times)[piece.tile])
        self.pictures.count(prompt.times)
        return pieces

    def _ids_with_images(self, prompt: Sequence[int | ImageRows]) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        self._mailbox.check_open()
        if self._info.encodes:
            raise UnsupportedModel(ONLY_EMBEDS)
        text = iter(token_ids("prompt", [p for p in prompt if not isinstance(p, ImageRows)], PROMPT))
        ids, images = with_row_ids([p if isinstance(p, ImageRows) else next(text) for p in prompt])
        check_tokens(ids, self._info.n_vocab, self._info.n_ctx, images)
        n_free = self._info.n_ubatch - self._info.n_slots + 1
        check_images(ids, images, self._info.image_width, n_free)
        return ids, images

    def resumed(self, generation: Generation, tokens: Sequence[int]) -> Generation:
        """Return a generation that continues after `tokens`, which a lost engine generated. Raises
        PromptTooLong if the context was shifted."""
        ids = *generation.ids, *tokens
        check_tokens(ids, self._info.n_vocab, self._info.n_ctx, generation.images)
        if generation.options.structure:
            self._send_vocabulary()
        return replace(generation, resumed=tuple(tokens))

    def ids_of(self, prompt: str | Sequence[int], parse_special: bool = False) -> tuple[int, ...]:
        self._mailbox.check_open()
        if self._info.encodes:
            raise UnsupportedModel(ONLY_EMBEDS)
        is_text = isinstance(prompt, str)
        given = self.tokenizer.encode(text_of("text", prompt), True, parse_special) if is_text else prompt
        ids = token_ids("prompt", given, PROMPT)
        check_tokens(ids, self._info.n_vocab, self._info.n_ctx)
        return ids

    def _kept(self, options: GenerateOptions, n_prompt: int) -> GenerateOptions:
        """Set how many tokens a context shift keeps. As in llama.cpp, BOS is kept in addition."""
        n_keep = self._n_keep if options.n_keep is None else options.n_keep
        has_bos = self._tokens.tokenizer is not None and self._tokens.tokenizer.add_bos
        return replace(options, n_keep=(n_prompt if n_keep < 0 else n_keep) + has_bos)

    def _send_vocabulary(self) -> None:
        """Send the vocabulary before the first grammar. Raises UnsupportedModel."""
        with self._sending:
            if not self._engine_has_vocabulary:
                vocabulary = vocabulary_of(self.tokenizer)
                list(self._mailbox.ask(lambda id_: SetVocabulary(id_, vocabulary), eager=True))
                self._engine_has_vocabulary = True
