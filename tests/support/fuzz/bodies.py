"""Random bodies for every endpoint, most of them almost valid."""

from __future__ import annotations

import json
import random
from typing import Any

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "tool_choice": "auto", "max_tokens": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "n": 2,
    "stop": ["x"], "seed": 3, "logit_bias": {"5": 1}, "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low", "parallel_tool_calls": False, "reasoning_format": "none", "top_k": 3,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "prompt": "Once", "max_tokens": 1, "n": 2, "stream": True, "echo": True, "logprobs": 2, "stop": "x",
    "logit_bias": {"7": -1.5}, "grammar": 'root ::= "a"', "json_schema": SCHEMA, "samplers": ["top_k"],
    "dry_multiplier": 0.5, "mirostat": 2, "dry_sequence_breakers": ["a"], "ignore_eos": True, "min_tokens": 1,
    "repeat_penalty": 1.1, "typical_p": 0.5, "xtc_probability": 0.5, "temperature": 0.5, "seed": 1,
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
        {"role": "user", "content": "Go on."},
    ],
    "instructions": "Be.", "max_output_tokens": 1, "stream": True, "tools": [{"type": "function"} | FUNCTION],
    "tool_choice": {"type": "function", "name": "f"}, "text": {"format": {"type": "json_object"}},
    "reasoning": {"effort": "low"}, "metadata": {"a": "b"},
}  # fmt: skip
MESSAGE: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "x"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True}]},
    ],
    "system": [{"type": "text", "text": "Be."}], "max_tokens": 1, "stream": True, "stop_sequences": ["x"],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}], "thinking": {"type": "enabled"},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "top_k": 3, "temperature": 1,
}  # fmt: skip
NATIVE = TEXT | {
    "n_predict": 1, "n_probs": 2, "id_slot": 0, "t_max_predict_ms": 10, "response_fields": ["content"],
    "return_tokens": True, "timings_per_token": True, "cache_prompt": True, "n_cmpl": 2, "min_keep": 2,
    "post_sampling_probs": True, "return_progress": True, "n_indent": 2, "n_keep": 4, "sse_ping_interval": 5,
}  # fmt: skip
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": MESSAGE,
    "/completion": NATIVE,
    "/infill": NATIVE
    | {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "f", "text": "t"}]},
    "/apply-template": CHAT,
    "/tokenize": {"content": "a b", "add_special": True, "parse_special": False, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/slots/0?action=save": {"filename": "a"},
    "/slots/0?action=restore": {"filename": "a"},
}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1 << 31, -(1 << 31), 1 << 63, 1 << 64, 10**40, 0.5, -0.5, 1e308,
    -1e308, 1e-320, "", "a", "x" * 5000, "\x00", "\ud800", "\udfff\ud800", "é\u200b", "<s>", "</s>", "auto",
    "none", "required", "text", "json_object", "{}", "[", "root ::= root", "root ::= [", "{{ 1 }}", [], {},
    [[]], [{}], [None], [1], ["a"], [1, "a"], [[1], "a"], {"a": 1}, {"type": "text"}, {"type": "function"},
    {"role": "user"}, [[[[[[[[]]]]]]]],
    {"type": "array", "items": {"$ref": "#"}}, {"enum": []}, {"$ref": "http://a.example"}, {"pattern": "(("},
)  # fmt: skip


def changed(rng: random.Random, value: Any, depth: int = 0) -> Any:
    if not value or not isinstance(value, dict | list) or (depth and rng.random() < 0.3):
        return rng.choice(VALUES)
    if isinstance(value, list):
        copy = list(value)
        i = rng.randrange(len(copy))
        if rng.random() < 0.2:
            return copy[:i] + copy[i:] * 2
        copy[i] = changed(rng, copy[i], depth + 1)
        return copy
    names = list(value)
    fields = dict(value)
    name = rng.choice(names)
    if rng.random() < 0.2:
        del fields[name]
    else:
        fields[name] = changed(rng, fields[name], depth + 1)
    return fields


def keep_short(body: Any, full: dict[str, Any]) -> None:
    """If `full` limits an answer's length, set the limit in `body` to one token, because a case must take
    little time."""
    if isinstance(body, dict):
        for name in {"max_tokens", "max_output_tokens", "n_predict"} & set(full):
            if body.get(name) is None or isinstance(body[name], int):
                body[name] = 1


def body_of(rng: random.Random, full: dict[str, Any]) -> bytes:
    """Remove and change fields of a valid body, and return it. Sometimes bytes are changed too."""
    kept = {name: value for name, value in full.items() if rng.random() < 0.4 or name in list(full)[:1]}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        kept = changed(rng, kept)
        if not isinstance(kept, dict):
            break
    keep_short(kept, full)
    data = json.dumps(kept).encode()
    if rng.random() < 0.1 and data:
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(rng.randrange(3)) + data[at + rng.randrange(3) :]
    return data
