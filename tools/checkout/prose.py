"""Measure a checkout's prose: `python -m vkbackend.tools.checkout.prose [FOLDER]`.

Counts the words of documents, docstrings and comments, and the turns of phrase that readers have to decode.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vkbackend.tools.console import console, table

# Local names that say nothing about their value.
NAMES = ("found", "made", "one", "own", "told", "turns", "what")

# A sentence begins at the start of a text, or after a full stop, a colon or a list's dash.
_BEGIN = r"(?:^|(?<=[.!?:|] )|(?<=[.!?]\n))(?:[-*|] +)?"


@dataclass(frozen=True)
class Turn:
    """`anchors` are rates per 1,000 words in tinygrad, exllamav3, vello and uv. `most` is this project's
    limit."""

    name: str
    pattern: re.Pattern[str]
    anchors: tuple[float, float, float, float]

    @property
    def most(self) -> float:
        return 3 * max(self.anchors)


def _turn(name: str, pattern: str, *anchors: float, flags: int = re.IGNORECASE) -> Turn:
    return Turn(name, re.compile(pattern, flags), anchors)  # type: ignore[arg-type]


TURNS = (
    _turn("those of", r"\b(?:those|that) of\b", 0.01, 0.00, 0.01, 0.03),
    _turn("What, Who", _BEGIN + r"(?:What|Who|Whose|Those|Such)\b", 0.01, 0.03, 0.02, 0.01, flags=re.M),
    _turn("behind, beside", r"\b(?:behind|beside)\b", 0.01, 0.14, 0.09, 0.03),
    _turn("tells, told", r"\b(?:tells|told)\b", 0.01, 0.00, 0.02, 0.01),
    _turn("lies, stands", r"\b(?:lies|lie|lay|stands|stood|hangs|hung)\b", 0.06, 0.12, 0.13, 0.03),
    _turn("where there is", r"\bwhere (?:there (?:is|are)|it has|they have)\b", 0.03, 0.01, 0.01, 0.01),
    _turn("is no X", r"\b(?:is|are) no\b(?! (?:longer|more)\b)", 0.06, 0.05, 0.17, 0.17),
)  # fmt: skip


@dataclass(frozen=True)
class Passage:
    """A docstring, a block of comments or a paragraph."""

    path: Path
    line: int
    text: str


def passages(root: Path, under: str = "") -> Iterator[Passage]:
    for path in tracked(root, under, *READERS):
        for line, text in READERS[path.suffix]((root / path).read_text(encoding="utf-8")):
            yield Passage(path, line, text)


def tracked(root: Path, under: str, *suffixes: str) -> Iterator[Path]:
    """Yield the files that git tracks, relative to `root`, without test data and vendored libraries."""
    listed = subprocess.run(
        ["git", "ls-files", f"{under}*"],
        cwd=root,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    for path in map(Path, listed.stdout.splitlines()):
        is_ours = not path.is_relative_to("tests/data") and "vendor" not in path.parts
        if path.suffix in suffixes and is_ours and (root / path).exists():
            yield path


# Python's `tokenize` takes ten times as long as this expression.
STRING_OR_COMMENT = re.compile(
    r"""(?P<quotes>\"{3}|'{3})(?:\\.|(?!(?P=quotes)).)*(?P=quotes)"""
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)


def of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring, each block of comments, and each comment after code. A docstring is a string that
    begins the file, or that begins a line after a colon. Parsing a checkout's files would take ten times as
    long."""
    block: list[str] = []
    first = last = -1
    number, end, before = 1, 0, ":"  # `before` is the last character of code
    for match in STRING_OR_COMMENT.finditer(source):
        begin = match.start()
        before = source[end:begin].rstrip("rR \n")[-1:] or before
        number, end = number + source.count("\n", end, begin), match.end()
        is_alone = not source[source.rfind("\n", 0, begin) + 1 : begin].strip("rR ")
        if not match["comment"]:
            if before == ":" and is_alone and source[end : end + 1] in ("\n", ""):
                if text := inspect.cleandoc(ast.literal_eval(source[begin:end])):
                    yield number, text
            before = match[0][-1]
        else:
            if block and (number != last + 1 or not is_alone):
                yield first, "\n".join(block)
                block = []
            first = number if not block else first
            last = number if is_alone else -1
            block.append(re.sub(r"^#+!? ?(?:(?:type|noqa|fmt|ruff|pragma):.*)?", "", match["comment"]))
        number += match[0].count("\n")
    if block:
        yield first, "\n".join(block)


def of_c(source: str) -> Iterator[tuple[int, str]]:
    """Consecutive `//` lines are one comment."""
    pattern = r"/\*(.*?)\*/|((?:(?<![:\"'`])//[^\n]*(?:\n[ \t]*(?=//))?)+)"
    for match in re.finditer(pattern, source, re.DOTALL):
        text = re.sub(r"^[ \t]*(?://|\*) ?", "", match[1] or match[2], flags=re.MULTILINE)
        yield source.count("\n", 0, match.start()) + 1, text.strip()


def of_shell(source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.search(r"(?:^|\s)# ?(?!!)(.*)$", line):
            yield number, match[1]


def of_markdown(source: str) -> Iterator[tuple[int, str]]:
    text = re.sub(
        r"^( *)```.*?^\1```", lambda m: "\n" * m[0].count("\n"), source, flags=re.MULTILINE | re.DOTALL
    )
    text = re.sub(r"^(?: {4}).*$", "", text, flags=re.MULTILINE)
    for match in re.finditer(r"(?:[^\n]+\n?)+", text):
        yield text.count("\n", 0, match.start()) + 1, match[0]


READERS = {
    ".py": of_python, ".comp": of_c, ".glsl": of_c, ".js": of_c, ".css": of_c, ".md": of_markdown,
    ".sh": of_shell, ".toml": of_shell,
}  # fmt: skip


def names_of(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
        if name in NAMES and not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
            yield node.lineno, name  # type: ignore[attr-defined]


def sentences(passage: Passage) -> list[str]:
    """Return the sentences with at least five words, without headings and rows of tables."""
    lines = [line.strip() for line in passage.text.splitlines() if not re.match(r"\s*[|#]", line)]
    items = re.split(r"\n(?:[-*]|\d+\.) ", "\n" + "\n".join(lines))
    parts = [part for item in items for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"*])", item)]
    return [part.replace("\n", " ").strip() for part in parts if words(part) >= 5]


def words(text: str) -> int:
    """A span of `code` counts as one word."""
    return len(re.findall(r"[A-Za-z][\w'.-]*", re.sub(r"`[^`]*`", " code ", text)))


def folder_of(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else "(top)"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vkbackend.tools.checkout.prose", description=__doc__.partition("\n")[0]
    )
    here = Path(__file__).resolve().parents[2]
    parser.add_argument(
        "folder", nargs="?", type=Path, default=here, metavar="FOLDER", help="a checkout of git"
    )
    parser.add_argument(
        "--list", metavar="TURN", help="print the places of one turn (a part of its name), or of names"
    )
    parser.add_argument("--under", metavar="PATH", default="", help="only files whose path begins so")
    parser.add_argument("--sample", type=int, metavar="N", help="print N sentences drawn with --seed")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    args = parser.parse_args()
    if args.sample:
        drawn = [(p, text) for p in passages(args.folder, args.under) for text in sentences(p)]
        for passage, text in random.Random(args.seed).sample(drawn, min(args.sample, len(drawn))):
            print(f"{passage.path}:{passage.line}: {text}")
        return 0
    counts: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for passage in passages(args.folder, args.under):
        counts[folder_of(passage.path)] += words(passage.text)
        for turn in TURNS:
            for match in turn.pattern.finditer(passage.text):
                seen[turn.name] += 1
                if args.list and args.list in turn.name:
                    line = passage.line + passage.text.count("\n", 0, match.start())
                    around = passage.text[max(0, match.start() - 40) : match.end() + 40].replace("\n", " ")
                    print(f"{passage.path}:{line}: {around}")
    names: Counter[str] = Counter()
    for path in tracked(args.folder, args.under, ".py"):
        for line, name in names_of((args.folder / path).read_text(encoding="utf-8")):
            names[name] += 1
            if args.list == "names":
                print(f"{path}:{line}: {name}")
    if args.list:
        return 0
    n_words = counts.total()
    out = console()
    rows: list[tuple[object, ...]] = [(name, f"{n:,}") for name, n in sorted(counts.items())]
    out.print(table("words", ("folder", "words"), [*rows, ("all", f"{n_words:,}")]))
    each = [(t, 1000 * seen[t.name] / max(1, n_words)) for t in TURNS]
    rows = [
        (t.name, seen[t.name], f"{rate:.2f}", *(f"{a:.2f}" for a in t.anchors), f"{t.most:.2f}")
        for t, rate in each
    ]
    header = ("turn", "count", "in 1,000 words", "tinygrad", "exllamav3", "vello", "uv", "at most")
    out.print(table("turns of phrase", header, rows))
    print("names:", ", ".join(f"{name} {names[name]}" for name in NAMES))
    return int(any(rate > turn.most for turn, rate in each))


if __name__ == "__main__":
    sys.exit(main())
