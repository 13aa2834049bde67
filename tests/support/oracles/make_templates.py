"""Makes `golden/templates.json`: conversations that transformers' `apply_chat_template` renders. The
templates have the style of the supported families (`tests/data/templates`).

    PYTHONPATH=tests/support python tests/support/oracles/make_templates.py  # Writes the file.

Needs transformers.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden"
TEMPLATES = GOLDEN.parent / "templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city, in °C & <b>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "default": 1},
                "kinds": {"type": "array", "items": {"type": "string"}},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "description": "Now", "parameters": {}}}
USER = {"role": "user", "content": " Wie wird's in Zürich?\n"}
CALL = {"id": "call12345", "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2, "unit": "C"}}}  # fmt: skip
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": '{"t": 21.5}'}
ANSWER = {"role": "assistant", "content": "It is 21.5 °C.  "}
THOUGHT = {**ANSWER, "reasoning_content": "\nThe tool says so.\n"}
SYSTEM = {"role": "system", "content": "Be brief.\n<tag> & 'quotes'"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "this? "}],
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one message": [USER],
    "system": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, USER],
    "ends with an answer": [USER, ANSWER],
    "thought": [USER, THOUGHT, USER, THOUGHT],
    "thought in the content": [USER, {"role": "assistant", "content": "<think>\nHm\n</think>\n\nYes"}, USER],
    "thinking": [USER, {**ANSWER, "thinking": "Hm"}],
    "tool": [SYSTEM, USER, CALLED, TOLD],
    "tool answered": [USER, CALLED, TOLD, ANSWER, USER],
    "two tools": [USER, {**CALLED, "tool_calls": [CALL, CALL]}, TOLD, TOLD],
    "looks like a tool": [USER, ANSWER, {"role": "user", "content": "<tool_response>x</tool_response>"}],
    "parts": [PARTS],
    "unicode": [{"role": "user", "content": "é日\u2028🦙\x00 </s><|im_end|>"}],
    "wrong order": [ANSWER, USER],
    "another role": [{"role": "ipython", "content": "x"}, {"role": "developer", "content": "y"}],
    "empty": [],
}
VARIABLES: dict[str, dict[str, Any]] = {
    "none": {},
    "without a prompt": {"add_generation_prompt": False},
    "tools": {"tools": [WEATHER, TIME]},
    "no thinking": {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"},
    "thinking": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    "documents": {"documents": [{"title": "Ä", "text": "one"}, {"title": "B", "text": "two"}]},
    "custom": {
        "date_string": "1 May 2030",
        "tools_in_user_message": False,
        "citation_mode": "off",
        "builtin_tools": ["python"],
        "tools": [WEATHER],
    },
    "go on": {"continue_final_message": True},
}


def make() -> dict[str, Any]:
    from transformers.utils.chat_template_utils import render_jinja_template

    record: dict[str, Any] = {"about": f"transformers {version('transformers')}", "texts": {}}
    for path in sorted(TEMPLATES.glob("*.jinja")):
        texts = record["texts"][path.stem] = {}
        for talk, messages in CONVERSATIONS.items():
            for name, variables in VARIABLES.items():
                go_on = variables.get("continue_final_message", False)
                given = {"add_generation_prompt": not go_on, **variables, **TOKENS}
                try:
                    texts[f"{talk}, {name}"] = render_jinja_template(
                        [messages], chat_template=path.read_text(encoding="utf-8"), **given
                    )[0][0]
                except Exception as error:
                    texts[f"{talk}, {name}"] = {
                        "refused": f"{type(error).__name__}: {error}".partition("\n")[0][:100]
                    }
    return record


def main() -> None:
    record = make()
    path = GOLDEN / "templates.json"
    path.write_text(json.dumps(record, ensure_ascii=False, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    for name, texts in record["texts"].items():
        print(f"{name:12} {sum(isinstance(t, str) for t in texts.values())} texts of {len(texts)}")


if __name__ == "__main__":
    main()
