"""The command line prints help and results, sets exit codes, and ends with one clear line for invalid input.

Tests of streams, signals and the environment start a process. Most other tests call `main`, which saves a
second per test.
"""

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from device_sets import device_infos
from gguf_files import STRING, gguf_bytes, key
from places import ROOT

from vkbackend import __version__
from vkbackend.tools.cli import COMMANDS, build_parser, main

COMMAND = [sys.executable, "-m", "vkbackend.tools.cli"]
needs_device = pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")


def run(*args: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], env={**os.environ, **(env or {})}, capture_output=True, encoding="utf-8",
        timeout=110, cwd=ROOT, **({} if "input" in options else {"stdin": subprocess.DEVNULL}), **options,
    )  # fmt: skip


def call(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), open(os.devnull, encoding="utf-8") as nothing:
        with mock.patch.dict(os.environ, env or {}), mock.patch.object(sys, "stdin", nothing):
            try:
                code = main([*args])
            except SystemExit as end:
                code = int(end.code or 0)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stderr.rstrip("\n").rpartition("\n")[2]


def generate(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return (run if options else call)("generate", "-dev", "numpy", *args, **options)


@pytest.mark.parametrize("command", [[], ["devices"], ["generate"], ["info"]])
def test_help(command: list[str]) -> None:
    result = (call if command else run)(*command, "--help", env={"COLUMNS": "200"})
    assert result.returncode == 0 and result.stdout.startswith("usage: vkbackend") and not result.stderr


def test_every_option_of_generate_says_its_default_or_effect() -> None:
    text = call("generate", "--help", env={"COLUMNS": "300"}).stdout
    wanted = (
        "-m --model -p --prompt -f --file -n --n-predict --temp --top-k --top-p --min-p --repeat-penalty "
        "--repeat-last-n -s --seed -dev --device -ts --tensor-split -c --ctx-size -ub --ubatch-size -ctk "
        "--cache-type-k -ctv --cache-type-v --ignore-eos --json"
    )
    entries = re.split(r"\n  (?=-)", text)[1:]
    for option in wanted.split():
        [entry] = [e for e in entries if re.match(rf"(.*, )?{option}(?![\w-])", e)]
        assert "(default: " in entry or re.search(r"--(ignore-eos|json|file)\b", entry), entry
        assert len(entry.partition("  ")[2].strip()) > 10, entry


def test_flags_of_experiments_come_last() -> None:
    flags = {"--split-policy", "--submit-ahead", "--reduce-provider", "--reduce-signal", "--reduce-type"}
    having = set()
    for name in COMMANDS:
        parser = build_parser(name)[1]
        if flags & set(parser._option_string_actions):
            having.add(name)
            *others, last = (group._group_actions for group in parser._action_groups if group._group_actions)
            assert parser._action_groups[-1].title == "experiments" and flags & set(_flags_of(last))
            assert not flags & {flag for actions in others for flag in _flags_of(actions)}, name
    assert having == {
        "generate",
        "chat",
        "embedding",
        "serve",
        "bench",
        "sweep",
        "perplexity",
        "plan",
        "export",
    }


def _flags_of(actions: list[argparse.Action]) -> list[str]:
    return [flag for action in actions for flag in action.option_strings]


def test_version_and_wrong_usage() -> None:
    assert run("--version").stdout == f"vkbackend {__version__}\n"
    for args in ([], ["nonsense"], ["generate", "--nonsense"], ["generate", "-n", "many"], ["info"],
                 ["generate", "-p", "a", "-f", "b"]):  # fmt: skip
        result = call(*args)
        assert result.returncode == 2 and "error: " in last_line(result) and not result.stdout
    for args in (["info", "x.gguf", "-t", "8"], ["bench", "-zz"]):
        result = call(*args)
        assert result.stderr.startswith(f"vkbackend {args[0]}: error: unknown flag -")
        assert result.stderr.count("\n") == 1


def test_scripts_and_the_package_run_by_module_name(tmp_path: Path) -> None:
    for words, cwd in ((["vkbackend.tools.model_info"], ROOT), (["vkbackend", "info"], ROOT),
                       (["vkbackend", "info"], tmp_path)):  # fmt: skip
        result = subprocess.run(
            [sys.executable, "-m", *words, "-h"], capture_output=True, text=True, encoding="utf-8", cwd=cwd
        )
        assert result.returncode == 0 and "usage: vkbackend info" in result.stdout, result.stderr


@needs_device
def test_devices() -> None:
    listed = json.loads(call("devices", "--json").stdout)
    assert [d["index"] for d in listed] == list(range(len(listed)))
    keys = "index name uuid vendor driver driver_version type heaps features limits"
    assert all(set(keys.split()) <= set(d) for d in listed)
    table = run("devices")
    assert table.returncode == 0 and not table.stderr
    assert all(d["uuid"] in table.stdout for d in listed)


def test_generate_streams_text_to_stdout_and_the_rest_to_stderr() -> None:
    args = ("-p", "Once upon a time", "-n", "12", "--temp", "0")
    result = generate(*args, env={})
    assert result.returncode == 0, result.stderr
    for part in ("embedded demo model", "loading", "memory in MiB", "KV cache", "numpy"):
        assert part in result.stderr
    assert re.search(r"prompt +\d+ tokens +[\d.]+ ms +[\d.]+ tokens/s", result.stderr)
    assert re.search(r"decode +11 tokens +[\d.]+ ms +[\d.]+ tokens/s", result.stderr)
    assert "reduce" not in result.stderr
    assert "is full" not in result.stderr
    full = generate("-p", "Once", "-c", "8", "--ignore-eos")
    assert last_line(full) == "ended  because the context of 8 tokens is full (-c)"
    in_json = generate(*args, "--json")
    [line] = in_json.stdout.splitlines()
    answer = json.loads(line)
    assert answer["text"] + "\n" == result.stdout and len(answer["text"]) > 10
    assert (
        len(answer["tokens"]) == 12
        and answer["prompt_tokens"][0] == 1
        and answer["finish_reason"] == "length"
    )
    assert len(answer["devices"]) == 1 and answer["memory"][0]["weights"] > 10**6
    timings = answer["timings"]
    assert timings["prompt_n"] == len(answer["prompt_tokens"]) and timings["decode_n"] == 11
    assert timings["prompt_tokens_per_second"] > 0 < timings["decode_tokens_per_second"]
    assert {"n_reduces", "reduce_us", "prompt_ms", "decode_ms"} <= set(timings)


def test_two_devices_report_reduces_and_a_seed_repeats_the_text(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once upon a time\n", encoding="utf-8")
    args = ("-dev", "numpy,numpy", "-n", "10", "-s", "7", "--json", "-c", "0", "-ctk", "f32", "-ctv", "f32")
    first, second, stdin = (
        generate(*args, "-p", "Once upon a time", "-ts", "3:1"),
        generate(*args, "-f", str(prompt), "-ts", "3,1"),
        generate(*args, "-f", "-", "-ts", "3/1", input="Once upon a time"),
    )
    assert first.returncode == second.returncode == stdin.returncode == 0, first.stderr
    answers = [json.loads(result.stdout) for result in (first, second, stdin)]
    assert answers[0]["tokens"] == answers[1]["tokens"] == answers[2]["tokens"]
    assert (
        answers[0]["seed"] == 7
        and answers[0]["timings"]["n_reduces"] > 0 < answers[0]["timings"]["reduce_us"]
    )
    weights = [m["weights"] for m in answers[0]["memory"]]
    assert len(weights) == 2 and weights[0] > 1.5 * weights[1]


def test_control_tokens_of_a_prompt() -> None:
    args = ("-p", "Once</s>", "-n", "1", "--json")
    parsed = json.loads(generate(*args).stdout)["prompt_tokens"]
    plain = json.loads(generate(*args, "--no-parse-special").stdout)["prompt_tokens"]
    assert parsed[-1] == 2 and 2 not in plain


def test_info(tmp_path: Path) -> None:
    from vkbackend.tools.flags.text import demo_model

    result = call("info", demo_model())
    assert (
        result.returncode == 0
        and "token_embd.weight" in result.stdout
        and "llama.block_count" in result.stdout
    )
    answer = json.loads(call("info", demo_model(), "--json").stdout)
    assert answer["metadata"]["general.architecture"] == "llama"
    names = {t["name"]: t for t in answer["tensors"]}
    assert names["output_norm.weight"]["type"] == "f32"
    n_tokens = len(answer["metadata"]["tokenizer.ggml.tokens"])
    assert names["token_embd.weight"]["shape"][0] == n_tokens > 100


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "esc\x1b[31m.gguf"
    name = "red \x1b[31m \x07 \x9b2J \r over [bold]markup[/bold]"
    path.write_bytes(gguf_bytes([key("general.architecture", STRING, "\x1b]0;title\x07"),
                                 key("general.name", STRING, name)]))  # fmt: skip
    shown = run("info", str(path))
    assert shown.returncode == 0 and r"red \x1b[31m \x07 \x9b2J \r over [bold]markup[/bold]" in shown.stdout
    as_json = call("info", str(path), "--json")
    assert json.loads(as_json.stdout)["metadata"]["general.name"] == name
    failed = generate("-m", str(path))
    assert failed.returncode == 2
    for text in (shown.stdout, as_json.stdout, failed.stdout, failed.stderr):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text), text


def check_error(result: subprocess.CompletedProcess[str], pattern: str) -> None:
    assert result.returncode == 2 and not result.stdout and "Traceback" not in result.stderr, result.stderr
    assert last_line(result).startswith("error: ") and re.search(pattern, last_line(result)), result.stderr


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (["-m", "/nowhere/model.gguf"], "[/\\\\]nowhere[/\\\\]model.gguf: no such file"),
        (["-m", "."], "directory"),
        (["-m", "README.md"], "GGUF"),
        (["-m", ""], "--model=''"),
        (["--temp", "nan"], "--temp=nan"),
        (["--top-p", "1.5"], "--top-p=1.5"),
        (["--min-p", "-0.1"], "--min-p=-0.1"),
        (["--top-k", "2147483649"], "--top-k=2147483649"),
        (["--repeat-penalty", "0"], "--repeat-penalty=0"),
        (["--repeat-last-n", "-2"], "--repeat-last-n=-2"),
        (["-s", "-2"], "--seed=-2"),
        (["-n", "-3"], "n-predict=-3"),
        (["-c", "-1"], "--ctx-size=-1"),
        (["-ub", "-1"], "--ubatch-size=-1"),
        (["-ctk", "q9"], "--cache-type-k='q9'"),
        (["--snapshots", "-1"], "--snapshots=-1"),
        (["-p", "Once upon a time " * 9, "-c", "8"], "the context holds 8"),
        (["-f", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (["-dev", ""], "--device="),
        (["-dev", "numpy,,numpy"], "device"),
        (["-dev", "no such device"], "no such device|no Vulkan"),
        (["-ts", "1,1"], "2 shares for 1 devices"),
        (["-dev", "numpy,numpy", "-ts", "1"], "1 shares for 2 devices"),
        (["-dev", "numpy,numpy", "-ts", "0,0"], "above 0"),
        (["-dev", "numpy,numpy", "-ts", "-1,2"], "-1"),
        (["-dev", "numpy,numpy", "-ts", "nan,2"], "nan"),
        (["-dev", "numpy,numpy", "-ts", "a,2"], "'a'"),
    ],
    ids=repr,
)  # fmt: skip
def test_bad_input(args: list[str], pattern: str) -> None:
    result = generate("-n", "4", *args, **({"env": {}} if args == ["-m", "."] else {}))
    check_error(result, pattern)
    assert "/?" not in result.stderr


def test_damaged_files(tmp_path: Path) -> None:
    from vkbackend.tools.flags.text import demo_model

    whole = Path(demo_model()).read_bytes()
    path = tmp_path / "model.gguf"
    cases = {
        whole[:20]: "shorter than",
        whole[: len(whole) // 2]: "truncated|beyond|past",
        b"GGUF\x63\0\0\0" + whole[8:]: "version 99",
        b"": "GGUF|empty|shorter than",
    }
    for data, pattern in cases.items():
        path.write_bytes(data)
        check_error(generate("-m", str(path)), pattern)
        check_error(call("info", str(path)), pattern)


def test_no_device_and_no_loader(tmp_path: Path) -> None:
    no_loader = tmp_path / "path"
    (no_loader / "vulkan").mkdir(parents=True)
    (no_loader / "vulkan" / "__init__.py").write_text(
        "raise OSError('Cannot find Vulkan SDK version.')", encoding="utf-8"
    )
    env = {"VK_DRIVER_FILES": "/nowhere.json", "VK_ICD_FILENAMES": "/nowhere.json"}
    check_error(run("devices", env=env), "VK_DRIVER_FILES names '/nowhere.json', which|Vulkan loader")
    # The package `vulkan` raises this error if dlopen finds no libvulkan.
    without = run("generate", "-n", "1", env={"PYTHONPATH": str(no_loader)})
    check_error(without, "no Vulkan loader.*apt-get install")
    numpy = generate("-n", "1", env={"PYTHONPATH": str(no_loader)})
    assert numpy.returncode == 0, numpy.stderr


def test_a_missing_driver_file_among_others_is_named() -> None:
    set_to = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    if not set_to:
        pytest.skip("the environment names no drivers")
    done = run("generate", "--list-devices", env={"VK_DRIVER_FILES": f"/nowhere.json:{set_to}"})
    assert done.returncode == 0 and "index" in done.stdout
    assert "note: VK_DRIVER_FILES names '/nowhere.json', which does not exist" in done.stderr


def test_debug_shows_the_traceback_before_the_last_line() -> None:
    result = call("generate", "-dev", "numpy", "--top-p", "-1", env={"DEBUG": "1"})
    assert result.returncode == 2 and "Traceback" in result.stderr and last_line(result).startswith("error: ")
    for name in ("DEBUG", "VKBACKEND_TIMEOUT"):
        check_error(call("generate", "-dev", "numpy", "-n", "1", env={name: "much"}), f"{name}='much'")


def restore_interrupts() -> None:
    """Enable SIGINT again, because background jobs of a shell and their children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupt() -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "-dev", "numpy", "-n", "-1", "-c", "100000", "--ignore-eos", "-p", "Once"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        encoding="utf-8", cwd=ROOT, preexec_fn=restore_interrupts,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and err.rstrip().endswith("interrupted")


def test_a_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "-dev", "numpy", "-n", "-1", "-c", "100000", "--ignore-eos", "-p", "Once"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(20)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 141 and "Traceback" not in err and "BrokenPipe" not in err


def test_a_closed_pipe_ends_tables_and_text_alike() -> None:
    line = (
        f"{sys.executable} -m vkbackend.tools.cli info models/demo/demo.gguf | true; echo ${{PIPESTATUS[0]}}"
    )
    result = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert result.stdout == "141\n" and not result.stderr


def test_only_the_command_that_is_asked_for_is_imported() -> None:
    code = "import sys; from vkbackend.tools.cli import main; main(['info', 'models/demo/demo.gguf']); "
    code += "print(*sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, encoding="utf-8"
    ).stdout
    assert "vkbackend.tools.model_info" in shown and "vkbackend.tools.bench" not in shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "command",
    [pytest.param("info models/demo/demo.gguf", marks=pytest.mark.wide), "generate -dev numpy -n 2 -p Once"],
)
def test_stdout_that_cannot_be_written(command: str) -> None:
    line = f"{sys.executable} -m vkbackend.tools.cli {command}"
    full = subprocess.run(
        ["bash", "-c", f"{line} >/dev/full"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8"
    )
    assert full.returncode == 2 and "Traceback" not in full.stderr and "Exception" not in full.stderr
    assert last_line(full).startswith("error: the output cannot be written")
    if command.startswith("generate"):
        return
    closed = subprocess.run(
        ["bash", "-c", f"{line} >&-"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8"
    )
    assert closed.returncode == 0, closed.stderr
    silent = subprocess.run(
        ["bash", "-c", f"{line} 2>&-"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8"
    )
    assert silent.returncode == 0 and silent.stdout


def test_every_variable_is_documented() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "vkbackend").rglob("*.py"))
    tests = "".join(
        (ROOT / "tests" / name).read_text(encoding="utf-8") for name in ("conftest.py", "support/places.py")
    )
    documented = set(
        re.findall(r"VKBACKEND_[A-Z_]+", (ROOT / "docs" / "env_vars.md").read_text(encoding="utf-8"))
    )
    assert set(re.findall(r"VKBACKEND_[A-Z_]+", code)) <= documented
    assert set(re.findall(r"VKBACKEND_[A-Z_]+", tests)) <= documented
