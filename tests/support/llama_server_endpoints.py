"""Checks of llama-server's endpoints, one for each row of docs/serving.md."""

from __future__ import annotations

import re

from asked import ASK, CHAT, NATIVE, TEXT, Servers, ask, chat, native, openai, refused


def health(s: Servers) -> None:
    assert s.plain.get("/health")[1] == s.plain.get("/v1/health")[1] == {"status": "ok"}


def metrics(s: Servers) -> None:
    status, answer, _ = s.plain.get("/metrics")
    assert status == 501 and answer["error"]["type"] == "not_supported_error"
    assert "--metrics" in answer["error"]["message"]
    status, text, headers = s.verbose.get("/metrics")
    assert status == 200 and int(headers["process-start-time-unix"]) > 0
    for name in (
        "prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total", "tokens_predicted_total",
        "tokens_predicted_seconds_total", "n_decode_total", "n_tokens_max", "prompt_tokens_seconds",
        "predicted_tokens_seconds", "requests_processing", "requests_deferred", "n_busy_slots_per_decode",
    ):  # fmt: skip
        assert re.search(rf"^llamacpp:{name} [0-9.e+-]+$", text, re.MULTILINE), name


def props(s: Servers) -> None:
    answer = s.verbose.get("/props")[1]
    for name in ("default_generation_settings", "total_slots", "model_alias", "model_path", "modalities",
                 "chat_template", "bos_token", "eos_token", "build_info", "model_ftype"):  # fmt: skip
        assert name in answer
    assert answer["endpoint_metrics"] and answer["endpoint_props"] and answer["endpoint_slots"]
    assert answer["default_generation_settings"]["params"]["top_k"] == 40 and "/" not in answer["model_path"]


def set_props(s: Servers) -> None:
    assert s.plain.post("/props", {})[0] == 501
    assert s.verbose.post("/props", {})[1] == {"success": True}


def models(s: Servers) -> None:
    answer = s.verbose.get("/v1/models")[1]
    [entry, *_], [shown] = answer["data"], answer["models"]
    assert entry["aliases"] == ["demo", "tiny"] and entry["tags"] == ["small"] and shown["name"] == "demo"
    meta = entry["meta"]
    assert meta["n_ctx"] == meta["n_ctx_train"] == 512 and meta["vocab_type"] == 1 and meta["n_vocab"] == 1024
    assert meta["n_embd"] == 192 and meta["n_params"] > 1e6 and meta["size"] > 1e6 and meta["ftype"] == "Q8_0"


def completion(s: Servers) -> None:
    answer = native(s.plain)
    for name in (
        "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
        "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word",
        "tokens_cached", "timings",
    ):  # fmt: skip
        assert name in answer, name
    assert answer["content"] and "choices" not in answer
    *parts, last = native(s.plain, stream=True)
    assert "".join(part["content"] for part in parts) == answer["content"]
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)


def completions(s: Servers) -> None:
    body = {"prompt": TEXT, "max_tokens": 4}
    answer = ask(s.plain, "/completions", body)
    assert answer["content"] == answer["choices"][0]["text"] == native(s.plain)["content"]
    events = ask(s.plain, "/completions", body | {"stream": True})
    assert all(event["content"] == event["choices"][0]["text"] for event in events)
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def openai_completions(s: Servers) -> None:
    answer = openai(s.plain, logprobs=1)
    assert "content" not in answer and answer["object"] == "text_completion" and answer["timings"]
    logprobs = answer["choices"][0]["logprobs"]
    assert [row["logprob"] for row in logprobs["content"]] == logprobs["token_logprobs"]


def chat_completions(s: Servers) -> None:
    answer = chat(s.plain)
    assert answer["choices"][0]["message"]["role"] == "assistant" and answer["timings"]["predicted_n"] == 4
    first, *_, last = chat(s.plain, stream=True)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["predicted_n"] == 4
    last = chat(s.plain, stream=True, stream_options={"include_usage": True})[-1]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4 and "timings" in last


def counts(s: Servers) -> None:
    n = chat(s.plain)["usage"]["prompt_tokens"]
    body = {"messages": ASK}
    assert s.plain.post("/v1/chat/completions/input_tokens", body)[1]["input_tokens"] == n
    assert s.plain.post("/v1/messages/count_tokens", body)[1]["input_tokens"] == n
    assert s.plain.post("/v1/responses/input_tokens", {"input": ASK[0]["content"]})[1]["input_tokens"] == n


def responses(s: Servers) -> None:
    answer = ask(s.plain, "/v1/responses", {"input": "Hello", "max_output_tokens": 3})
    assert answer["object"] == "response" and answer["usage"]["output_tokens"] == 3


def messages(s: Servers) -> None:
    answer = ask(s.plain, "/v1/messages", {"messages": ASK, "max_tokens": 3})
    assert (answer["type"], answer["stop_reason"]) == ("message", "max_tokens")


def infill(s: Servers) -> None:
    status, answer, _ = s.plain.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert status == 501 and answer["error"]["type"] == "not_supported_error"


def tokenize(s: Servers) -> None:
    ids = s.plain.post("/tokenize", {"content": TEXT})[1]["tokens"]
    assert s.plain.post("/tokenize", {"content": [TEXT, 432]})[1]["tokens"] == [*ids, 432]
    rows = s.plain.post("/tokenize", {"content": TEXT, "with_pieces": True})[1]["tokens"]
    assert [row["id"] for row in rows] == ids
    assert s.plain.post("/tokenize", {"content": TEXT, "add_special": True})[1]["tokens"] == [1, *ids]
    assert s.plain.post("/detokenize", {"tokens": ids})[1]["content"].strip() == TEXT


def apply_template(s: Servers) -> None:
    prompt = s.plain.post("/apply-template", {"messages": ASK})[1]["prompt"]
    assert ASK[0]["content"] in prompt


def slots(s: Servers) -> None:
    rows = s.plain.get("/slots")[1]
    assert [(row["id"], row["n_ctx"], row["is_processing"]) for row in rows] == [
        (0, 512, False),
        (1, 512, False),
    ]
    with s.plain.send(NATIVE, {"prompt": TEXT, "stream": True, "ignore_eos": True}) as sock:
        sock.recv(4096)
        busy = [row for row in s.plain.get("/slots")[1] if row["is_processing"]]
    assert len(busy) == 1 and busy[0]["next_token"][0]["n_decoded"] > 0
    assert busy[0]["params"]["top_k"] == 40 and "stop" not in busy[0]["params"]


def slot_files(s: Servers) -> None:
    native(s.verbose, id_slot=1)
    saved = s.verbose.post("/slots/1?action=save", {"filename": "a.bin"})[1]
    assert saved["n_saved"] > 4 and saved["n_written"] > 0 and saved["timings"]["save_ms"] > 0
    restored = s.verbose.post("/slots/1?action=restore", {"filename": "a.bin"})[1]
    assert restored["n_restored"] == saved["n_saved"]
    assert s.verbose.post("/slots/1?action=erase", {})[1] == {"id_slot": 1, "n_erased": saved["n_saved"]}
    assert s.plain.post("/slots/1?action=save", {"filename": "a.bin"})[0] == 501


def cross_origin(s: Servers) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Headers": "authorization, x-own"}
    status, _, headers = s.verbose.request("OPTIONS", CHAT, headers=asked)
    assert status == 204 and headers["access-control-allow-origin"] == "https://a.example"
    assert headers["access-control-allow-headers"] == "authorization, x-own"
    assert headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert headers["access-control-allow-credentials"] == "true"


def errors(s: Servers) -> None:
    status, answer, _ = s.plain.post(NATIVE, {"prompt": [432] * 600})
    error = answer["error"]
    assert status == 400 and error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (600, 512)
    assert error["code"] == "context_length_exceeded"
    assert refused(s.plain, "n_predict", "4")["code"] == 400
    assert s.plain.get("/none")[1]["error"]["type"] == "not_found_error"
