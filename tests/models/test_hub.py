"""Models can be loaded by name. A fake Hugging Face Hub answers the requests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FILES, PARTS, SECRET, Hub, fake_hub
from places import ROOT
from tiny_vision import write_projector

from vkbackend import LLM
from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.models.hub import chosen, fetch, fetch_projector, projectors


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    with fake_hub(tmp_path / "hf") as environment:
        yield environment


COMMANDS = """
import contextlib, io, json, sys
from vkbackend.tools.cli import main
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main("generate -dev numpy -n 4 -p Once --temp 0".split() + words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def generate(env: dict[str, str], *commands: list[str]) -> list[tuple[int, str, str]]:
    """Return the exit code, stdout and stderr of each command. All commands run in one new process, because
    huggingface_hub reads its environment on import."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        env=env, capture_output=True, text=True, encoding="utf-8", timeout=100, cwd=ROOT,
    )  # fmt: skip
    assert SECRET not in done.stdout + done.stderr and "Traceback" not in done.stdout + done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


WRONG = (
    (["-hf", "me/nothing"], "me/nothing does not exist or is private"),
    (["-hf", "me/demo:Q2_K"], "me/demo has no model 'Q2_K'; there are: demo-Q4_K_M-00001"),
    (["-hf", "me/demo", "-hff", "x.gguf"], "has no file 'x.gguf'"),
    (["-hf", "demo"], "'demo' is not a repository; expected user/repo"),
    (["-hf", "me/demo", "-m", "x"], "-m and -hf name a model each; give one"),
)


def test_a_model_is_downloaded_once_and_opens_offline(hub: dict[str, str]) -> None:
    first, again, *refused = generate(
        hub, ["-hf", "me/demo:Q8_0"], ["-hf", "me/demo:q8_0"], *(words for words, _ in WRONG)
    )
    assert first[0] == 0, first
    fetched = [line for line in Hub.asked if line.startswith("GET /me/demo/resolve")]
    assert len(fetched) == 1 and "demo-Q8_0.gguf" in fetched[0]
    assert again[1] == first[1]
    Hub.asked.clear()
    offline, nothing = generate({**hub, "HF_HUB_OFFLINE": "1"}, ["-hf", "me/demo"], ["-hf", "me/other"])
    assert offline[:2] == (0, first[1]) and not Hub.asked, offline
    assert nothing[0] == 2 and "me/other" in nothing[2].rstrip().rpartition("\n")[2]
    for (code, _, err), (_, said) in zip(refused, WRONG, strict=True):
        assert code == 2 and said in err.rstrip().rpartition("\n")[2], err


def test_an_interrupted_download_continues(hub: dict[str, str]) -> None:
    """The file is larger than 10 MB, the unit in which huggingface_hub writes."""
    FILES["big.gguf"] = bytes(range(256)) * (21 << 12)
    Hub.cut = 15 << 20
    code = "from vkbackend.models.hub import fetch; print(fetch('me/demo', 'big.gguf'))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=hub, capture_output=True, text=True, encoding="utf-8", cwd=ROOT
        )
        assert Path(done.stdout.strip()).read_bytes() == FILES["big.gguf"], done.stderr
    finally:
        del FILES["big.gguf"]
    assert any("bytes=10485760-" in line for line in Hub.asked), Hub.asked
    assert Hub.cut == 0


def test_no_connection_and_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(repo: str) -> dict[str, int]:
        raise OSError(f"refused, said {SECRET}\nand more")

    monkeypatch.setenv("HF_TOKEN", SECRET)
    with monkeypatch.context() as patch:  # a failed connection is not retried
        patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        patch.setenv("NO_PROXY", "*")
        with pytest.raises(
            VkbackendError, match=r"me/x cannot be .*127\.0\.0\.1:9: .*; connect this machine"
        ):
            fetch("me/x")
    monkeypatch.setattr("vkbackend.models.hub._online", refused)
    with pytest.raises(VkbackendError, match=r"me/x cannot be .*: refused, said \*\*\*; .*try again"):
        fetch("me/x")
    monkeypatch.setattr("vkbackend.models.hub._online", lambda repo: {"x-Q8_0.gguf": 1 << 60})
    with pytest.raises(VkbackendError, match=r"1152921504606846976 bytes are .* has \d+ free"):
        fetch("me/x")


def test_from_pretrained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    demo, fetched = ROOT / "models" / "demo" / "demo.gguf", list[tuple[str, str | None]]()
    monkeypatch.setattr(
        "vkbackend.models.llm.fetch", lambda name, file: fetched.append((name, file)) or str(demo)
    )
    with LLM.from_pretrained("me/demo", "demo-Q8_0.gguf", devices=["numpy"], n_ctx=64) as llm:
        assert llm.path == str(demo) and llm.n_ctx == 64
    assert fetched == [("me/demo", "demo-Q8_0.gguf")]
    projector = write_projector(tmp_path / "mmproj.gguf", 192)
    monkeypatch.setattr("vkbackend.models.llm.fetch_projector", lambda name, file: str(projector))
    with LLM.from_pretrained("me/demo", devices=["numpy"], n_ctx=64, mmproj="auto") as llm:
        assert llm.pictures is not None
    with pytest.raises(InvalidArgument, match="file"):
        LLM.from_pretrained("me/demo", 3)  # type: ignore[arg-type]


def test_the_chosen_file() -> None:
    sizes = {name: len(data) for name, data in FILES.items()} | {"mmproj-Q8_0.gguf": 1, "a.txt": 1}
    assert chosen("r", sizes, None, None) == chosen("r", sizes, "q4_k_m", None) == PARTS
    assert chosen("r", sizes, "Q8_0", None) == ["demo-Q8_0.gguf"]
    assert chosen("r", {"x-BF16.gguf": 1, "x-F16.gguf": 1}, "F16", None) == ["x-F16.gguf"]
    assert chosen("r", {"x.gguf": 1}, None, None) == ["x.gguf"]
    del sizes[PARTS[1]]
    with pytest.raises(InvalidArgument, match="lacks a part"):
        chosen("r", sizes, "Q4_K_M", None)
    with pytest.raises(InvalidArgument, match=r"no \.gguf"):
        chosen("r", {"a.txt": 1}, None, None)


def test_the_projector_of_a_model() -> None:
    sizes = dict.fromkeys(
        ["q4/x-Q4_0.gguf", "q4/mmproj-x-Q8_0.gguf", "mmproj-x-f16.gguf", "MMPROJ-bf16.gguf", "mmproj.txt"], 1
    )
    assert projectors(sizes, "q4/x-Q4_0.gguf") == [
        "q4/mmproj-x-Q8_0.gguf", "mmproj-x-f16.gguf", "MMPROJ-bf16.gguf",
    ]  # fmt: skip
    assert projectors(sizes, "x.gguf")[0] == "mmproj-x-f16.gguf"
    assert projectors({"x.gguf": 1}, "x.gguf") == []


def test_a_projector_is_fetched_with_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"x-Q8_0.gguf": 1, "mmproj-x-F16.gguf": 1}
    monkeypatch.setattr("vkbackend.models.hub._online", lambda repo: sizes)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, part: f"/{repo}/{part}")
    assert fetch_projector("me/x") == "/me/x/mmproj-x-F16.gguf"
    assert fetch("me/x:Q8_0") == "/me/x/x-Q8_0.gguf"
    del sizes["mmproj-x-F16.gguf"]
    assert fetch_projector("me/x") is None
