"""Checks of llama-server's fields, one for each row of docs/serving.md."""

from __future__ import annotations

import math
from typing import Any

from asked import ASK, CHAT, LONG, Servers, chat, native, openai, refused, settings


def progress(s: Servers) -> None:
    def shown(events: list[Any]) -> list[Any]:
        return [event["prompt_progress"] for event in events if "prompt_progress" in event]

    for call, path in ((native, "prompt"), (openai, "prompt"), (chat, "messages")):
        content: Any = LONG if path == "prompt" else [{"role": "user", "content": LONG}]
        wanted = {"stream": True, "return_progress": True, "cache_prompt": False}
        rows = shown(call(s.plain, **wanted, **{path: content}))
        assert len(rows) >= 3 and rows[0]["processed"] == rows[0]["cache"]
        assert rows[-1]["processed"] == rows[-1]["total"] and rows[-1]["time_ms"] >= 0
    assert not shown(native(s.plain, stream=True))


def timings_per_token(s: Servers) -> None:
    for call in (native, openai, chat):
        events = call(s.plain, stream=True, timings_per_token=True)
        assert [event["timings"]["predicted_n"] for event in events if "timings" in event][:4] == [1, 2, 3, 4]
    first, *_ = native(s.plain, stream=True)
    assert "timings" not in first


def cache_prompt(s: Servers) -> None:
    assert native(s.plain, prompt=LONG)["timings"]["cache_n"] >= 0
    assert native(s.plain, prompt=LONG)["timings"]["cache_n"] > 0
    for call in (native, openai):
        assert call(s.plain, prompt=LONG, cache_prompt=False)["timings"]["cache_n"] == 0
    asked = [{"role": "user", "content": LONG}]
    assert (
        chat(s.plain, messages=asked, cache_prompt=False)["usage"]["prompt_tokens_details"]["cached_tokens"]
        == 0
    )


def probabilities(s: Servers) -> None:
    row = native(s.plain, n_probs=3)["completion_probabilities"][0]
    assert len(row["top_logprobs"]) == 3 and row["logprob"] <= 0 and row["bytes"]
    answer = native(s.plain, n_probs=3, temperature=1.0, top_k=2, top_p=1, min_p=0, post_sampling_probs=True)
    for row in answer["completion_probabilities"]:
        assert len(row["top_probs"]) == 2 and math.isclose(sum(p["prob"] for p in row["top_probs"]), 1.0)
        assert row["prob"] in [p["prob"] for p in row["top_probs"]]
    greedy = chat(s.plain, n_probs=2, post_sampling_probs=True)["choices"][0]["logprobs"]["content"]
    assert [row["prob"] for row in greedy] == [1.0] * 4


def min_keep(s: Servers) -> None:
    answer = native(
        s.plain, n_probs=9, temperature=1.0, top_k=0, top_p=0.0, min_keep=5, min_p=0, post_sampling_probs=True
    )
    assert len(answer["completion_probabilities"][0]["top_probs"]) == 5
    assert answer["generation_settings"]["min_keep"] == 5


def ignore_eos(s: Servers) -> None:
    shown = settings(s, ignore_eos=True)
    assert shown["ignore_eos"] and {"bias": None, "token": 2} in shown["logit_bias"]
    assert settings(s)["logit_bias"] == []
    assert settings(s, logit_bias=[[5, -2.5]])["logit_bias"] == [{"bias": -2.5, "token": 5}]


def verbose(s: Servers) -> None:
    assert "__verbose" not in chat(s.plain) and "__verbose" not in openai(s.plain)
    assert chat(s.plain, verbose=True)["__verbose"]["prompt"]
    assert "__verbose" not in chat(s.verbose, verbose=False)
    assert chat(s.verbose)["__verbose"]["prompt"] and openai(s.verbose)["__verbose"]["content"]
    assert chat(s.verbose, stream=True)[-1]["__verbose"]["stop"] is True


def fingerprint(s: Servers) -> None:
    build = s.plain.get("/props")[1]["build_info"]
    for call in (openai, chat):
        assert call(s.plain)["system_fingerprint"] == build
        assert {event["system_fingerprint"] for event in call(s.plain, stream=True)} == {build}


def roles(s: Servers) -> None:
    for role in ("system", "developer", "user", "assistant", "tool"):
        asked = [{"role": role, "content": "a"}, *ASK]
        assert s.plain.post("/apply-template", {"messages": asked})[0] == 200, role
    answer = s.plain.post("/apply-template", {"messages": [{"role": "narrator", "content": "a"}]})[1]
    assert answer["error"]["param"] == "messages[0].role"


def continue_message(s: Servers) -> None:
    begun = [*ASK, {"role": "assistant", "content": "Once upon"}]
    on = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = s.plain.post("/apply-template", {"messages": begun} | on)[1]["prompt"]
    assert (
        prompt.endswith("Once upon") and chat(s.plain, messages=begun, **on)["usage"]["completion_tokens"] > 0
    )
    bad = {"messages": begun, "continue_final_message": True, "add_generation_prompt": True}
    for body in (
        bad,
        {"messages": begun, "continue_final_message": True},
        {"messages": ASK, "continue_final_message": 1},
    ):
        assert s.plain.post(CHAT, body)[1]["error"]["param"] == "continue_final_message"


def generation_prompt(s: Servers) -> None:
    opened = s.verbose.post("/apply-template", {"messages": ASK})[1]["prompt"]
    closed = s.verbose.post("/apply-template", {"messages": ASK, "add_generation_prompt": False})[1]["prompt"]
    assert opened == closed + "[assistant]"


def prefill(s: Servers) -> None:
    begun = [*ASK, {"role": "assistant", "content": "Once upon"}]
    assert s.plain.post("/apply-template", {"messages": begun})[1]["prompt"].endswith("Once upon")
    assert s.plain.post(CHAT, {"messages": [*begun, begun[-1]]})[1]["error"]["param"] == "messages"


def indent(s: Servers) -> None:
    forced = {"grammar": 'root ::= "a\\n    b\\n  c d e f g"', "n_predict": 30}
    answer = native(s.plain, n_indent=4, **forced)
    assert (answer["content"], answer["stop_type"]) == ("a\n    b\n  ", "limit")
    assert native(s.plain, n_indent=2, **forced)["content"].endswith("c d e f g")


def time_limit(s: Servers) -> None:
    forced = {"grammar": 'root ::= "a\\n" [b]+', "n_predict": 200}
    assert native(s.plain, t_max_predict_ms=1, **forced)["tokens_predicted"] < 200
    assert native(s.plain, t_max_predict_ms=-1)["tokens_predicted"] == 4


def kept(s: Servers) -> None:
    shown = settings(s, n_keep=-1, n_discard=3)
    assert (shown["n_keep"], shown["n_discard"]) == (-1, 3)
    assert refused(s.plain, "n_keep", -2) and refused(s.plain, "n_discard", -1)


def drafts(s: Servers) -> None:
    """The server has no drafts, so the fields change nothing."""
    values = {"speculative.n_max": 3, "speculative.n_min": 1, "speculative.p_min": 0.5}
    assert native(s.plain, **values)["content"] == native(s.plain)["content"]
    assert refused(s.plain, "speculative.n_max", "many") and refused(s.plain, "speculative.p_min", -1)


def response_fields(s: Servers) -> None:
    answer = native(s.plain, response_fields=["content", "generation_settings/n_predict", "none"])
    assert set(answer) == {"content", "n_predict"}


def limits(s: Servers) -> None:
    assert native(s.plain, n_predict=None, max_tokens=2)["tokens_predicted"] == 2
    assert native(s.plain, n_predict=None, max_completion_tokens=3)["tokens_predicted"] == 3
    assert native(s.plain, n_predict=0)["tokens_predicted"] == 0


def several(s: Servers) -> None:
    assert len(native(s.plain, n_cmpl=2)) == 2 and len(openai(s.plain, n_cmpl=2)["choices"]) == 2
    assert len(chat(s.plain, n=2)["choices"]) == 2


def returned_tokens(s: Servers) -> None:
    assert native(s.plain)["tokens"] == [] and len(native(s.plain, return_tokens=True)["tokens"]) == 4


def samplers(s: Servers) -> None:
    assert settings(s, samplers="kt")["samplers"] == ["top_k", "temperature"]
    assert settings(s, samplers=["min_p"])["samplers"] == ["min_p"]
    assert refused(s.plain, "samplers", ["none"])


def wrong_types(s: Servers) -> None:
    """The error names the field."""
    for name, value in (("reasoning_format", "x"), ("echo", "x"), ("dry_sequence_breakers", []), ("stop", 5),
                        ("verbose", 1), ("max_tokens", "x"), ("top_k", 1.5), ("stream", "yes")):  # fmt: skip
        assert refused(s.plain, name, value)
    for message, name in (
        ({"role": "user"}, "content"), ({"role": "assistant"}, "content"), ({"content": "x"}, "role"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": 5}, "content"),
    ):  # fmt: skip
        status, answer, _ = s.plain.post(CHAT, {"messages": [message, *ASK]})
        assert status == 400 and answer["error"]["param"] == f"messages[0].{name}", message
    for path, body in (("/tokenize", {"content": 5}), ("/detokenize", {"tokens": [99999]})):
        status, answer, _ = s.plain.post(path, body)
        assert status == 400 and answer["error"]["param"] == next(iter(body))


def numbers(s: Servers) -> None:
    shown = settings(s, temperature=-1, top_k=3, top_p=0.5, dry_base=1.2, repeat_last_n=7, seed=5)
    want = {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "dry_base": 1.2, "repeat_last_n": 7, "seed": 5}
    assert {name: shown[name] for name in want} == want
    assert settings(s, top_k=-1)["top_k"] == 0
    assert refused(s.plain, "top_p", 1.5) and refused(s.plain, "top_k", "3")


def stop(s: Servers) -> None:
    word = native(s.plain, n_predict=12)["content"].split()[2]
    answer = native(s.plain, n_predict=12, stop=[word])
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", word)
    assert settings(s, stop=[])["stop"] == [] and refused(s.plain, "stop", [3])


def structure(s: Servers) -> None:
    assert native(s.plain, grammar='root ::= "yes"')["content"] == "yes"
    schema = {"enum": ["a"]}
    assert native(s.plain, json_schema=schema, n_predict=9)["content"] == '"a"'
    assert refused(s.plain, "grammar_lazy", True)


def slot_number(s: Servers) -> None:
    assert native(s.plain, id_slot=1)["id_slot"] == 1 and refused(s.plain, "id_slot", 2)


def ping(s: Servers) -> None:
    assert native(s.plain, stream=True, sse_ping_interval=-1)
    assert refused(s.plain, "sse_ping_interval", "1")


def reasoning(s: Servers) -> None:
    assert chat(s.plain, reasoning_budget_tokens=0) and chat(s.plain, reasoning_format="none")
    for name, value in (
        ("reasoning_budget_tokens", 5),
        ("reasoning_control", True),
        ("reasoning_format", "x"),
    ):
        assert refused(s.plain, name, value, CHAT)


def template_variables(s: Servers) -> None:
    assert chat(s.plain, chat_template_kwargs={"enable_thinking": False})
    status, answer, _ = s.plain.post(CHAT, {"messages": ASK, "chat_template_kwargs": {"other": 1}})
    assert status == 400 and "enable_thinking" in answer["error"]["message"]
    words = {"messages": ASK, "chat_template_kwargs": {"enable_thinking": "no"}}
    assert s.plain.post(CHAT, words)[1]["error"]["param"] == "chat_template_kwargs.enable_thinking"


def without_effect(s: Servers) -> None:
    internal = {"n_cache_reuse": 64, "backend_sampling": True, "adaptive_decay": 0.5, "chat_format": 0,
                "preserved_tokens": [], "grammar_triggers": [], "generation_prompt": ""}  # fmt: skip
    assert native(s.plain, **internal)["content"] == native(s.plain)["content"]


def adaptive(s: Servers) -> None:
    assert native(s.plain, adaptive_target=-1) and refused(s.plain, "adaptive_target", 0.5)
