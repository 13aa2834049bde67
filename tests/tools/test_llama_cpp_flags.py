"""Each of llama.cpp's flags either runs or prints a one-line error. The file is long, because it tests the
flags of five programs with the same helpers."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from device_sets import QUICKEST, device_infos
from places import ROOT

from vkbackend.errors import InvalidArgument
from vkbackend.models.options import Options
from vkbackend.tools import bench
from vkbackend.tools.cli import build_parser, main, parse_line
from vkbackend.tools.console import _Console
from vkbackend.tools.flags.built_in_templates import TEMPLATES
from vkbackend.tools.flags.environment import words_of_environment
from vkbackend.tools.flags.llama_cpp import unescaped
from vkbackend.tools.flags.page import page
from vkbackend.tools.flags.sweeps import lines_of, values_of
from vkbackend.tools.flags.table import CLASSES, Flag, flags_of, table

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = main(
                [words[0], *(("-dev", *QUICKEST) if words[0] in ("generate", "chat") else ()), *words[1:]]
            )
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


def answer(run: Run, *words: str) -> dict[str, Any]:
    code, out, err = run("generate", "--temp", "0", "-n", "8", "--json", *words)
    assert code == 0, err
    return json.loads(out)


COMMANDS = ("generate", "chat", "serve", "bench", "perplexity")


def parse(*words: str) -> argparse.Namespace:
    return parse_line(words)[0]


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
    gbnf.write_text('root ::= "ye" "s"{2}\n')
    schema.write_text('{"enum": ["from a file"]}')
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


# Command lines with llama.cpp's flags: (command, arguments, the error's text or "" if the command runs).
LINES = [
    ("generate", "-ngl 99 -fa on -c 32768 --jinja", ""),
    ("generate", "-no-cnv --no-warmup", ""),
    ("generate", "-ctk q8_0 -ctv q8_0 -fa 1", ""),
    ("chat", "-cnv --color -p Hello", ""),
    ("chat", "-i --color -sys short --chat-template chatml", ""),
    ("generate", "-t 8 -tb 8 -b 2048 -ub 2048", ""),
    ("generate", "--n-cpu-moe 20", ""),
    ("generate", "--cpu-moe", ""),
    ("generate", "-ot .ffn_.*_exps.=CPU", ""),
    ("generate", "-sm row -ts 24,12 -mg 0 -dev Vulkan0,Vulkan0", ""),
    ("generate", "-sm layer -dev Vulkan0,Vulkan1", ""),
    ("generate", "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768", ""),
    ("generate", "--mlock --no-mmap --numa distribute", ""),
    ("generate", "--keep 64 --context-shift", ""),
    ("generate", "--mirostat 2 --mirostat-ent 5 --repeat-penalty 1.1 -s 42 --verbose-prompt", ""),
    ("serve", "-ngl 99 -fa on -c 32768 --jinja --host 0.0.0.0", ""),
    ("serve", "--host 0.0.0.0 --api-key sk-123 --alias qwen3", ""),
    ("serve", "-c 16384 -np 4 -cb --slots --metrics --no-mmap -t 8", ""),
    ("serve", "--temp 0.7 --top-p 0.8 --top-k 20 --min-p 0 --presence-penalty 1.5", ""),
    ("serve", "--reasoning-format deepseek --reasoning-budget 0 --jinja", ""),
    ("serve", '--jinja --chat-template-kwargs {"enable_thinking":false} -ub 2048 -b 2048', ""),
    ("serve", "--mmproj mmproj.gguf --image-max-tokens 512", ""),
    ("serve", "-md draft.gguf -ngld 99 --draft-max 16 --draft-min 1", ""),
    ("serve", "--spec-type ngram-mod --spec-draft-n-max 32", ""),
    ("serve", "-hf ggml-org/gpt-oss-20b-GGUF -c 0 -fa on --jinja", ""),
    ("serve", "-hf unsloth/Qwen3-30B-A3B-GGUF:UD-Q4_K_XL --n-cpu-moe 20", ""),
    ("serve", "--embedding --pooling mean -ub 8192", ""),
    ("serve", "--lora adapter.gguf", ""),
    ("serve", "--fit on --fit-ctx 4096 --swa-full --cache-ram 8192 --kv-unified", ""),
    ("serve", "-lv 4 --log-file x.log --no-webui --props --timeout 600 --threads-http 4", ""),
    ("serve", "--cache-reuse 256 --prio 2 --poll 50 --defrag-thold 0.1 --no-warmup", ""),
    ("serve", "--models-dir ./models --models-max 2", ""),
    ("serve", "-ctk q5_1 -ctv iq4_nl", ""),
    ("serve", "--no-context-shift --sleep-idle-seconds 600 --ctx-checkpoints 8", ""),
    ("serve", "--tools all --webui-mcp-proxy", "a client runs them"),
    ("bench", "-ngl 99 -fa 1 -p 64 -n 8 -r 1", ""),
    ("bench", "-fa 0,1 -ctk f16,q8_0 -ctv f16,q8_0 -d 0,64", ""),
    ("bench", "-sm row,layer -ts 1/1", ""),
    ("perplexity", "-c 128 --chunks 1 -b 2048", ""),
    ("generate", "--list-devices", ""),
]


def test_pasted_lines_parse_or_name_the_flag_to_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEBUG", "0")
    assert len(LINES) == 40
    for command, line, said in LINES[:-1]:
        try:
            parse(command, *line.split())
            assert not said, line
        except SystemExit:
            error = capsys.readouterr().err
            assert said and said in error and error.count("\n") == 1, (line, error)


def test_pasted_lines_that_run(run: Run, models: Path, tmp_path: Path) -> None:
    words = ("-p", "Once upon a time", "-n", "4", "--temp", "0")
    experts = ("-m", str(models / "stories-moe8x-Q4_0.gguf"))
    plain = run("generate", *words, *experts)
    for flags in (["-ncmoe", "1"], ["--cpu-moe"], ["-ncffn", "2", "-ub", "8192", "-b", "8192", "-t", "8"]):
        code, out, err = run("generate", *words, *experts, *flags)
        assert (code, out) == plain[:2], err
    assert "-ncffn 2 has no effect: no tensor of the model has such a name" in err
    assert "-ub 8192: prompts are computed 4096 tokens at a time" in err
    log = tmp_path / "x.log"
    code, out, err = run(
        "generate", *words, "-cmoe", "-sm", "row", "--log_file", str(log), "--display-prompt", "--temp", "-1"
    )
    assert code == 0 and out.startswith("Once upon a time")
    assert "-cmoe has no effect" in err and "-sm row is -sm tensor" in err and "--temp -1 is 0" in err
    assert "-sm row is -sm tensor" in log.read_text()
    code, out, _ = run("plan", *experts, "-dev", "numpy", "-cmoe", "-sm", "row")
    assert code == 0 and "-cmoe is -ot" in out and "-sm row is -sm tensor" in out
    code, out, err = run(
        "bench", *experts, "-dev", "numpy", "-p", "4", "-n", "0", "-r", "1", "-ub", "2,4", "-t", "8"
    )
    table = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert code == 0 and [row[-1].strip(" |") for row in table] == ["-ub", "---:", "2", "4"], out
    assert err.count("-t has no effect") == 1
    _, _, err = run("generate", *words, *experts, "-ncmoe", "2")
    assert r"-ncmoe 2 is -ot 'blk\.(0|1)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU'" in err


def test_templates_and_thoughts(run: Run) -> None:
    words = ("-st", "-n", "4", "--temp", "0", "-p", "Once upon a time")
    plain = run("chat", *words, "--chat-template", "{{ messages[0].content }}")
    assert plain[0] == 0
    assert plain[1] == run("chat", *words, "--chat-template", "{{ messages[0]['content'] }}")[1]
    args = parse(
        "serve", "--reasoning", "off", "--chat-template-kwargs", '{"a": 1}', "--reasoning-effort", "low"
    )
    assert args.chat_template_kwargs == {"enable_thinking": False, "a": 1, "reasoning_effort": "low"}
    assert args.notes[0] == "--reasoning off is --chat-template-kwargs '{\"enable_thinking\": false}'"
    assert parse("serve", "--reasoning-budget", "0").chat_template_kwargs == {"enable_thinking": False}


def test_built_in_templates() -> None:
    talk = [{"role": "system", "content": "S "}, {"role": "user", "content": "U"}]
    want = {
        "gemma": "<start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\n",
        "phi3": "<|system|>\nS <|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n",
        "zephyr": "<|system|>\nS <|endoftext|>\n<|user|>\nU<|endoftext|>\n<|assistant|>\n",
        "phi4": "<|im_start|>system<|im_sep|>S <|im_end|><|im_start|>user<|im_sep|>U<|im_end|>"
        "<|im_start|>assistant<|im_sep|>",
        "chatml": "<|im_start|>system\nS <|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        "llama3": "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    }
    assert set(want) == set(TEMPLATES)
    for name, text in want.items():
        template = jinja2.Environment(keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True)
        rendered = template.from_string(TEMPLATES[name]).render(messages=talk, add_generation_prompt=True)
        assert rendered == text, name


def test_variables_of_llama_cpp() -> None:
    """As in llama.cpp, environment variables act as flags, the command line has priority over them, and a
    switch has two names."""
    environ = {"LLAMA_ARG_CTX_SIZE": "64", "LLAMA_ARG_N_GPU_LAYERS": "9", "LLAMA_ARG_MODEL": "a.gguf",
               "LLAMA_ARG_NO_MMAP": "0", "LLAMA_ARG_ENDPOINT_SLOTS": "0", "LLAMA_ARG_UI": "on",
               "LLAMA_ARG_CPU_MOE": "false", "LLAMA_ARG_FLASH_ATTN": "on"}  # fmt: skip
    words, notes = words_of_environment("serve", ["-ngl", "3", "-hf", "a/b"], environ)
    assert sorted(words) == ["--ctx-size=64", "--flash-attn=on", "--no-slots", "--ui"]
    assert "LLAMA_ARG_N_GPU_LAYERS is set, and -ngl of the command line wins" in notes
    assert "LLAMA_ARG_MODEL is set, and -hf of the command line wins" in notes
    assert "--ctx-size comes from LLAMA_ARG_CTX_SIZE" in notes
    words, notes = words_of_environment("serve", [], {"LLAMA_API_KEY": "secret", "LLAMA_ARG_NO_UI": "0"})
    assert sorted(words) == ["--api-key=secret", "--no-ui"] and "secret" not in "".join(notes)
    assert words_of_environment("bench", [], environ) == ([], [])


def test_variables_reach_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "8")
    code, _, err = run("generate", "-p", "Once", "-n", "1")
    assert code == 0 and "--ctx-size comes from LLAMA_ARG_CTX_SIZE\n" in err
    monkeypatch.setenv("LLAMA_ARG_GRP_ATTN_N", "4")
    code, _, err = run("generate", "-p", "Once")
    assert code == 2 and "--grp-attn-n: the context is not extended this way; use --rope-scaling" in err
    assert "; --grp-attn-n comes from LLAMA_ARG_GRP_ATTN_N;" in err
    monkeypatch.delenv("LLAMA_ARG_GRP_ATTN_N")
    for value, said in (("many", "invalid int value: 'many'; --ctx-size comes"), ("-3", "--ctx-size=-3")):
        monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", value)
        code, _, err = run("generate", "-p", "Once")
        assert code == 2 and said in err and "; --ctx-size comes from LLAMA_ARG_CTX_SIZE" in err, err


def test_lists_of_bench() -> None:
    lines = lines_of(
        "bench -ctk f16,q8_0 -nkvo 0,1 -dev a/b -ts 1/1,3/1 -fa 0,1 -p 4,8 -ot x=CPU;y=CPU".split()
    )
    assert len(lines) == 8
    words, swept = lines[-1]
    assert words == "bench -ctk q8_0 -nkvo -dev a,b -ts 3/1 -fa 0,1 -p 4,8 -ot x=CPU,y=CPU".split()
    assert swept == {"-ctk": "q8_0", "-nkvo": "1", "-ts": "3/1"}
    [note] = parse(*"bench -dev a,b -ts 1/1".split()).notes
    assert note.startswith("-dev a,b is one test with all of them; in llama-bench a comma separates tests")
    assert lines_of(["bench", "-nkvo", "-mmp", "0"]) == [(["bench", "-nkvo", "--no-mmap"], {})]
    args = parse(*"bench -sm row,layer -ngl 1,2 -m x.gguf".split())
    assert [(line.split_mode, line.n_gpu_layers) for line in args.sweep] == [
        ("tensor", "1"), ("tensor", "2"), ("layer", "1"), ("layer", "2")]  # fmt: skip


def test_ranges_of_bench() -> None:
    ranges = {"4-7": "4 5 6 7", "4-16+4": "4 8 12 16", "16-64*2,3": "16 32 64 3", "5": "5", "f16": "f16"}
    for text, values in ranges.items():
        assert values_of("-p", text) == values.split(), text
    for text in ("8-64*1", "0-8*2", "1-9+0", "0-99999", "9-4"):
        with pytest.raises(InvalidArgument, match="range"):
            values_of("-p", text)
    assert [line.n_ubatch for line in parse(*"bench -ub 16-64*2".split()).sweep] == [16, 32, 64]
    assert [test.n_prompt for test in bench.tests_of(parse(*"bench -p 16-32+8 -n 0".split()))] == [16, 24, 32]


def test_hints_name_the_nearest_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """`--no-slots` would be the opposite."""
    with pytest.raises(SystemExit):
        parse("serve", "--slot", "--contex-shift", "--xyz")
    line = capsys.readouterr().err
    assert "--slot (did you mean --slots?), --contex-shift (did you mean --context-shift?), --xyz;" in line


def test_shares_without_devices_name_the_flag() -> None:
    with pytest.raises(InvalidArgument, match="name the devices, for example -dev 0,1"):
        Options("x.gguf", tensor_split=(1, 1))


def test_all_tokens_as_minus_one(run: Run) -> None:
    words = ("-p", "Once upon a time", "--temp", "1", "--seed", "3")
    texts = [answer(run, *words, "--top-k", k)["text"] for k in ("-1", "0")]
    assert texts[0] == texts[1]


def test_until_the_context_is_full(run: Run) -> None:
    words = ("-p", "Once upon a time", "-c", "40", "--ignore-eos", "--context-shift", "-n", "-2", "--json")
    code, out, err = run("generate", *words)
    assert code == 0, err
    assert json.loads(out)["finish_reason"] == "length"


def test_the_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            parse(command, "-h")
        text = re.sub(r"\s", "", capsys.readouterr().out)  # lines break at hyphens
        hidden = [flag.long_name for flag in flags_of(command) if flag.kind in ("none", "refused")]
        assert all(name in text for name in hidden) and "docs/llama-cpp.mdhasthereasons" in text


def test_the_page_lists_the_table() -> None:
    """This command updates the page: python -m vkbackend.tools.flags.page > docs/llama-cpp.md"""
    assert (ROOT / "docs" / "llama-cpp.md").read_text() == page()
