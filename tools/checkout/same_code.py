"""Check that only prose changed: `python -m vkbackend.tools.checkout.same_code REVISION [REVISION]`.

Prints the Python and GLSL files that differ between two revisions by more than docstrings and comments. The
second revision defaults to the working tree.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(*args: str) -> str:
    return subprocess.run(
        ["git", *args], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True
    ).stdout


def code_of_python(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
    return ast.dump(tree)


def code_of_glsl(source: str) -> str:
    return " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", source, flags=re.DOTALL).split())


CODE = {".py": code_of_python, ".comp": code_of_glsl, ".glsl": code_of_glsl}


def changed(old: str, new: str | None) -> list[str]:
    """Return the files that were added or removed, or whose code changed. If `new` is None, use the working
    tree."""
    names = git("diff", "--name-only", "--no-renames", old, *([new] if new else [])).splitlines()
    differ = []
    for name in names:
        if code := CODE.get(Path(name).suffix):
            before, after = text_at(old, name), text_at(new, name)
            if before is None or after is None or code(before) != code(after):
                differ.append(name)
    return differ


def text_at(revision: str | None, name: str) -> str | None:
    """Return a file's text at a revision, or in the working tree if `revision` is None. Return None if the
    file is missing."""
    try:
        return git("show", f"{revision}:{name}") if revision else (ROOT / name).read_text(encoding="utf-8")
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vkbackend.tools.checkout.same_code",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="REVISION", help="a commit, such as HEAD")
    parser.add_argument("after", metavar="REVISION", nargs="?", help="default: the working tree")
    args = parser.parse_args()
    try:
        differ = changed(args.before, args.after)
    except subprocess.CalledProcessError as error:
        parser.error(f"git: {error.stderr.splitlines()[0]}")
    print("\n".join(differ) or "the code is the same")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
