"""Link a checkout's files in an installed package's layout: `python -m vkbackend.tools.checkout.linked_tree
FOLDER`.

An editable install maps folders to packages by an import hook. mypy and the docs generator ignore the hook,
so they need the links.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def link(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-dir"
    ]
    for package, folder in folders.items():
        for source in (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).glob("py.typed")):
            target = tree.joinpath(*package.split("."), source.relative_to(ROOT / folder))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


if __name__ == "__main__":
    link(Path(sys.argv[1]))
