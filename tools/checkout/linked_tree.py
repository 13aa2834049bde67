"""The package as it is installed, made of links: for programs that read files and follow no import hook.

`python -m vkbackend.tools.checkout.linked_tree FOLDER` lays the checkout's folders out below one import name,
as `package-dir` in pyproject.toml maps them. mypy and the generator of the docs read that tree.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def link(tree: Path) -> None:
    """Remove the tree and make it again."""
    shutil.rmtree(tree, ignore_errors=True)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    for package, folder in folders.items():
        for source in (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).glob("py.typed")):
            target = tree.joinpath(*package.split("."), source.relative_to(ROOT / folder))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


if __name__ == "__main__":
    link(Path(sys.argv[1]))
