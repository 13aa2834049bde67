"""Checks of llama-server's adapters, and adapters of the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapters import random_pairs, write_adapter
from asked import ASK, Servers, ask, chat, native, openai, refused
from derived import load

from vkbackend.tools.flags.text import demo_model

FIRST = [{"id": 0, "scale": 1.0}]


def demo_adapters(folder: Path) -> dict[str, Path]:
    model: Any = load(Path(demo_model()))
    return {
        name: write_adapter(folder / f"{name}.gguf", model.arch, random_pairs(model, rank))
        for name, rank in (("first", 2), ("second", 3))
    }


def shown(s: Servers) -> None:
    first, second = s.plain.get("/lora-adapters")[1]
    wanted = {
        "id": 0,
        "name": "first",
        "path": "first.gguf",
        "scale": 0.0,
        "task_name": "",
        "prompt_prefix": "",
    }
    assert first == wanted and (second["id"], second["path"]) == (1, "second.gguf")


def of_a_request(s: Servers) -> None:
    base, changed = native(s.plain), native(s.plain, lora=FIRST)
    assert base["content"] != changed["content"]
    assert base["generation_settings"]["lora"] == [] and changed["generation_settings"]["lora"] == FIRST
    assert native(s.plain, lora=[])["content"] == base["content"]
    assert native(s.plain, lora=[{"id": 0, "scale": 0}])["content"] == base["content"]
    assert openai(s.plain, lora=FIRST)["choices"][0]["text"] == changed["content"]
    message = chat(s.plain, lora=FIRST)["choices"][0]["message"]
    assert message != chat(s.plain)["choices"][0]["message"]
    (block,) = ask(s.plain, "/v1/messages", {"messages": ASK, "max_tokens": 4, "lora": FIRST})["content"]
    assert block["text"] == message["content"]
    for wrong in ([{"id": 2, "scale": 1.0}], FIRST * 2):
        refused(s.plain, "lora", wrong)
    for wrong, name in (([{"id": 0}], "lora[0].scale"), ([{"scale": 1}], "lora[0].id"), ([1], "lora[0]")):
        status, answer, _ = s.plain.post("/completion", {"prompt": "a", "lora": wrong})
        assert status == 400 and answer["error"]["param"] == name, answer
    for path in ("../other.gguf", "/etc/passwd"):  # requests cannot name files
        status, answer, _ = s.plain.post("/completion", {"prompt": "a", "lora": [{"path": path, "scale": 1}]})
        assert status == 400 and answer["error"]["param"] == "lora[0].id", answer
    status, answer, _ = s.plain.post("/completion", {"prompt": "a", "lora": [{"id": 0, "scale": 1e9}]})
    assert status == 400 and answer["error"]["param"] == "lora[0].scale"


def as_a_model(s: Servers) -> None:
    base, changed = native(s.plain)["content"], native(s.plain, lora=FIRST)["content"]
    for name in ("first", "demo:first"):
        assert openai(s.plain, model=name)["choices"][0]["text"] == changed
        assert s.plain.get(f"/v1/models/{name}")[1]["parent"] == "demo"
    for name in ("demo", "other", "demo:third"):
        assert openai(s.plain, model=name)["choices"][0]["text"] == base
    assert openai(s.plain, model="first", lora=[])["choices"][0]["text"] == base
    names = [entry["id"] for entry in s.plain.get("/v1/models")[1]["data"]]
    assert names == ["demo", "demo:first", "demo:second"]
    assert s.plain.get("/v1/models/third")[0] == 404


def defaults(s: Servers) -> None:
    base, changed = native(s.plain)["content"], native(s.plain, lora=FIRST)["content"]
    second = {"id": 1, "scale": 0.5}
    assert s.plain.post("/lora-adapters", [*FIRST, second])[1] == {"success": True}
    assert native(s.plain)["generation_settings"]["lora"] == [*FIRST, second]
    assert [row["scale"] for row in s.plain.get("/lora-adapters")[1]] == [1.0, 0.5]
    s.plain.post("/lora-adapters", FIRST)  # adapters that are not listed get 0
    assert native(s.plain)["content"] == changed and native(s.plain, lora=[])["content"] == base
    for wrong in (
        {"id": 0, "scale": 1.0},
        [{"id": 9, "scale": 1.0}],
        [{"id": 0}],
        [3],
        "x",
        [[]],
        [{"path": "../a.gguf", "scale": 1.0}],
    ):
        assert s.plain.post("/lora-adapters", wrong)[0] == 400
    assert native(s.plain)["content"] == changed
    assert s.plain.post("/lora-adapters", [])[0] == 200 and native(s.plain)["content"] == base
