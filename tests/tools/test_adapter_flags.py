"""Test the flags of LoRA adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_server_adapters import demo_adapters

from vkbackend.tools.cli import main, parse
from vkbackend.tools.flags.text import demo_model

pytestmark = pytest.mark.no_vulkan


def test_values(tmp_path: Path) -> None:
    (tmp_path / "a=b.gguf").touch()
    words = ["--lora", f"x.gguf,sql=y.gguf,{tmp_path}/a=b.gguf", "--lora-scaled", "z.gguf:-0.5,n=w.gguf:2"]
    args, _ = parse(["generate", *words])
    assert args.lora == (
        ("x.gguf", 1.0), ("sql", "y.gguf", 1.0), (f"{tmp_path}/a=b.gguf", 1.0), ("z.gguf", -0.5),
        ("n", "w.gguf", 2.0),
    )  # fmt: skip


def test_the_flags_change_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = demo_adapters(tmp_path)["first"]

    def text(*words: str) -> str:
        prompt = ("-p", "Once upon a time", "-n", "8", "--temp", "0", "-dev", "numpy")
        assert main(["generate", *prompt, *words]) == 0
        out, err = capsys.readouterr()
        assert ("of these adapters" in err) == bool(words)  # the table of memory
        return out

    base = text()
    assert text("--lora", str(path)) != base
    assert text("--lora", str(path), "--lora-init-without-apply") == base
    assert text("--lora-scaled", f"{path}:0") == base
    for words in ([], ["--lora", str(path)]):
        assert main(["plan", "-m", demo_model(), "-dev", "numpy", *words]) == 0
        out = capsys.readouterr().out
        assert ("of these adapters" in out) == ("+ adapters" in out) == bool(words)
    assert main(["generate", "--lora", str(tmp_path / "none.gguf"), "-dev", "numpy", "-p", "a"]) == 2
    assert "none.gguf" in capsys.readouterr().err
