"""A request's chain of samplers and its state, with llama.cpp's order and meaning. A request computes in
float64 on the host with its own random numbers, so other requests of a batch never change its output."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from vkbackend.errors import VkbackendError
from vkbackend.models.grammar.compiler import Matcher
from vkbackend.models.sampling import filters
from vkbackend.models.sampling.candidates import Candidates, best
from vkbackend.models.sampling.logprobs import Logprobs, logprobs_of, logprobs_of_best, logprobs_of_candidates
from vkbackend.models.sampling.mirostat import Mirostat
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.sampling.penalties import dry_penalties, penalize, recent, subtract
from vkbackend.ops import MAX_VEC_ROWS

History = Sequence[int]
Step = Callable[[Candidates, History], None]


class Sampler:
    """The sampling state of one request, with random numbers from PCG64(seed).

    A `plain` sampler is greedy, or has only top-k, top-p, min-p and temperature in this order. `choose_rows`
    chooses many plain rows at once if no candidate is `forbidden`.
    """

    def __init__(self, params: SamplingParams, constrained: bool = False) -> None:
        self.params = params
        self.matcher: Matcher | None = None
        self.random = np.random.Generator(np.random.PCG64(params.seed))
        self.logprobs: Logprobs | None = None
        self._n_chosen = 0
        self._dried: dict[tuple[int, ...], dict[int, float]] = {}  # DRY's penalties, for a few histories.
        self._mirostat = Mirostat(params.mirostat, params.mirostat_tau, params.mirostat_eta)
        self._bias = {token: -bias for token, bias in params.logit_bias}
        self._early = {token: math.inf for token in params.stop_token_ids} if params.min_tokens else {}
        self._breakers: dict[int, list[tuple[int, ...]]] = {}
        for breaker in params.dry_sequence_breakers if params.dry else ():
            assert not isinstance(breaker, str), "`ModelTokens` replaces texts by tokens"
            self._breakers.setdefault(breaker[0], []).append(breaker[1:])
        self._names = params.chain
        self._chain = [self._step(name) for name in self._names]
        self.greedy = params.greedy
        self.forbidden = frozenset(token for token, loss in self._bias.items() if loss == math.inf)
        filtered = "top_k", "top_p" * (params.top_p < 1), "min_p" * (params.min_p > 0), "temperature"
        plain = ("temperature",) if self.greedy else tuple(filter(None, filtered))
        moved = params.mirostat or params.dynatemp_range or params.min_tokens
        moved = moved or constrained or params.logprobs is not None or params.min_keep > 1
        self.plain = self._names == plain and not moved and len(self.forbidden) == len(self._bias)
        least = math.log(params.min_p) if params.min_p else -math.inf
        self.values = params.temperature, params.top_p, least, params.top_k
        self._n_decisive, self._n_candidates = params.n_decisive, params.n_candidates
        self._n_shown = params.logprobs or 0
        self._reports_candidates = params.logprobs is not None and params.post_sampling_probs
        self._reports_model = params.logprobs is not None and not params.post_sampling_probs
        if constrained and params.logprobs is not None:
            # Complete rows are needed, because logprobs list the best of all tokens. Candidates are only the
            # tokens that the grammar allows.
            self._n_decisive = self._n_candidates = 0
        self.ranked = self.plain and not self.forbidden and self._n_candidates > 0
        self._varies = self._n_decisive > 0 and bool({"penalties", "dry"} & set(self._names))

    def resume(self, n: int) -> None:
        """Continue after the `n` tokens that another sampler with the same parameters has chosen. The random
        numbers are then the same, except with xtc and mirostat, which depend on the logits of all tokens."""
        self._n_chosen = n
        if not self.greedy:
            self.random.random(n)  # One number per token.

    def n_candidates(self, history: History, draft: History = ()) -> int:
        """Return the number of candidates to request, including lowered tokens, or 0 for the complete row.
        With a draft, the number is enough for every row of the draft."""
        n = self._n_candidates
        if self._varies:
            ends = [[*history, *draft[:k]] for k in range(1, len(draft) + 1)] if draft else []
            n = self._n_decisive + max(len(self._lowered(end)) for end in (history, *ends))
        return n and max(n, self._n_shown)

    def sample(self, logits: np.ndarray, history: History) -> int:
        """Return the next token for float32 `logits` [n_vocab]. `history` lists the tokens so far, oldest
        first.

        Raises VkbackendError if a logit is NaN or +inf, or if all logits are -inf.
        """
        if self.ranked:
            peak = int(logits.argmax())
            check_finite(float(logits[peak]))
            if self.greedy:
                return peak
            ids = best(logits, min(self._n_candidates, len(logits)))
            return self._choose_plain(ids, logits[ids])
        scores = self._processed(logits, history).astype(np.float64)
        check_finite(float(scores.max()))
        candidates = Candidates.of_row(scores)
        if self.matcher:
            candidates.keep(self.matcher.allowed(len(scores)))
        token = self._choose(candidates, history)
        if self._reports_model:
            assert self.params.logprobs is not None
            self.logprobs = logprobs_of(logits, token, self.params.logprobs)
        return token

    def choose(
        self, ids: np.ndarray, logits: np.ndarray, history: History = (), log_sum: float = math.nan
    ) -> int:
        """Like `sample`, but choose from at least `n_candidates` of the best allowed tokens. `ids` [n] and
        float32 `logits` [n] are sorted, best first. `log_sum` is log(sum(exp(logits))) of all tokens.
        """
        if self.matcher:  # the logits of tokens that are not allowed are -inf
            n = int(np.count_nonzero(logits != -np.inf))
            if not n:
                raise self.matcher.stuck()
            ids, logits = ids[:n], logits[:n]
        check_finite(float(logits[0]))
        if self.plain and not self.forbidden:
            return int(ids[0]) if self.greedy else self._choose_plain(ids, logits)
        token = self._choose(Candidates(ids, logits.astype(np.float64), ordered=True), history)
        if self._reports_model:
            assert self.params.logprobs is not None
            self.logprobs = logprobs_of_best(ids, logits, log_sum, token, self.params.logprobs)
        return token

    def _choose_plain(self, ids: np.ndarray, logits: np.ndarray) -> int:
        """Choose like `_choose`, in two thirds of its time. Each filter keeps the first few candidates."""
        t, top_p, least, top_k = self.values
        below = logits[:top_k].astype(np.float64)
        below -= float(below[0])
        n = int(np.count_nonzero(below >= least))
        if top_p < 1:
            total = np.exp(below).cumsum()
            n = min(n, int(total.searchsorted(top_p * total[-1])) + 1)
        total = np.exp(below[:n] / t).cumsum()
        place = int(total.searchsorted(self.random.random() * total[-1], side="right"))
        return int(ids[min(place, n - 1)])

    def _choose(self, c: Candidates, history: History) -> int:
        if self._bias or self._early:
            subtract(c, self._bias | self._forbidden())
            if c.scores.max() == -np.inf:
                raise VkbackendError("logit_bias, ignore_eos and min_tokens forbid every token; allow one")
        for step in self._chain:
            step(c, history)
        self._n_chosen += 1
        token = self._drawn(c)
        if self._reports_candidates:
            self.logprobs = logprobs_of_candidates(c, token, self._n_shown)
        if self.matcher:
            self.matcher.take(token)
        return token

    def _drawn(self, c: Candidates) -> int:
        if self.greedy:
            return int(c.ids[0])
        if self.params.mirostat:
            return self._mirostat.draw(c, self.random)
        total = c.weights().cumsum()
        place = int(total.searchsorted(self.random.random() * total[-1], side="right"))
        return int(c.ids[min(place, len(c) - 1)])

    def _processed(self, logits: np.ndarray, history: History) -> np.ndarray:
        for number, process in enumerate(self.params.logits_processors):
            try:
                result = np.asarray(process(list(history), logits.copy()), np.float32)
            except Exception as error:
                raise VkbackendError(f"logits_processors[{number}] failed: {error!r}") from error
            if result.shape != logits.shape:
                raise VkbackendError(
                    f"logits_processors[{number}] returned an array of shape {result.shape}; return logits "
                    f"of shape {logits.shape}"
                )
            logits = result
        return logits

    def _forbidden(self) -> dict[int, float]:
        return self._early if self._n_chosen < self.params.min_tokens else {}

    def _dry(self, history: History) -> dict[int, float]:
        """DRY's penalties are cached, because they take 130 us for a text of 4,000 tokens. Histories of one
        length differ at most in a draft's tokens."""
        key = len(history), *history[-MAX_VEC_ROWS:]
        if key not in self._dried:
            if len(self._dried) >= 2 * MAX_VEC_ROWS:
                self._dried.clear()
            p = self.params
            window = recent(history, p.dry_penalty_last_n)
            values = p.dry_multiplier, p.dry_base, p.dry_allowed_length
            self._dried[key] = dry_penalties(window, *values, self._breakers)
        return self._dried[key]

    def _lowered(self, history: History) -> set[int]:
        p, lowered = self.params, {*self._bias, *self._forbidden()}
        if "penalties" in self._names:
            lowered.update(recent(history, p.repeat_last_n))
        if "dry" in self._names:
            lowered.update(self._dry(history))
        return lowered

    def _step(self, name: str) -> Step:
        p = self.params
        steps: dict[str, Step] = {
            "penalties": lambda c, history: penalize(
                c, recent(history, p.repeat_last_n), p.repeat_penalty, p.frequency_penalty, p.presence_penalty
            ),
            "dry": lambda c, history: subtract(c, self._dry(history)),
            "top_n_sigma": lambda c, _: filters.top_n_sigma(c, p.top_n_sigma),
            "top_k": lambda c, _: filters.top_k(c, p.top_k),
            "typ_p": lambda c, _: filters.typical(c, p.typical_p, p.min_keep),
            "top_p": lambda c, _: filters.top_p(c, p.top_p, p.min_keep),
            "min_p": lambda c, _: filters.min_p(c, p.min_p, p.min_keep),
            "xtc": lambda c, _: filters.xtc(c, p.xtc_probability, p.xtc_threshold, self.random, p.min_keep),
            "temperature": lambda c, _: filters.temperature(c, p.temperature),
        }
        if p.dynatemp_range and not p.mirostat:
            steps["temperature"] = lambda c, _: filters.dynamic_temperature(
                c, p.temperature, p.dynatemp_range, p.dynatemp_exponent
            )
        return steps[name]


def check_finite(peak: float) -> None:
    if not math.isfinite(peak):
        raise VkbackendError(
            f"the largest logit is {peak}, so no token can be chosen: the weights are damaged or a device "
            "computed wrongly; try another file, or one device at a time"
        )
