"""Files in a folder whose path has more than 260 characters. Windows needs the prefix `\\\\?\\` for it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from systems import WINDOWS

from vkbackend import LLM, cache_folder
from vkbackend.errors import GGUFError, StateError
from vkbackend.models.engine.cache.block_files import BlockFiles
from vkbackend.models.gguf.parts import cut, merge_gguf, split_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.cli import main
from vkbackend.tools.flags.text import demo_model

pytestmark = pytest.mark.no_vulkan

DEVICE = "-dev", "numpy"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = Path(("\\\\?\\" if WINDOWS else "") + str(tmp_path), *["ein Ordner für Modelle" * 3] * 5)
    path.mkdir(parents=True)
    assert len(str(path)) > 300
    return path


@pytest.fixture
def model(folder: Path) -> Path:
    return Path(shutil.copy(demo_model(), folder / "Märchen.gguf"))


def test_a_model_and_a_saved_state(model: Path) -> None:
    state = model.with_name("a.state")
    with LLM(model, devices=["numpy"], n_ctx=64) as llm:
        text = llm.generate("Once", 4, temperature=0, slot=0).text
        tokens = llm.save_state(state)
        llm.erase_slot(0)
        assert llm.load_state(state) == tokens
        with pytest.raises(StateError, match="cannot be read"):
            llm.load_state(state.with_name("b.state"))
    with LLM(demo_model(), devices=["numpy"], n_ctx=64) as llm:
        assert llm.generate("Once", 4, temperature=0).text == text


def test_a_model_in_parts(model: Path) -> None:
    with GGUF.open(model) as gguf:
        parts = split_gguf(gguf, model.with_name("part"), cut(gguf.tensors.values(), max_tensors=20))
    with GGUF.open(parts[0]) as gguf:
        merge_gguf(gguf, model.with_name("whole.gguf"))
    assert model.with_name("whole.gguf").read_bytes() == model.read_bytes()
    parts[1].unlink()
    with pytest.raises(GGUFError, match=r"1 of 2 parts are missing"):
        GGUF.open(parts[0])


def test_the_cache_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_CACHE", str(folder / "cache"))
    assert cache_folder.write("some.entry", b"abc") and cache_folder.read("some.entry") == b"abc"
    assert (folder / "cache" / "some.entry").is_file()


def test_blocks_of_the_prefix_cache(folder: Path) -> None:
    files, name = BlockFiles(str(folder / "blocks"), bytes(32), 1 << 20), f"{1:064x}.0"
    try:
        assert files.write(name, b"1" * 1000, time.time_ns()) and files.flush(60)
        assert files.begin_read(name, 1000, time.time_ns()).result(60) == b"1" * 1000
    finally:
        files.close()


def test_commands(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, log = model.with_name("prompt.txt"), model.with_name("log.txt")
    words = ["generate", *DEVICE, "-m", str(model), "-n", "2", "--temp", "0", "-f", str(prompt)]
    assert main(words) == 2
    assert f"the prompt file '{prompt}' cannot be read: No such file" in capsys.readouterr().err
    prompt.write_text("Once", encoding="utf-8")
    assert main([*words, "--log-file", str(log)]) == 0
    assert capsys.readouterr().out.strip() and "decode" in log.read_text(encoding="utf-8")
    assert main(["info", f"{model}x"]) == 2
    assert capsys.readouterr().err == f"error: {model}x: no such file; check the path\n"
