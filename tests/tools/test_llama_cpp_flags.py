"""Each of llama.cpp's flags either runs or prints a one-line error."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from device_sets import device_infos
from llama_cpp_lines import Run, answer, call, parse
from places import ROOT

from vkbackend.errors import InvalidArgument
from vkbackend.models.options import Options
from vkbackend.tools.cli import build_parser
from vkbackend.tools.console import _Console
from vkbackend.tools.flags.llama_cpp import unescaped
from vkbackend.tools.flags.page import page
from vkbackend.tools.flags.table import CLASSES, Flag, flags_of, table


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return partial(call, capsys)


COMMANDS = ("generate", "chat", "serve", "bench", "perplexity")


def sample(flag: Flag) -> list[str]:
    words = next((word for word in flag.choices if word not in flag.neutral), "7")
    return [] if flag.switch else [words]


def test_every_flag_of_llama_cpp_has_a_class() -> None:
    assert {flag.kind for flag in table()} == set(CLASSES) and len(table()) > 400
    pairs = [(name, command) for flag in table() for name in flag.names for command in flag.commands]
    repeated = {pair for pair in pairs if pairs.count(pair) > 1}
    assert {name for name, _ in repeated} <= {"-np", "--parallel", "--mmap", "-mmp"}, repeated
    assert all(flag.text or flag.kind == "works" for flag in table())
    assert len(set(pairs)) > 900


@pytest.mark.parametrize("command", COMMANDS)
def test_each_flag_acts_as_in_the_table(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {kind: [flag for flag in flags_of(command) if flag.kind == kind] for kind in CLASSES}
    known = build_parser(command)[1]._option_string_actions
    for flag in flags["works"] + flags["mapped"]:
        assert set(flag.names) <= {*known, "-cnv", "-no-cnv", "--conversation", "--no-conversation"}, flag
    words = [word for flag in flags["none"] for name in flag.names for word in (name, *sample(flag))]
    notes = parse(command, *words).notes
    assert len(notes) == len(flags["none"])  # one note per flag
    for flag in flags["none"]:
        assert f"{flag.names[0]} has no effect: {flag.text}" in notes
        if not flag.switch and flag.value[0] == "[":
            assert parse(command, flag.names[0])
    words = [word for flag in flags["refused"] for name in flag.names for word in (name, *sample(flag))]
    with pytest.raises(SystemExit):
        parse(command, *words)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for flag in flags["refused"]:
        names = set(flag.names) - {"-sys"}  # the line shows -sys together with its value, under the long name
        assert flag.text in line and all(re.search(rf"[ ,]{name}[,:]", line) for name in names), flag
        for value in flag.neutral:
            assert "it is so" in parse(command, flag.names[-1], value).notes[0]


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


def test_with_and_without_a_conversation(run: Run) -> None:
    words = ("-p", "Once upon a time", "-n", "8", "--temp", "0")
    talk, plain = run("chat", *words, "-st"), run("generate", *words)
    assert run("generate", *words, "-cnv", "-st")[:2] == talk[:2]
    assert run("chat", *words, "-no-cnv")[:2] == plain[:2] == run("generate", *words, "-no-cnv")[:2]
    assert run("chat", "-sys", "-cnv", "-st", *words)[0] == 0


def test_structured_output(run: Run, tmp_path: Path) -> None:
    gbnf, schema = tmp_path / "yes.gbnf", tmp_path / "schema.json"
    gbnf.write_text('root ::= "ye" "s"{2}\n', encoding="utf-8")
    schema.write_text('{"enum": ["from a file"]}', encoding="utf-8")
    for flags, text in (
        (["--grammar", 'root ::= "no!"'], "no!"), (["--grammar-file", str(gbnf)], "yess"),
        (["-jf", str(schema)], '"from a file"'),
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


def test_a_prompt_from_a_pipe(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Once upon a time\n", encoding="utf-8")
    want = answer(run, "-f", str(path))["prompt_tokens"]
    read, write = os.pipe()
    os.write(write, b"Once upon a time\n")
    os.close(write)
    for stream in (open(read, encoding="utf-8"), path.open(encoding="utf-8")):
        with stream:
            monkeypatch.setattr(sys, "stdin", stream)
            assert answer(run)["prompt_tokens"] == want
            assert answer(run, "-p", "")["prompt_tokens"] == [1]
    with open(os.devnull, encoding="utf-8") as nothing:
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
    path.write_text(
        "{% if style is defined %}{{ style.word }}{% endif %}{{ messages[0].content }}", encoding="utf-8"
    )
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
        (["generate", "--tempp", "1"], "unknown flag --tempp (did you mean --temp?);"),
        (["chat", "--tempp", "1", "-qq", "--foo", "x"], "flags -qq, --tempp (did you mean --temp?), --foo;"),
        (["generate", "--swa-ful", "1"], "unknown flag --swa-ful;"),
        (["serve", "--mmproj", "x", "-otd", "9", "-cmoed"], "-otd, -cmoed: tensors of the draft"),
        (["serve", "-ub", "2048", "--list-devices", "--foo"], "unknown flag --foo;"),
        (["generate", "-st"], "-st: use `vkbackend chat`"),
        (["generate", "-fa", "maybe"], "'maybe': expected one of on, off, auto"),
        (["serve", "--numa", "some"], "'some': expected one of distribute, isolate, numactl"),
        (["serve", "-t", "many"], "'many': expected a number"),
        (["chat", "--chat-template", "odd"], "'odd' is not a built-in template; there are: chatml, gemma"),
        (["serve", "--reasoning-budget", "9"], "9: thoughts have no bound yet; give 0 (none) or -1"),
        (["generate", "-p", "a", "-f", "b"], "argument -f/--file: not allowed with argument -p/--prompt"),
        (["chat", "--json"], "--json is a flag of `vkbackend generate`"),
        (["generate", "--lora", "x"], "x: "),
        (["generate", "--lora-scaled", "x"], "--lora-scaled x: expected FILE:SCALE"),
        (["generate", "--grammar", "x ::=", "-j", "{}"], "-j/--json-schema: not allowed with argument"),
        (["generate", "--grammar-file", "/nowhere"], "'/nowhere' cannot be read"),
        (["generate", "m.gguf"], "pass a model with -m: `vkbackend generate -m m.gguf`"),
        (["info"], "one of the arguments"),
        (["genrate"], "unknown command 'genrate'; did you mean `vkbackend generate`?"),
        (["qqqqqq"], "unknown command 'qqqqqq';"),
        (["models/demo/demo.gguf"], "type `vkbackend generate -m models/demo/demo.gguf` or"),
        (["generate", "-n", "many"], "argument -n/--n-predict/--predict: invalid int value: 'many'"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_errors_are_one_line_with_the_flag_to_type(run: Run, words: list[str], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err, err


def test_argument_errors_print_no_table(run: Run) -> None:
    for words in (["-p", "a " * 50, "-c", "8"], ["-m", "/nowhere.gguf"], ["--top-p", "-1"]):
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


def test_hints_name_the_nearest_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """A hint of `--no-slots` would have the opposite meaning."""
    with pytest.raises(SystemExit):
        parse("serve", "--slot", "--contex-shift", "--xyz")
    line = capsys.readouterr().err
    assert "--slot (did you mean --slots?), --contex-shift (did you mean --context-shift?), --xyz;" in line


def test_shares_without_devices_name_the_flag() -> None:
    with pytest.raises(InvalidArgument, match="name the devices, for example -dev 0,1"):
        Options("x.gguf", tensor_split=(1, 1))


def test_the_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            parse(command, "-h")
        text = re.sub(r"\s", "", capsys.readouterr().out)  # lines break at hyphens
        hidden = [flag.long_name for flag in flags_of(command) if flag.kind in ("none", "refused")]
        assert all(name in text for name in hidden) and "docs/llama-cpp.mdhasthereasons" in text


def test_the_page_lists_the_table() -> None:
    """This command updates the page: python -m vkbackend.tools.flags.page > docs/llama-cpp.md"""
    assert (ROOT / "docs" / "llama-cpp.md").read_text(encoding="utf-8") == page()
