"""Measures drafts against plain decoding, in turns: edits, a draft model, and a text that cannot be guessed.

    python -m vkbackend.tools.studies.speculation -dev 0,0 --only random

No small model can edit, so a logits processor forces the tokens of the edits and of the random text. Steps,
drafts and choices are real. The prompt of an edit is a file before a commit of this checkout, and its answer
is the file after the commit. "always" verifies all drafts, and "chosen" only tokens that save time. If other
programs run, software devices' CPU time is steadier than wall time. Two equal models differ in speed by up to
10 %. So with --one-model, all ways of decoding use the same model and alternate after each text. The first
table counts n-gram drafts for additional edits, without running a model.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vkbackend.meta.recorded_steps import Step
from vkbackend.meta.step_kind import Wanted
from vkbackend.models.common_prefix import n_common
from vkbackend.models.draft_options import MAX_DRAFT
from vkbackend.models.drafting.acceptance import Acceptance
from vkbackend.models.drafting.drafter import Want
from vkbackend.models.drafting.ngram import LENGTHS, Ngrams
from vkbackend.models.drafting.prices import StepPrices
from vkbackend.models.engine.budget import PrefillBudget
from vkbackend.models.engine.drafters import drafters_of, limits_of, open_draft
from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate, News
from vkbackend.models.engine.runner.micro_batch import MicroBatch, StepHandle
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.engine.speculation import Speculation
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.sampling.params import SamplingParams
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.tools.console import console, table
from vkbackend.wire import wire_words

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
TARGET, DRAFT = DATA / "stories-w256-F16.gguf", DATA / "stories-narrow-F16.gguf"
N_COUNTED, N_EDITS, N_COMMITS = 40, 3, 400
LEAST, MOST = 1000, 1800  # number of tokens of an edited file
N_TOKENS = 300  # of the other cases
TURN = 16  # tokens
FEW = range(3, 6)  # tokens of a text that repeats itself


class Free(StepPrices):
    """Every step takes a second, so drafts are as long as possible and no step depends on the clock."""

    def seconds(self, n_rows: int, hopeful: bool = False) -> float:
        return 1.0

    def least(self, n_rows: int) -> float:
        return 1.0

    def is_measured(self, n_rows: int) -> bool:
        return True

    def is_sure(self, n_rows: int) -> bool:
        return True


class Trusted(Acceptance):
    """Every draft is verified completely."""

    def rate(self, source: str) -> float:
        return 1.0

    def limit(self, source: str) -> int:
        return MAX_DRAFT


PRICES: dict[str, type[StepPrices]] = {"always": Free, "chosen": StepPrices}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    options: Options
    texts: Sequence[tuple[list[int], list[int]]]  # prompts, and the answers to force, if any


def forced(prompt: Sequence[int], answer: Sequence[int]) -> SamplingParams:
    def process(history: list[int], logits: np.ndarray) -> np.ndarray:
        logits[answer[len(history) - len(prompt)]] = 1e4
        return logits

    return SamplingParams(temperature=0, logits_processors=(process,))


@dataclass(slots=True)
class Outcome:
    seconds: float = 0.0
    cpu_s: float = 0.0  # CPU time of all threads, including threads of software devices
    tokens: list[int] = field(default_factory=list)
    n_steps: int = 0
    n_reduces: int = 0
    nbytes: int = 0  # bytes that devices write to shared pages
    n_drafts: int = 0  # number of verified drafts, one per step and sequence
    n_draft_rows: int = 0  # of the draft model

    def add(self, other: Outcome) -> None:
        self.seconds += other.seconds
        self.cpu_s += other.cpu_s
        self.tokens += other.tokens
        self.n_steps += other.n_steps
        self.n_reduces += other.n_reduces
        self.nbytes += other.nbytes
        self.n_drafts += other.n_drafts
        self.n_draft_rows += other.n_draft_rows


def nbytes_of(step: Step) -> int:
    return sum(4 * wire_words(r.wire, r.elements) * len(r.writers) for r in step.reduces if r)


def count_rows(draft: Runner, outcome: Outcome) -> None:
    launch = type(draft).launch

    def counted(batch: MicroBatch, wanted: Wanted) -> StepHandle:
        outcome.n_draft_rows += len(batch.tokens)
        return launch(draft, batch, wanted)

    draft.launch = counted  # type: ignore[method-assign]


def turns(case: Case, runner: Runner, speculation: Speculation | None, outcome: Outcome) -> Iterator[None]:
    """Count from the first token on, and yield after every TURN tokens. The engine learns, so all texts use
    the same engine."""
    engine = Engine(runner, PrefillBudget(), speculation)
    run_step = runner.mesh.run

    def count_and_run(step: Step) -> None:
        outcome.nbytes += nbytes_of(step)
        run_step(step)

    for number, (prompt, answer) in enumerate(case.texts):
        params = forced(prompt, answer) if answer else SamplingParams(temperature=0)
        engine.submit(Generate(number, tuple(prompt), len(answer) or N_TOKENS, params, uses_cache=False))
        while not any(_tokens(engine.step())):  # the first token ends the prompt
            pass
        runner.mesh.run = count_and_run  # type: ignore[method-assign]
        counts = engine.stats()["n_steps"], runner.reduce_stats()[0]
        while engine.busy:
            yield
            end = len(outcome.tokens) + TURN
            began = time.perf_counter(), time.process_time()
            while engine.busy and len(outcome.tokens) < end:
                outcome.tokens += _tokens(engine.step())
            outcome.seconds += time.perf_counter() - began[0]
            outcome.cpu_s += time.process_time() - began[1]
        outcome.n_steps += engine.stats()["n_steps"] - counts[0]
        outcome.n_reduces += runner.reduce_stats()[0] - counts[1]
        runner.mesh.run = run_step  # type: ignore[method-assign]
    outcome.n_drafts = engine.stats().get("n_drafts", 0)


def _tokens(news: News) -> list[int]:
    tokens = (answer if isinstance(answer, int) else answer.token for answer in news.answers)
    return [token for token in tokens if token is not None]


def in_turns(going: Sequence[Iterator[None]]) -> None:
    """Run all iterators to their ends in turns, and change their order in every round."""
    left = list(going)
    while left := [it for it in left if next(it, left) is None]:
        left = left[1:] + left[:1]


def counted(pairs: Sequence[tuple[list[int], list[int]]], n_max: int) -> float:
    """Return the tokens per step of edits if all n-gram drafts of at most `n_max` tokens are verified."""
    n_tokens = n_steps = 0
    for number, (old, new) in enumerate(pairs):
        ngrams, at = Ngrams(1, 1 << 16), 1
        while at < len(new):
            history = old + new[:at]
            [draft] = ngrams.draft([Want(0, number, history, history, n_max)])
            at += 1 + n_common(draft.tokens, new[at:], n_max)
            n_steps += 1
        n_tokens += len(new) - 1
    return n_tokens / n_steps


def edits(tokenizer: Tokenizer, n: int, least: int, most: int) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of `n` files before and after the last commits that changed them."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True
        ).stdout

    pairs: list[tuple[list[int], list[int]]] = []
    for commit in git("log", "--format=%h", "-n", str(N_COMMITS)).split():
        names = git("diff", "--name-only", "--diff-filter=M", f"{commit}~", commit, "--", "*.md", "*.py")
        for name in names.split():
            old, new = (git("show", f"{at}:{name}") for at in (f"{commit}~", commit))
            pair = tokenizer.encode(old, True, False), tokenizer.encode(new, False, False)
            if all(least <= len(tokens) <= most for tokens in pair):
                pairs.append(pair)
                break
        if len(pairs) == n:
            break
    return pairs


def contrary(rng: random.Random, n: int) -> list[int]:
    """Return tokens that repeat themselves, although no n-gram draft is right."""
    ngrams, tokens = Ngrams(1, 2 * n), [rng.choice(FEW) for _ in range(LENGTHS[-1])]
    while len(tokens) < n:
        [draft] = ngrams.draft([Want(0, 0, tokens, tokens, 1)])
        tokens.append(rng.choice([token for token in FEW if token not in draft.tokens]))
    return tokens


def cases(tokenizer: Tokenizer, devices: Sequence[str]) -> list[Case]:
    rng, changed = random.Random(1), edits(tokenizer, N_EDITS, LEAST, MOST)
    noise = [rng.randrange(3, 500) for _ in range(2 * N_TOKENS)]
    wrong = contrary(rng, 2 * N_TOKENS)
    stories = [([1, 403, 407, 261, 378, 300 + 9 * i], list[int]()) for i in range(3)]
    shares, n_ctx = [1] * len(devices), 2 * MOST + 16
    base = Options.of(TARGET, devices=devices, tensor_split=shares, exact=True, n_ctx=n_ctx, n_ubatch=128)
    ngram, draft = replace(base, speculation=("ngram",)), replace(base, draft=str(DRAFT))
    return [
        Case("edits, n-grams, k = 3", replace(ngram, draft_max=3), changed),
        Case("edits, n-grams, k = 7", ngram, changed),
        Case("draft model, k = 3", replace(draft, draft_max=3), stories),
        Case("random text, n-grams", ngram, [(noise[:N_TOKENS], noise[N_TOKENS:])]),
        Case("wrong guesses, n-grams", ngram, [(wrong[:N_TOKENS], wrong[N_TOKENS:])]),
        Case("random text, draft model", draft, [(noise[:N_TOKENS], noise[N_TOKENS:])]),
    ]


def show_counts(tokenizer: Tokenizer) -> None:
    pairs = edits(tokenizer, N_COUNTED, LEAST, 4 * MOST)
    counts = [(f"k = {k}", f"{counted(pairs, k):.2f}") for k in (1, 3, 7)]
    console().print(table(f"{len(pairs)} edits, n-grams", ("drafted", "tokens a step"), counts))


def measured(case: Case, n_rounds: int, one_model: bool = False) -> list[tuple[str, ...]]:
    """Return a row of the table for each way. Unless `one_model` is set, every way has a separate model, and
    the model of plain decoding has no drafts."""
    plain = replace(case.options, speculation=(), draft=None)
    runners: dict[str, Runner] = {"plain": Runner(case.options if one_model else plain)}
    drafts: dict[str, Runner | None] = {}
    for way in PRICES:
        drafts[way] = open_draft(case.options)
        runners[way] = runners["plain"] if one_model else Runner(case.options)
    total = {way: Outcome() for way in runners}
    for number in range(1 + n_rounds):
        outcomes = {way: Outcome() for way in runners}
        going = []
        for way, runner in runners.items():
            speculation = None
            if way in PRICES:
                drafters = drafters_of(runner, draft := drafts[way])
                if draft is not None:
                    count_rows(draft, outcomes[way])
                trusted = Trusted() if way == "always" else None
                speculation = Speculation(drafters, limits_of(runner), PRICES[way](), trusted)
            going.append(turns(case, runner, speculation, outcomes[way]))
        going = going[number % len(going) :] + going[: number % len(going)]
        for text in [[it] for it in going] if one_model else [going]:
            in_turns(text)
        for way, outcome in outcomes.items():
            assert outcome.tokens == outcomes["plain"].tokens, "drafts have changed the tokens"
            if number:  # the first round records steps
                total[way].add(outcome)
    for opened in {*runners.values(), *drafts.values()}:
        if opened is not None:
            opened.close()
    rows = []
    for way, of in total.items():
        n = len(of.tokens)
        shown = (
            n / of.n_steps,
            of.n_reduces / n,
            of.nbytes / n / 1024,
            1e3 * of.seconds / n,
            total["plain"].seconds / of.seconds,
            total["plain"].cpu_s / of.cpu_s,
        )
        per_text = (n // (n_rounds * len(case.texts)) for n in (of.n_drafts, of.n_draft_rows))
        rows.append((case.name, way, *(f"{value:.2f}" for value in shown), *map(str, per_text)))
    return rows


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-dev", "--device", dest="devices", default="0,0", help="devices (default: 0,0)")
    parser.add_argument("--only", default="", help="measure the cases whose names contain this text")
    parser.add_argument("--rounds", type=int, default=3, help="how often each case runs (default: 3)")
    parser.add_argument("--one-model", action="store_true", help="run all ways on one model, in turns")
    args = parser.parse_args(words)
    with GGUF.open(TARGET) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    if not args.only:
        show_counts(tokenizer)
    rows = []
    for case in cases(tokenizer, args.devices.split(",")):
        if args.only in case.name:
            rows += measured(case, args.rounds, args.one_model)
    columns = (
        "case",
        "drafts",
        "tokens a step",
        "exchanges a token",
        "KiB a token",
        "ms a token",
        "of plain speed",
        "tokens per CPU time",
        "drafts a text",
        "rows of the draft model",
    )
    console().print(table(f"devices {args.devices}", columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
