"""The scripts that count prose and code of a checkout run on a small repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vkbackend.tools.checkout import prose, same_code

pytestmark = pytest.mark.no_vulkan

PYTHON = '''"""What it does: those of the list."""

NAME = "those of a string"  # a name


def f(found: int) -> int:
    """Adds one."""
    # The first line
    # of a comment.
    made = found + 1
    return made
'''
SHADER = """// Reads beside the row.
void main() {} /* the end */
"""
PAGE = """# Title

There is nothing here, and `left out` is code.

```
those of a block
```
"""


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "data").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "code.py").write_text(PYTHON, encoding="utf-8")
    (tmp_path / "a" / "shader.comp").write_text(SHADER, encoding="utf-8")
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    (tmp_path / "tests" / "data" / "left_out.md").write_text("Those of the data.\n", encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    (tmp_path / "untracked.md").write_text("Those of nobody.\n", encoding="utf-8")
    return tmp_path


def test_passages_are_docstrings_comments_and_paragraphs(checkout: Path) -> None:
    texts = {(str(p.path), p.line): p.text.strip() for p in prose.passages(checkout)}
    assert texts == {
        ("a/code.py", 1): "What it does: those of the list.",
        ("a/code.py", 3): "a name",
        ("a/code.py", 7): "Adds one.",
        ("a/code.py", 8): "The first line\nof a comment.",
        ("a/shader.comp", 1): "Reads beside the row.",
        ("a/shader.comp", 2): "the end",
        ("page.md", 1): "# Title",
        ("page.md", 3): "There is nothing here, and `left out` is code.",
    }
    assert prose.words("There is nothing here, and `left out` is code.") == 8


def test_names_are_parameters_and_assigned_names() -> None:
    assert sorted(prose.names_of(PYTHON)) == [(6, "found"), (10, "made")]


@pytest.mark.parametrize(
    ("name", "text", "n"),
    [
        ("those of", "those of a, that of b, of those", 2),
        ("What, Who", "What it is. Who asks: Such a thing\nwhat is it", 3),
        ("behind, beside", "behind it and beside that, besides", 2),
        ("tells, told", "it tells what was told", 2),
        ("lies, stands", "it lies there, stands here, and a lie", 3),
        ("where there is", "where there are some, where it has one", 2),
        ("is no X", "it is no cell, and is no longer there", 1),
    ],
)
def test_turns_are_counted(name: str, text: str, n: int) -> None:
    (turn,) = [turn for turn in prose.TURNS if turn.name == name]
    assert len(turn.pattern.findall(text)) == n


def test_the_command_names_places_and_says_whether_the_prose_is_plain(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["prose", str(checkout), *words])
        return prose.main()

    assert run() == 1
    assert run("--under", "page") == 0
    capsys.readouterr()
    assert run("--list", "beside") == 0
    assert capsys.readouterr().out == "a/shader.comp:1: Reads beside the row.\n"


def test_changes_of_prose_leave_the_code_the_same(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_code, "ROOT", checkout)
    code, shader = checkout / "a" / "code.py", checkout / "a" / "shader.comp"
    assert same_code.changed("HEAD", None) == []
    code.write_text(
        PYTHON.replace('"""Adds one."""', '"""The next number."""').replace("# The first", "# A"),
        encoding="utf-8",
    )
    shader.write_text("void main() {}\n", encoding="utf-8")
    assert same_code.changed("HEAD", None) == []
    code.write_text(PYTHON.replace("found + 1", "found + 2"), encoding="utf-8")
    assert same_code.changed("HEAD", None) == ["a/code.py"]
    code.write_text(PYTHON, encoding="utf-8")
    shader.write_text(SHADER.replace("main", "other"), encoding="utf-8")
    git(checkout, "add", "a")
    git(checkout, "commit", "-q", "-m", "another function")
    assert same_code.changed("HEAD~1", "HEAD") == ["a/shader.comp"]
    shader.unlink()
    assert same_code.changed("HEAD", None) == ["a/shader.comp"]
