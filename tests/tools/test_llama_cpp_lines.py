"""Command lines with llama.cpp's flags, as people paste them, run or print a one-line error."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jinja2
import pytest
from llama_cpp_lines import Run, answer, call, parse

from vkbackend.errors import InvalidArgument
from vkbackend.tools import bench
from vkbackend.tools.flags.built_in_templates import TEMPLATES
from vkbackend.tools.flags.environment import words_of_environment
from vkbackend.tools.flags.sweeps import lines_of, values_of


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return partial(call, capsys)


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
    assert "-sm row is -sm tensor" in log.read_text(encoding="utf-8")
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


def test_all_tokens_as_minus_one(run: Run) -> None:
    words = ("-p", "Once upon a time", "--temp", "1", "--seed", "3")
    texts = [answer(run, *words, "--top-k", k)["text"] for k in ("-1", "0")]
    assert texts[0] == texts[1]


def test_until_the_context_is_full(run: Run) -> None:
    words = ("-p", "Once upon a time", "-c", "40", "--ignore-eos", "--context-shift", "-n", "-2", "--json")
    code, out, err = run("generate", *words)
    assert code == 0, err
    assert json.loads(out)["finish_reason"] == "length"
