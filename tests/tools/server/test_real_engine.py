from __future__ import annotations

import http.client
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import HANG_S, Command, until

from vkbackend.models.llm import LLM
from vkbackend.ops import CELL_BLOCK
from vkbackend.tools.flags.text import demo_model

pytestmark = pytest.mark.no_vulkan

TEXT = "Once upon a time"
LETTERS = 'root ::= ("a" | "b" | "c" | " ")+'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Command]:
    command = Command(
        "--metrics", "-np", "2", "--slot-save-path", str(folder), "--temp", "0", "--alias", "tales"
    )
    yield command
    assert command.end() == 0, command.log


@pytest.fixture(scope="module")
def direct() -> Iterator[LLM]:
    with LLM(demo_model(), devices="numpy") as llm:
        yield llm


def test_the_text_equals_the_text_of_the_engine(server: Command, direct: LLM) -> None:
    expected = direct.generate(TEXT, 12, temperature=0)
    body = {"prompt": TEXT, "max_tokens": 12}
    answer = server.address.post("/v1/completions", body)[1]
    assert answer["choices"][0]["text"] == expected.text and answer["model"] == "tales"
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(expected.prompt_tokens) and usage["completion_tokens"] == 12
    events = server.address.events("/v1/completions", body | {"stream": True})
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == expected.text
    native = server.address.post("/completion", {"prompt": TEXT, "n_predict": 12, "return_tokens": True})[1]
    assert (native["content"], native["tokens"]) == (expected.text, expected.tokens)
    assert native["stop_type"] == "limit" and native["tokens_evaluated"] == len(expected.prompt_tokens)


@pytest.mark.wide
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
def test_a_prefix_is_found_after_a_restart(tmp_path: Path, end: signal.Signals) -> None:
    """An idle server has written its blocks, so SIGKILL loses none."""
    words = "the cat sat on a red house and then went to the big tree with mum and dad to play ball".split()
    body = {"prompt": " ".join(random.Random(3).choices(words, k=60)), "n_predict": 4, "temperature": 0}
    folder, said = tmp_path / "kv", []
    for n_restored in (0, 2):
        server = Command("--metrics", "--cache-ram", "64", "--cache-disk", str(folder))
        said.append(server.address.post("/completion", body)[1])
        line = f"vkbackend:n_blocks_restored_total {n_restored}\n"
        until(lambda address=server.address, line=line: line in address.get("/metrics")[1])  # type: ignore[misc]
        until(lambda: len(list(folder.glob("*/*.0"))) >= 2)
        server.process.send_signal(end)
        server.process.wait(HANG_S)
    assert 2 * CELL_BLOCK < said[0]["tokens_evaluated"] < 3 * CELL_BLOCK
    assert [answer["timings"]["cache_n"] for answer in said] == [0, 2 * CELL_BLOCK]
    assert said[0]["content"] == said[1]["content"]


def test_a_prefix_is_computed_once(server: Command) -> None:
    prompt = "The old man told the children a story about a dog that could swim across the river. " * 2
    body = {"prompt": prompt, "max_tokens": 2}
    server.address.post("/completions", body)
    usage = server.address.post("/completions", body)[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 32


def test_seeds_and_several_answers(server: Command) -> None:
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 1.5, "seed": 7, "n": 2}
    first, second = (server.address.post("/completions", body)[1]["choices"] for _ in range(2))
    assert [c["text"] for c in first] == [c["text"] for c in second]
    assert [c["index"] for c in first] == [0, 1] and first[0]["text"] != first[1]["text"]
    alone = server.address.post("/completions", body | {"n": 1, "seed": 8})[1]["choices"][0]
    assert alone["text"] == first[1]["text"]


def test_echo_and_logprobs(server: Command, direct: LLM) -> None:
    body = {"prompt": TEXT, "max_tokens": 3, "echo": True, "logprobs": 2}
    choice = server.address.post("/completions", body)[1]["choices"][0]
    expected = direct.generate(TEXT, 3, temperature=0, logprobs=2, prompt_logprobs=2)
    assert choice["text"] == TEXT + expected.text
    table, n = choice["logprobs"], len(expected.prompt_tokens)
    rows = table.pop("content")  # llama-server's, of generated tokens
    assert [row["logprob"] for row in rows] == table["token_logprobs"][n:]
    assert len({len(table[name]) for name in table}) == 1 and len(table["tokens"]) == n + 3
    assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
    assert expected.logprobs is not None
    assert table["token_logprobs"][n:] == pytest.approx([row.logprob for row in expected.logprobs], abs=1e-3)
    assert all(len(row) == 2 for row in table["top_logprobs"][1:])
    events = server.address.events("/completions", body | {"stream": True})[:-1]
    streamed = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    assert [token for part in streamed for token in part["tokens"]] == table["tokens"]
    assert [at for part in streamed for at in part["text_offset"]] == table["text_offset"]


def test_an_error_after_the_prompt_sets_the_status(server: Command) -> None:
    """The server sends the echoed prompt only together with the first token, so an error before that token
    can still set the status."""
    body = {"prompt": TEXT, "max_tokens": 2, "echo": True, "stream": True, "json_schema": {"type": "no such"}}
    status, answer, _ = server.address.post("/completions", body)
    assert status == 400 and "json_schema" in answer["error"]["message"]


def test_stop_strings(server: Command, direct: LLM) -> None:
    text = direct.generate(TEXT, 20, temperature=0).text
    word = text.split()[4]
    native = server.address.post("/completion", {"prompt": TEXT, "n_predict": 20, "stop": ["none", word]})[1]
    assert native["content"] == text[: text.index(word)]
    assert (native["stop_type"], native["stopping_word"]) == ("word", word)
    choice = server.address.post("/completions", {"prompt": TEXT, "max_tokens": 20, "stop": word})[1][
        "choices"
    ][0]
    assert (choice["text"], choice["finish_reason"]) == (native["content"], "stop")


def test_fields_of_llama_server(server: Command, direct: LLM) -> None:
    body = {
        "prompt": [TEXT, [432, 433]],
        "n_predict": 3,
        "response_fields": ["content", "timings/predicted_n", "no"],
    }
    answers = server.address.post("/completion", body)[1]
    assert len(answers) == 2 and all(set(answer) == {"content", "predicted_n"} for answer in answers)
    biased = {"prompt": TEXT, "n_predict": 1, "logit_bias": [[" upon", False], [433, -100]]}
    content = server.address.post("/completion", biased)[1]["content"]
    assert content.strip() != "upon"
    row = server.address.post("/completion", {"prompt": TEXT, "n_predict": 1, "n_probs": 3})[1]
    (probability,) = row["completion_probabilities"]
    assert (
        len(probability["top_logprobs"]) == 3 and bytes(probability["bytes"]).decode() == probability["token"]
    )
    mixed = server.address.post("/completion", {"prompt": [432, " upon"], "n_predict": 1})[1]
    assert mixed["tokens_evaluated"] == 1 + len(direct.tokenize(" upon", add_special=False))
    for name, value in (
        ("n_keep", -2),
        ("cache_prompt", 1),
        ("lora", [{"id": 0, "scale": 1.0}]),
        ("n_indent", "4"),
    ):
        status, answer, _ = server.address.post("/completion", {"prompt": TEXT, name: value})
        assert status == 400 and answer["error"]["param"] == name
    events = server.address.events("/completion", {"prompt": TEXT, "n_predict": 3, "stream": True})
    assert [event["stop"] for event in events] == [False] * 3 + [True]
    assert events[-1]["tokens_predicted"] == 3 and events[-1]["content"] == ""
    assert events[0]["tokens"] and events[-1]["timings"]["predicted_n"] == 3


def test_tokens(server: Command, direct: LLM) -> None:
    ids = direct.tokenize(TEXT, add_special=False)
    assert server.address.post("/tokenize", {"content": TEXT})[1]["tokens"] == ids
    with_bos = server.address.post("/tokenize", {"content": TEXT, "add_special": True})[1]["tokens"]
    assert with_bos == direct.tokenize(TEXT)
    pieces = server.address.post("/tokenize", {"content": "á", "with_pieces": True})[1]["tokens"]
    assert b"\xc3\xa1" in b"".join(
        bytes(piece["piece"]) if isinstance(piece["piece"], list) else piece["piece"].encode()
        for piece in pieces
    )
    assert server.address.post("/detokenize", {"tokens": ids})[1]["content"].strip() == TEXT
    assert server.address.post("/detokenize", {"tokens": [1 << 40]})[0] == 400


def test_slots_are_saved_restored_and_erased(server: Command, folder: Path) -> None:
    answer = server.address.post("/completion", {"prompt": TEXT, "n_predict": 4, "id_slot": 1})[1]
    assert answer["id_slot"] == 1
    status, saved, _ = server.address.post("/slots/1?action=save", {"filename": "one.bin"})
    assert status == 200 and saved["n_saved"] > 4
    assert saved["n_written"] == (folder / "one.bin").stat().st_size
    erased = server.address.post("/slots/1?action=erase", None)[1]
    assert erased == {"id_slot": 1, "n_erased": saved["n_saved"]}
    assert server.address.post("/slots/1?action=erase", None)[1]["n_erased"] == 0
    restored = server.address.post("/slots/1?action=restore", {"filename": "one.bin"})[1]
    assert restored["n_restored"] == saved["n_saved"]
    for path, body in (
        ("/slots/2?action=save", {"filename": "a"}), ("/slots/x?action=save", {"filename": "a"}),
        ("/slots/0?action=burn", {}), ("/slots/0?action=save", {"filename": "../a"}),
        ("/slots/0?action=save", {}), ("/slots/-1?action=erase", {}),
    ):  # fmt: skip
        assert server.address.post(path, body)[0] == 400, path
    assert server.address.post("/slots/0?action=restore", {"filename": "none"})[0] == 404
    (folder / "bad").write_bytes(b"no state")
    assert server.address.post("/slots/0?action=restore", {"filename": "bad"})[0] == 400


def test_slots_and_metrics_during_a_request(server: Command) -> None:
    sock = server.address.send("/completions", {"prompt": TEXT, "stream": True, "ignore_eos": True})
    sock.recv(1000)
    until(lambda: any(slot["is_processing"] for slot in server.address.get("/slots")[1]))
    sock.close()
    until(lambda: not any(slot["is_processing"] for slot in server.address.get("/slots")[1]))
    until(lambda: "llamacpp:requests_processing 0" in server.address.get("/metrics")[1])
    text = server.address.get("/metrics")[1]
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(names) == len(set(names)) and "llamacpp:tokens_predicted_total" in names
    assert server.address.get("/props")[1]["total_slots"] == 2
    assert server.address.get("/stats")[1]["devices"][0]["weights"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.2, "seed": 7, "stop": ["xyz"], "n": 2, "repeat_penalty": 1.3},
        pytest.param({"temperature": 0}, marks=pytest.mark.wide),
        pytest.param({"temperature": 1.2, "seed": 8, "grammar": LETTERS}, marks=pytest.mark.wide),
        pytest.param({"temperature": 1.2, "seed": 9, "top_k": 0}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_streams_continue_after_the_engine_is_killed(server: Command, options: dict[str, Any]) -> None:
    """The text is the same as without a loss: random numbers, penalties and grammars continue after the
    tokens that the client has."""
    body = {"prompt": TEXT, "max_tokens": 24, "ignore_eos": True} | options
    whole = server.address.post("/v1/completions", body)[1]["choices"]
    connection = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=HANG_S)
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
    answer = connection.getresponse()
    texts, n_events, was_killed = {0: "", 1: ""}, 0, False
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
        n_events += 1
        if n_events == 10:
            os.kill(server.engine(), signal.SIGKILL)
            was_killed = True
    assert was_killed and [texts[choice["index"]] for choice in whole] == [choice["text"] for choice in whole]
    assert "reopening it" in "".join(server.log)


@pytest.mark.parametrize("words,said", [
    (["--host", "0.0.0.0"], "--api-key-file"), (["--ssl-key-file", "a"], "--ssl-cert-file"),
    (["--ssl-key-file", "no", "--ssl-cert-file", "no"], "TLS"), (["--port", "70000"], "--port"),
    (["-m", "no.gguf"], "no.gguf"), (["--slot-save-path", "/dev/null/folder"], "cannot be made"),
    (["--api-key", ""], "API key"), (["-np", "0"], "--parallel"), (["--top-p", "-1"], "--top-p"),
])  # fmt: skip
def test_wrong_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from vkbackend.tools.cli import main

    assert main(["serve", "-dev", "numpy", *words]) == 2
    assert said in capsys.readouterr().err


def test_structured_answers(server: Command) -> None:
    """Without a schema the model would not write this format."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [7]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    forms: list[dict[str, object]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"json_schema": schema},
        {"grammar": 'root ::= "{\\"a\\":7}"'},
    ]
    for form in forms:
        answer = server.address.post("/completions", {"prompt": TEXT, "max_tokens": 60, **form})[1]
        assert json.loads(answer["choices"][0]["text"]) == {"a": 7}, form
    wrong: list[dict[str, object]] = [
        {"response_format": {"type": "yaml"}}, {"response_format": {}}, {"grammar": "root ::= ("},
        {"response_format": {"type": "json_schema"}}, {"json_schema": {"type": "no type"}},
        {"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, {"json_schema": "{"},
    ]  # fmt: skip
    for form in wrong:
        status, answer, _ = server.address.post("/completions", {"prompt": TEXT, "max_tokens": 4, **form})
        assert status == 400, (form, answer)


def test_a_stuck_request_does_not_affect_others(server: Command) -> None:
    forbid = {str(token): -1e9 for token in range(1000)}
    server.address.post("/completions", {"prompt": TEXT, "max_tokens": 2, "logit_bias": forbid})
    assert server.address.get("/health")[0] == 200


def test_infill_needs_infill_tokens(server: Command) -> None:
    status, answer, _ = server.address.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert status == 501 and "infill" in answer["error"]["message"]
    assert server.address.post("/infill", {"input_prefix": "a"})[0] == 400


def test_running_answers_finish_after_sigterm(server: Command) -> None:
    """This test is the last, because it ends the server."""
    connection = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=HANG_S)
    body = {"prompt": TEXT, "max_tokens": 30, "stream": True, "ignore_eos": True}
    connection.request("POST", "/completions", json.dumps(body))
    answer = connection.getresponse()
    answer.readline()
    server.process.send_signal(signal.SIGTERM)
    assert answer.read().endswith(b"data: [DONE]\n\n")
    assert server.process.wait(HANG_S) == 0, server.log
