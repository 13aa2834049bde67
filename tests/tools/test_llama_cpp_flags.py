"""llama.cpp's flags: each one runs, and errors are one line."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device_sets import device_infos

from vkbackend.tools.cli import main
from vkbackend.tools.console import _Console
from vkbackend.tools.flags.llama_cpp import WITHOUT_EFFECT, unescaped

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = main(
                [words[0], *(("-dev", "numpy") if words[0] in ("generate", "chat") else ()), *words[1:]]
            )
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


def answer(run: Run, *words: str) -> dict[str, Any]:
    code, out, err = run("generate", "--temp", "0", "-n", "8", "--json", *words)
    assert code == 0, err
    return json.loads(out)


def test_flags_without_effect_are_told_in_a_line_each(run: Run) -> None:
    words: list[str] = []
    for flags, value, _ in WITHOUT_EFFECT:
        for flag in flags:
            words += (flag,) if value is None else (flag, "on" if value[0] == "[" else "1")
    words.append("-fa")
    code, out, err = run("generate", "-p", "Once", "-n", "1", *words)
    assert code == 0 and out, err
    reported = re.findall(r"^(-\S+) has no effect: .{10,}$", err, re.MULTILINE)
    assert reported == [word for word in words if word.startswith("-")]
    assert {"-t", "-fa", "--mlock", "--jinja"} <= set(reported)


def test_batches_and_load_modes(run: Run) -> None:
    whole = answer(run, "-p", "Once upon a time, there was")
    cut = answer(run, "-p", "Once upon a time, there was", "-b", "2", "-lm", "none")
    assert whole["tokens"] == cut["tokens"]
    assert cut["memory"][0]["scratch"] < whole["memory"][0]["scratch"]
    assert run("generate", "-b", "0")[0] == 2 and "--batch-size=0" in run("generate", "-b", "0")[2]
    _, _, err = run("generate", "-lm", "mlock", "-p", "a", "-n", "1")
    assert "-lm mlock: weights are mapped\n" in err
    assert "expected one of auto, none" in run("generate", "-lm", "fast")[2]


def test_reverse_prompts_end_the_text(run: Run) -> None:
    text = answer(run, "-p", "Once upon a time")["text"]
    cut = answer(run, "-p", "Once upon a time", "-r", text[9:12], "-r", "never there")
    assert cut["text"] == text[: text.index(text[9:12])] and cut["finish_reason"] == "stop"
    _, out, _ = run("chat", "-p", "Once upon a time", "-st", "-n", "8", "--temp", "0", "-r", text[9:12])
    assert out.strip() == cut["text"].strip()


def test_escapes(run: Run) -> None:
    assert unescaped(r"a\n\t\\n\"\'\x41\xc3\xa9\q\r" + "\\") == "a\n\t\\n\"'Aé\\q\r\\"
    line = answer(run, "-p", r"a\nb", "-e")["prompt_tokens"]
    assert line == answer(run, "-p", "a\nb")["prompt_tokens"] == answer(run, "-p", r"a\nb")["prompt_tokens"]
    assert line != answer(run, "-p", r"a\nb", "--no-escape")["prompt_tokens"]


def test_a_conversation_and_none(run: Run) -> None:
    words = ("-p", "Once upon a time", "-n", "8", "--temp", "0")
    talk, plain = run("chat", *words, "-st"), run("generate", *words)
    assert run("generate", *words, "-cnv", "-st")[:2] == talk[:2]
    assert run("chat", *words, "-no-cnv")[:2] == plain[:2] == run("generate", *words, "-no-cnv")[:2]
    assert run("chat", "-sys", "-cnv", "-st", *words)[0] == 0


def test_structured_output(run: Run, tmp_path: Path) -> None:
    gbnf, schema = tmp_path / "yes.gbnf", tmp_path / "schema.json"
    gbnf.write_text('root ::= "ye" "s"{2}\n')
    schema.write_text('{"enum": ["from a file"]}')
    for flags, text in (
        (["--grammar", 'root ::= "no!"'], "no!"), (["--grammar-file", str(gbnf)], "yess"),
        (["-j", '{"const": 12}'], "12"), (["--json-schema", '{"const": null}'], "null"),
        (["-jf", str(schema)], '"from a file"'), (["--json-schema-file", str(schema)], '"from a file"'),
        (["--regex", "a{3}"], "aaa"),
    ):  # fmt: skip
        code, out, err = run("generate", "-p", "Once", "-dev", "numpy", "-n", "20", *flags)
        assert (code, out) == (0, f"{text}\n"), err
    code, out, _ = run("chat", "-st", "-p", "Hi", "-dev", "numpy", "-n", "20", "-j", '{"const": 12}')
    assert code == 0 and out.strip() == "12"
    code, out, err = run("generate", "-p", "Once", "-dev", "numpy", "-j", '{"not": {}}')
    assert code == 2 and "not" in err.splitlines()[-1] and out.strip() == ""


def test_layers_and_penalties_and_temperature(run: Run) -> None:
    words = ("-ngl", "-1", "--temperature", "0", "--repeat-last-n", "-1", "--samplers", "top_k;temperature")
    assert answer(run, "-p", "Once", *words, "-l", "5-inf")["text"]


def test_list_devices(run: Run) -> None:
    if not device_infos():
        pytest.skip("no Vulkan device is present")
    code, out, _ = run("generate", "--list-devices")
    assert code == 0 and all(info.uuid in out for info in device_infos())
    assert out.replace("devices", "").strip() == run("devices")[1].strip()


def test_a_prompt_that_is_piped_in(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Once upon a time\n")
    want = answer(run, "-f", str(path))["prompt_tokens"]
    read, write = os.pipe()
    os.write(write, b"Once upon a time\n")
    os.close(write)
    for stream in (open(read), path.open()):
        with stream:
            monkeypatch.setattr(sys, "stdin", stream)
            assert answer(run)["prompt_tokens"] == want
            assert answer(run, "-p", "")["prompt_tokens"] == [1]
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert answer(run)["prompt_tokens"] == [1]


def test_prompt_cache(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    words = ("-p", "Once upon a time", "--prompt-cache", str(path))
    first = answer(run, *words)
    kept = path.read_bytes()
    second = answer(run, "-p", "Once upon a time there", "--prompt-cache", str(path), "--prompt-cache-ro")
    assert first["timings"]["prompt_n"] > 3 > second["timings"]["prompt_n"] > 0
    assert path.read_bytes() == kept
    assert answer(run, *words)["tokens"] == first["tokens"]
    path.write_bytes(b"something else")
    code, out, err = run("generate", *words)
    assert code == 2 and not out and "memory in MiB" not in err


def test_chat_template_kwargs(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% if style is defined %}{{ style.word }}{% endif %}{{ messages[0].content }}")
    words = ("--chat-template-file", str(path), "-st", "-n", "6", "--temp", "0")
    _, plain, _ = run("chat", *words, "-p", "Once upon a time")
    given = ("--chat-template-kwargs", '{"style": {"word": "Once "}}')
    _, out, _ = run("chat", *words, "-p", "upon a time", *given)
    assert out == plain
    for bad in ("[]", "{"):
        code, _, err = run("chat", "--chat-template-kwargs", bad)
        assert code == 2 and "expected a JSON object" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--tempp", "1"], "unknown flag --tempp; the nearest one is --temp;"),
        (["generate", "-tem", "1"], "unknown flag -tem; the nearest one is -"),
        (["generate", "-st"], "-st is a flag of `vkbackend chat`"),
        (["chat", "--json"], "--json is a flag of `vkbackend generate`"),
        (["generate", "--lora", "x"], "--lora: adapters are not supported yet; merge it"),
        (["generate", "--grammar", "x ::=", "-j", "{}"], "-j/--json-schema: not allowed with argument"),
        (["generate", "--grammar-file", "/nowhere"], "'/nowhere' cannot be read"),
        (["generate", "m.gguf"], "pass a model with -m: `vkbackend generate -m m.gguf`"),
        (["info"], "one of the arguments"),
        (["genrate"], "unknown command 'genrate'; did you mean `vkbackend generate`?"),
        (["qqqqqq"], "unknown command 'qqqqqq';"),
        (["models/demo/demo.gguf"], "type `vkbackend generate -m models/demo/demo.gguf` or"),
        (["generate", "-n", "many"], "argument -n/--n-predict: invalid int value: 'many'"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_wrong_is_one_line_that_says_what_to_type(run: Run, words: list[str], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err, err


def test_no_table_stands_in_front_of_an_argument_error(run: Run) -> None:
    for words in (["-p", "a " * 50, "-c", "8"], ["-m", "/nowhere.gguf"], ["--temp", "-1"]):
        code, out, err = run("generate", *words)
        assert code == 2 and not out and "memory" not in err and "devices" not in err


def test_info_takes_a_model_by_flag(run: Run) -> None:
    path = "models/demo/demo.gguf"
    assert run("info", "-m", path) == run("info", path)
    assert json.loads(run("info", "--json", "-m", path)[1])["files"]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_uuids_never_wrap(width: int) -> None:
    if not (infos := device_infos()):
        pytest.skip("no Vulkan device is present")
    from vkbackend.tools.flags.present import show_devices

    file = io.StringIO()
    show_devices(infos, _Console(file=file, width=width))
    lines = file.getvalue().split("\n")
    for info in infos:
        [line] = [line for line in lines if info.uuid in line]
        assert len(line.rstrip()) <= width
