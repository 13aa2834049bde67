"""Every row about llama-server in docs/serving.md has a check in `CASES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_server_adapters as adapters
import llama_server_endpoints as endpoints
import llama_server_fields as fields
import pytest
from asked import TEXT, Servers, native
from llama_server_adapters import demo_adapters
from serving import FakeModel, served, until

from vkbackend.models.llm import LLM
from vkbackend.models.text.chat_template import CHATML
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.guard import Guard
from vkbackend.tools.server.unsupported import REASONS

pytestmark = pytest.mark.no_vulkan

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers share one model with two adapters, whose default scales are 0. The second server is verbose
    and has all endpoints."""
    folder = str(tmp_path_factory.mktemp("slots"))
    options: dict[str, Any] = {"n_ctx": 512, "n_slots": 2, "n_ubatch": 32, "kv_cells": 1024}
    options |= {"lora": demo_adapters(tmp_path_factory.mktemp("adapters")), "lora_init_without_apply": True}
    model = LLM(demo_model(), devices="numpy", **options)
    plain = Config(demo_model(), "demo", logs_requests=False, defaults={"temperature": 0})
    rich = Config(
        demo_model(), "demo", logs_requests=False, defaults={"temperature": 0}, slot_folder=folder,
        shows_metrics=True, takes_props=True, is_verbose=True, tags=("small",), other_names=("tiny",),
        guard=Guard(origins=("*",), credentials=True), template=TEMPLATE,
    )  # fmt: skip
    with served(model, plain) as first, served(model, rich) as second:
        yield Servers(first, second)


def test_context_shift(request: pytest.FixtureRequest) -> None:
    """n_keep and n_discard of a request replace --keep. BOS is kept in addition."""
    model = LLM(demo_model(), devices="numpy", n_ctx=32, n_ubatch=32, context_shift=True, n_keep=3)
    config = Config(demo_model(), "demo", logs_requests=False, defaults={"temperature": 0})
    with served(model, config) as address:
        cases: list[dict[str, int]] = [{}, {"n_keep": -1}, {"n_keep": 5, "n_discard": 9}]
        for given in cases if request.config.getoption("--all") else cases[2:]:
            body = {"n_predict": 36, "ignore_eos": True} | given
            answer = native(address, **body)
            want = model.generate(TEXT, 36, temperature=0, ignore_eos=True, **given)  # type: ignore[arg-type]
            assert answer["content"] == want.text and answer["tokens_predicted"] == 36
            assert answer["truncated"] and want.truncated and answer["stop_type"] == "limit"
            assert answer["tokens_cached"] < 32
            assert answer["generation_settings"]["n_keep"] == given.get("n_keep", 3)
            *_, last = native(address, stream=True, **body)
            assert last["truncated"] and last["timings"]["predicted_n"] == 36
        assert not native(address)["truncated"]


def test_speculation() -> None:
    """A text that repeats itself is drafted by n-grams. The answer, its timings and the server's counters
    show the drafts."""
    model = LLM(demo_model(), devices="numpy", n_ctx=128, speculation="ngram")
    config = Config(demo_model(), "demo", logs_requests=False, shows_metrics=True)
    body: dict[str, Any] = {"grammar": 'root ::= ("abc ")+', "n_predict": 30, "temperature": 0}
    with served(model, config) as address:
        plain = native(address, **body, **{"speculative.n_max": 0})
        assert "draft_n" not in plain["timings"]
        answer = native(address, **body)
        timings = answer["timings"]
        assert answer["content"] == plain["content"]
        assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
        [slot] = address.get("/slots")[1]
        assert slot["speculative"] is True
        name = "llamacpp:spec_decode_num_"

        def counts() -> dict[str, str]:
            lines = address.get("/metrics")[1].splitlines()
            return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

        until(lambda: int(counts()[f"{name}draft_tokens_total"]) >= timings["draft_n"])
        shown = counts()
    by_position = [int(n) for key, n in shown.items() if key.startswith(f"{name}accepted_tokens_per_pos")]
    assert sum(by_position) == int(shown[f"{name}accepted_tokens_total"]) >= timings["draft_n_accepted"]
    assert int(shown[f"{name}drafts_total"]) > 0 and len(by_position) == 7


CASES: dict[str, Callable[[Servers], None]] = {
    "`GET /health`": endpoints.health,
    "`GET /metrics`": endpoints.metrics,
    "`GET /props`": endpoints.props,
    "`POST /props`": endpoints.set_props,
    "`GET /models`": endpoints.models,
    "`POST /completion`": endpoints.completion,
    "`POST /completions`": endpoints.completions,
    "`POST /v1/completions`": endpoints.openai_completions,
    "`POST /chat/completions`": endpoints.chat_completions,
    "`POST /responses`": endpoints.responses,
    "`POST /messages`": endpoints.messages,
    "counts of tokens": endpoints.counts,
    "`POST /infill`": endpoints.infill,
    "`GET /lora-adapters`": adapters.shown,
    "`POST /lora-adapters`": adapters.defaults,
    "`POST /tokenize`, `/detokenize`": endpoints.tokenize,
    "`POST /apply-template`": endpoints.apply_template,
    "`GET /slots`": endpoints.slots,
    "`POST /slots/N`": endpoints.slot_files,
    "`OPTIONS`": endpoints.cross_origin,
    "errors": endpoints.errors,
    "`return_progress`": fields.progress,
    "`timings_per_token`": fields.timings_per_token,
    "`cache_prompt`": fields.cache_prompt,
    "`n_probs`, `post_sampling_probs`": fields.probabilities,
    "`min_keep`": fields.min_keep,
    "`ignore_eos`, `logit_bias`": fields.ignore_eos,
    "`__verbose`": fields.verbose,
    "`system_fingerprint`": fields.fingerprint,
    "`messages`": fields.roles,
    "`continue_final_message`": fields.continue_message,
    "`add_generation_prompt`": fields.generation_prompt,
    "a last message of the assistant": fields.prefill,
    "`n_indent`": fields.indent,
    "`t_max_predict_ms`": fields.time_limit,
    "`n_keep`, `n_discard`": fields.kept,
    "`speculative.n_max`, `speculative.n_min`, `speculative.p_min`": fields.drafts,
    "`response_fields`": fields.response_fields,
    "`n_predict`, `max_tokens`, `max_completion_tokens`": fields.limits,
    "`n_cmpl`, `n`": fields.several,
    "`return_tokens`": fields.returned_tokens,
    "`samplers`": fields.samplers,
    "numbers of samplers": fields.numbers,
    "`stop`": fields.stop,
    "`grammar`, `json_schema`, `grammar_lazy`": fields.structure,
    "`id_slot`": fields.slot_number,
    "`sse_ping_interval`": fields.ping,
    "`reasoning_format`, `reasoning_budget_tokens`": fields.reasoning,
    "`chat_template_kwargs`": fields.template_variables,
    "`n_cache_reuse`, `backend_sampling`, internal fields": fields.without_effect,
    "`lora`": adapters.of_a_request,
    "`model`": adapters.as_a_model,
    "`adaptive_target`": fields.adaptive,
}


@pytest.mark.parametrize("row", CASES)
def test_row(servers: Servers, row: str) -> None:
    CASES[row](servers)


def test_the_template_of_a_model_without_one() -> None:
    with served(FakeModel()) as address:
        assert address.get("/props")[1]["chat_template"] == CHATML


def test_wrong_types(servers: Servers) -> None:
    fields.wrong_types(servers)


@pytest.mark.parametrize("method,path,reason", REASONS)
def test_endpoints_that_are_missing(servers: Servers, method: str, path: str, reason: str) -> None:
    status, answer, headers = servers.plain.request(method, f"/v1{path}", {} if method == "POST" else None)
    error = answer["error"]
    assert (status, error["type"], error["code"]) == (501, "not_supported_error", 501)
    assert error["message"] == reason and headers["x-should-retry"] == "false"


def test_the_page_has_a_row_for_each_case() -> None:
    text = (
        PAGE.read_text(encoding="utf-8")
        .partition("## llama-server's endpoints and fields")[2]
        .partition("\n## ")[0]
    )
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = {first.removeprefix("| "): second for first, second, *_ in cells}
    missing = [name for row, here in rows.items() if here.startswith("501") for name in row.split(", ")]
    assert sorted(missing) == sorted(f"`{method} {path}`" for method, path, _ in REASONS)
    assert {row for row, here in rows.items() if not here.startswith(("501", "here"))} == set(CASES)
