"""Link a checkout's files in an installed package's layout: `python -m vkbackend.tools.checkout.linked_tree
FOLDER`.

An editable install maps folders to packages by an import hook. mypy and the docs generator ignore the hook,
so they need the links.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def link(tree: Path) -> None:
    """Replace the folder. Raises FileExistsError if it has files that are not links."""
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.parent.name != "__pycache__":
            raise FileExistsError(f"{path} is not a link; give a new folder, or one that this command made")
    shutil.rmtree(tree, ignore_errors=True)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-dir"
    ]
    for package, folder in folders.items():
        for source in (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).glob("py.typed")):
            target = tree.joinpath(*package.split("."), source.relative_to(ROOT / folder))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vkbackend.tools.checkout.linked_tree", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder, or an earlier tree")
    try:
        link(parser.parse_args().folder)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
