"""The methods of `LLM` that embed, rank and classify texts. Texts share steps, and results keep the order of
the texts.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from vkbackend.checks import items, optional, refused, switch, whole, whole_number
from vkbackend.errors import InvalidArgument, PromptTooLong, UnsupportedModel
from vkbackend.models.active_adapters import ActiveAdapters
from vkbackend.models.arguments import adapter_scales, text_of, token_ids
from vkbackend.models.embeddings.heads import Classifier, Heads, probabilities
from vkbackend.models.embeddings.pairs import Text, pair_of
from vkbackend.models.embeddings.pooling import ROWS, Pooled, norm_of, normalised, pooling_of
from vkbackend.models.engine.answers import Answers, Mailbox
from vkbackend.models.engine.async_answers import AsyncAnswers
from vkbackend.models.engine.messages import Embed, Event, check_tokens
from vkbackend.models.text.tokenizer import Tokenizer

MAX_TEXTS = 1 << 20
EXPECTED = "expected a text, token ids, or a list of texts or of token ids"
T = TypeVar("T")

Lora = Mapping[str | int, float] | Sequence[tuple[str | int, float]] | None
OneText = str | Sequence[int]
Texts = OneText | Sequence[str] | Sequence[Sequence[int]]


class Ranked(NamedTuple):
    """A document's index in the request, and its relevance."""

    document: int
    score: float


@dataclass(frozen=True)
class Job(Generic[T]):
    """Checked texts, and a function from their pooled hidden states to the result."""

    texts: list[Text]
    pooling: str
    finish: Callable[[list[np.ndarray]], T]
    adapters: tuple[tuple[int, float], ...] = ()

    def message(self, text: Text) -> Callable[[int], Embed]:
        how: dict[str, Any] = {"second": text.second, "adapters": self.adapters}
        return lambda id_: Embed(id_, text.ids, ROWS[self.pooling], **how)

    @property
    def n_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)


class Embeddings(ABC):
    """`n_text` is the maximum number of tokens of a text. `heads` holds the file's data about embeddings."""

    n_slots: int
    n_vocab: int
    n_text: int
    heads: Heads
    is_encoder: bool
    _adapters: ActiveAdapters

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @abstractmethod
    def _open_mailbox(self) -> Mailbox: ...

    def embed(
        self,
        texts: Texts,
        *,
        pooling: str | None = None,
        normalize: int = 2,
        dimensions: int | None = None,
        truncate: bool = False,
        lora: Lora = None,
    ) -> Any:
        """Return a text's embedding, float32 [width], or for a list of texts float32 [n, width].

        A text is a str or its token ids. `pooling` is "mean", "cls" (the first token), "last", "rank" (the
        logits of the classification head) or "none" (an array [n_tokens, width] per text). None uses the
        file's pooling. `normalize` is 2 (Euclidean, default), -1 (none), 0 (largest magnitude 32,760), 1
        (taxicab) or p (p-norm). `dimensions` keeps the first values and then normalises; models trained with
        Matryoshka learning allow this. `truncate` truncates texts that are too long. `lora` sets the scales
        of LoRA adapters, as in `generate`.

        Raises InvalidArgument, PromptTooLong and device errors.
        """
        return self.run(self.embed_job(texts, pooling, normalize, dimensions, truncate, lora))

    async def aembed(
        self,
        texts: Texts,
        *,
        pooling: str | None = None,
        normalize: int = 2,
        dimensions: int | None = None,
        truncate: bool = False,
        lora: Lora = None,
    ) -> Any:
        """Run `embed` in asyncio. Cancelling the task cancels its texts."""
        arguments = texts, pooling, normalize, dimensions, truncate, lora
        return await self.arun(await asyncio.to_thread(self.embed_job, *arguments))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw: bool = False,
        truncate: bool = False,
    ) -> list[Ranked]:
        """Return (index, score) of the documents that are most relevant for the query, best first.

        A score is in 0..1: the sigmoid of the model's logit, or a generative reranker's probability of yes.
        If `raw`, it is the logit. `truncate` truncates documents that are too long.

        Raises UnsupportedModel if the file has no classification head, and the errors of `embed`.
        """
        return self.run(self.rerank_job(query, documents, top_n, raw, truncate))

    async def arerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw: bool = False,
        truncate: bool = False,
    ) -> list[Ranked]:
        """Run `rerank` in asyncio. Cancelling the task cancels its texts."""
        return await self.arun(
            await asyncio.to_thread(self.rerank_job, query, documents, top_n, raw, truncate)
        )

    def classify(self, texts: Texts, *, truncate: bool = False) -> Any:
        """Return a dict with a text's probability of each label, or a list of dicts for a list of texts.
        Raises UnsupportedModel if the file has no classification head, and the errors of `embed`."""
        return self.run(self.classify_job(texts, truncate))

    # ---- jobs ----

    def embed_job(
        self,
        texts: Texts,
        pooling: str | None = None,
        normalize: int = 2,
        dimensions: int | None = None,
        truncate: bool = False,
        lora: Lora = None,
        *,
        name: str = "texts",
    ) -> Job[Any]:
        """Check the arguments of `embed`, and tokenize. Error messages refer to the texts as `name`."""
        kind = self._pooling(pooling)
        norm, width = norm_of("normalize", normalize), self.heads.n_embd
        most = optional(whole(1, width, " (the embedding's length)"))("dimensions", dimensions)
        adapters = self._adapters.resolved(adapter_scales("lora", lora))
        prepared, is_list = self._texts(name, texts, switch("truncate", truncate))
        if kind == "rank":
            head = self._classifier()

            def logits(rows: list[np.ndarray]) -> Any:
                return _shaped([head.logits(row) for row in rows], is_list)

            return Job(prepared, head.pooling, logits, adapters)

        def finish(rows: list[np.ndarray]) -> Any:
            vectors = [normalised(self.heads.embedding(row)[..., :most], norm) for row in rows]
            if kind == "none":
                return vectors if is_list else vectors[0]
            return _shaped(vectors, is_list)

        return Job(prepared, kind, finish, adapters)

    def rerank_job(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        raw: bool = False,
        truncate: bool = False,
    ) -> Job[list[Ranked]]:
        """Check the arguments of `rerank`, tokenize, and return the job."""
        head, raw, cut = self._classifier(), switch("raw", raw), switch("truncate", truncate)
        most = optional(whole(1, MAX_TEXTS))("top_n", top_n)
        if isinstance(documents, str):
            raise refused("documents", documents, "expected a list of texts")
        given = items("documents", documents, "expected a list of texts")
        _check_count("documents", len(given))
        asked = _non_empty("query", text_of("query", query))
        texts = []
        for i, document in enumerate(given):
            name = f"documents[{i}]"
            text = pair_of(
                self.tokenizer,
                asked,
                _non_empty(name, text_of(name, document)),
                self.heads.rerank_template,
                self.n_text if cut else None,
            )
            self._check(name, text.ids)
            texts.append(text)

        def finish(rows: list[np.ndarray]) -> list[Ranked]:
            scores = [head.score(head.logits(row), raw=raw) for row in rows]
            order = sorted(range(len(scores)), key=lambda i: -scores[i])
            return [Ranked(i, scores[i]) for i in order[:most]]

        return Job(texts, head.pooling, finish, self._adapters.resolved(None))

    def classify_job(self, texts: Texts, truncate: bool = False) -> Job[Any]:
        """Check the arguments of `classify`, tokenize, and return the job."""
        head = self._classifier()
        prepared, is_list = self._texts("texts", texts, switch("truncate", truncate))

        def finish(rows: list[np.ndarray]) -> Any:
            scores = [
                dict(zip(head.labels, probabilities(head.logits(row)).tolist(), strict=True)) for row in rows
            ]
            return scores if is_list else scores[0]

        return Job(prepared, head.pooling, finish, self._adapters.resolved(None))

    def run(self, job: Job[T]) -> T:
        """Compute a job. While one text's rows are read, the next texts run."""
        mailbox, ahead = self._open_mailbox(), 4 * self.n_slots
        left, posted, done = iter(job.texts), deque[Answers](), list[np.ndarray]()
        try:
            while len(done) < len(job.texts):
                while len(posted) <= ahead and (text := next(left, None)) is not None:
                    posted.append(mailbox.ask(job.message(text), eager=True))
                answers, pooled = posted.popleft(), Pooled(job.pooling)
                try:
                    for event in answers.events():
                        pooled.push(event)
                finally:
                    answers.close()
                done.append(pooled.result())
        finally:
            for answers in posted:
                answers.close()
        return job.finish(done)

    async def arun(self, job: Job[T]) -> T:
        """Compute a job in asyncio. If a text fails or the caller is cancelled, the others are cancelled."""
        mailbox, room = self._open_mailbox(), asyncio.Semaphore(1 + 4 * self.n_slots)

        async def one(text: Text) -> np.ndarray:
            async with room:
                answers, pooled = (
                    AsyncAnswers(mailbox, job.message(text), eager=True),
                    Pooled(job.pooling),
                )
                try:
                    async for event in answers:
                        assert isinstance(event, Event)
                        pooled.push(event)
                finally:
                    answers.close()
                return pooled.result()

        tasks = [asyncio.ensure_future(one(text)) for text in job.texts]
        try:
            return job.finish(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    # ---- checks ----

    def _pooling(self, given: str | None) -> str:
        kind = self.heads.pooling if given is None else pooling_of("pooling", given)
        if kind is None:
            raise InvalidArgument(
                "the file names no pooling; choose one: pooling (--pooling) mean, cls, last, rank or none",
                argument="pooling",
            )
        return kind

    def _classifier(self) -> Classifier:
        if self.heads.is_listwise:
            raise UnsupportedModel(
                "jina-reranker-v3 ranks all documents in one prompt, which is not supported; use a reranker "
                "with a classification head, such as jina-reranker-v2 or Qwen3-Reranker"
            )
        if (head := self.heads.classifier) is None:
            raise UnsupportedModel(
                "the file has no classification head (cls.output.weight), so it cannot rank or classify; "
                "convert the model again, or compare its embeddings (embed)"
            )
        return head

    def _texts(self, name: str, texts: Texts, truncate: bool) -> tuple[list[Text], bool]:
        """Return the tokens of each text, and whether the texts are a list."""
        is_list = not isinstance(texts, str)
        if is_list:
            given = items(name, texts, EXPECTED)
            is_list = not given or isinstance(given[0], str | list | tuple | np.ndarray)
        if not is_list:
            return [Text(self._ids(name, texts, truncate))], False
        _check_count(name, len(given))
        return [Text(self._ids(f"{name}[{i}]", text, truncate)) for i, text in enumerate(given)], True

    def _ids(self, name: str, text: Any, truncate: bool) -> tuple[int, ...]:
        closes = False
        if isinstance(text, str):
            tokenizer = self.tokenizer
            ids = tuple(tokenizer.encode(_non_empty(name, text), parse_special=True))
            closes = tokenizer.add_eos
        else:
            ids = token_ids(name, text, EXPECTED)
        if truncate and len(ids) > self.n_text:
            # the last token closes the text, so it remains
            ids = (*ids[: self.n_text - closes], *ids[len(ids) - closes :])
        self._check(name, ids)
        return ids

    def _check(self, name: str, ids: tuple[int, ...]) -> None:
        if not ids:
            raise InvalidArgument(f"{name} has no tokens; give at least one", argument=name)
        if len(ids) > self.n_text:
            raise PromptTooLong(
                f"{name} has {len(ids)} tokens, at most {self.n_text} fit; shorten it, set truncate, or open "
                "the model with a larger context (-c)",
                argument=name,
                n_tokens=len(ids),
                n_ctx=self.n_text,
            )
        check_tokens(ids, self.n_vocab, self.n_text)


def _shaped(vectors: list[np.ndarray], is_list: bool) -> np.ndarray:
    rows = np.stack(vectors).astype(np.float32)
    return rows if is_list else rows[0]


def _non_empty(name: str, text: str) -> str:
    if not text:
        raise InvalidArgument(f"{name} is empty; give a text of at least one character", argument=name)
    return text


def _check_count(name: str, n: int) -> None:
    if not n:
        raise InvalidArgument(f"{name} is an empty list; give at least one text", argument=name)
    whole_number(f"the number of {name}", n, 1, MAX_TEXTS)
