from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request

from vkbackend.checks import whole_number
from vkbackend.errors import DeviceLost, InvalidArgument, Timeout, VkbackendError
from vkbackend.models.llm import LLM
from vkbackend.tools.server.adapter_fields import adapter_options
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.front import Config, Front
from vkbackend.tools.server.generations import J, Job, Piece, Tally, merged, raw_chunk
from vkbackend.tools.server.limits import Admission
from vkbackend.tools.server.model import Model, State
from vkbackend.tools.server.sampling import sampling_of

T = TypeVar("T")
# How often an answer continues after a loss of its engine: in total, and at the same token.
MOST_RESUMES, MOST_STUCK = 8, 2


class Service(Front):
    """Serves one model."""

    def __init__(self, config: Config, model: Model) -> None:
        super().__init__(config)
        self.model = model
        self.admission = Admission(config.limits, n_slots=1)
        self.running: dict[int, Tally] = {}  # by slot, for /slots

    @property
    def n_running(self) -> int:
        return len(self.running)

    async def run(self) -> None:
        await self.model.run()

    def close(self) -> None:
        self.model.close()

    # ---- a request ----

    def ready(self) -> LLM:
        """Raises Refusal (503) if the model is not ready."""
        llm = self.model.llm
        self.admission.n_slots = llm.n_slots
        return llm

    def sampling(self, fields: Fields, llm: LLM) -> dict[str, Any]:
        def tokenize(text: str) -> list[int]:
            return llm.tokenize(text, add_special=False)

        names = self.config.alias, *self.config.other_names
        options = sampling_of(fields, self.config.defaults, self.config.limits, tokenize)
        return options | adapter_options(fields, llm, names)

    def max_tokens(self, fields: Fields, *names: str) -> int | None:
        """Return the limit from the first of `names` in the request, or the server's limit. None, or -1 in
        the request, means that only the context limits the answer."""
        limits = [fields.whole(name, -1, (1 << 31) - 1, None) for name in names]
        most = next((limit for limit in limits if limit is not None), None)
        if most is None:
            return self.config.max_tokens
        return None if most == -1 else most

    def n_of(self, fields: Fields, name: str, llm: LLM) -> int:
        if not fields.has(name):
            return 1
        hint = " (as many as there are slots, --parallel)"
        return whole_number(fields.name(name), fields.get(name), 1, llm.n_slots, hint)

    # ---- generations ----

    async def generate(
        self, request: Request, llm: LLM, jobs: Sequence[J], *, streamed: bool
    ) -> AsyncGenerator[tuple[J, Any, Tally], None]:
        """Yield the chunks of all jobs as they arrive. Raises Refusal (429) and the engine's errors."""
        tallies = {
            id(job): Tally(len(job.ids), options=job.options, max_tokens=job.max_tokens) for job in jobs
        }
        began = time.monotonic()
        with self.admission.enter(len(jobs), streams=streamed):
            try:
                if len(jobs) == 1:
                    (job,), (tally,) = jobs, tallies.values()
                    async with aclosing(self._pieces(job, llm)) as pieces:
                        async for piece in pieces:
                            self._add(tally, piece, began)
                            yield job, piece, tally
                    return
                async with aclosing(merged(lambda job: self._pieces(job, llm), jobs)) as chunks:
                    async for job, piece in chunks:
                        self._add(tally := tallies[id(job)], piece, began)
                        yield job, piece, tally
            except VkbackendError as error:
                if type(error) is VkbackendError and llm.is_open:
                    raise Refusal(400, str(error)) from None  # no token is allowed
                raise
            finally:
                self._count(tallies.values(), time.monotonic() - began)
                request.state.tokens = (
                    sum(t.prompt_n for t in tallies.values()),
                    sum(t.n_tokens for t in tallies.values()),
                )

    async def retried(self, llm: LLM, compute: Callable[[LLM], Awaitable[T]]) -> T:
        try:
            return await compute(llm)
        except VkbackendError as error:
            if not self._is_lost(error, llm):
                raise
        return await compute(await self.model.reopened(llm))

    def _is_lost(self, error: VkbackendError, llm: LLM) -> bool:
        """Return whether an error means that the model must be opened again. If so, begin to open it."""
        self.model.failed(error, llm)
        return isinstance(error, DeviceLost | Timeout) or not llm.is_open

    async def _pieces(self, job: Job, llm: LLM) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of a job. If the engine is lost, wait until the model has been opened again, and
        continue after the last token."""
        tokens: list[int] = []
        n_heads = n_before = n_resumed = n_stuck = 0
        pieces = job.start(llm)
        while True:
            repeats, heads = len(tokens), n_heads
            try:
                async with aclosing(pieces):
                    async for piece in pieces:
                        chunk = raw_chunk(piece)
                        if repeats or (heads and chunk.token is None):
                            is_head = chunk.token is None and chunk.progress is None
                            repeats, heads = repeats - (chunk.token is not None), heads - is_head
                            continue
                        if chunk.token is not None:
                            tokens.append(chunk.token)
                        n_heads += chunk.token is None and chunk.progress is None
                        yield piece
                return
            except VkbackendError as error:
                is_lost = self._is_lost(error, llm)
                # A request that crashes every engine must not interrupt other requests forever.
                n_stuck = n_stuck + 1 if n_resumed and len(tokens) == n_before else 0
                if not is_lost or n_stuck == MOST_STUCK or n_resumed == MOST_RESUMES:
                    raise
                lost = error
            n_resumed, n_before = n_resumed + 1, len(tokens)
            llm = await self.model.reopened(llm)
            try:
                pieces = job.resume(llm, tokens)
            except InvalidArgument:  # The context was shifted.
                raise lost from None

    def _add(self, tally: Tally, piece: Piece, began: float) -> None:
        tally.add(piece)
        if tally.n_tokens and not tally.is_known:
            tally.is_known = True
            self.metrics.first_token.add(time.monotonic() - began)
            self.running[tally.slot] = tally
        if tally.finish_reason:
            self._forget(tally)

    def _forget(self, tally: Tally) -> None:
        if self.running.get(tally.slot) is tally:
            del self.running[tally.slot]

    def _count(self, tallies: Any, took_s: float) -> None:
        metrics = self.metrics
        self.admission.took(took_s)
        metrics.whole_request.add(took_s)
        metrics.cancelled += any(tally.finish_reason is None for tally in tallies)
        for tally in tallies:
            self._forget(tally)
            metrics.prompt_tokens += tally.prompt_n
            metrics.cached_tokens += tally.cached_n
            metrics.prompt_s += tally.timings.get("prompt_ms", 0.0) / 1e3
            metrics.tokens += tally.n_tokens
            metrics.decode_s += tally.timings.get("decode_ms", 0.0) / 1e3
            metrics.longest = max(metrics.longest, tally.prompt_n + tally.n_tokens)

    # ---- errors ----

    def refusal(self, error: BaseException) -> BaseException:
        """Return the response for an error, or 503 after the model has been closed."""
        refusal = super().refusal(error)
        is_closed = self.model.state is State.ENDED
        return self.model.not_ready() if getattr(refusal, "status", 0) == 503 and is_closed else refusal
