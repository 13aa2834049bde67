"""Find type errors on other systems: `python -m vkbackend.tools.checkout.other_systems TREE CACHE`.

mypy knows which attributes of the standard library a system has. The files that use system-dependent modules
are checked for Windows, macOS and Linux. The modules that they import are not checked, so this takes a
quarter of the time of a complete check. Errors that the check for Linux also reports do not count. TREE is
linked_tree's folder, CACHE a folder for mypy.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = "linux", "win32", "darwin"
LINUX_ONLY = tuple(
    f"vkbackend/{name}" for name in ("kompute", "models/hosts", "tools/checkout", "tools/studies")
)
MODULES = (
    "ctypes fcntl mmap msvcrt multiprocessing os pty resource select selectors signal socket subprocess sys "
    "termios time tty"
)
USES = re.compile(rf"^\s*(import|from) ({'|'.join(MODULES.split())}|vkbackend\.system)\b", re.MULTILINE)


def files_of(tree: Path) -> list[str]:
    names = {path: str(path.relative_to(tree)) for path in sorted((tree / "vkbackend").rglob("*.py"))}
    return [
        name
        for path, name in names.items()
        if not name.startswith(LINUX_ONLY) and USES.search(path.read_text(encoding="utf-8"))
    ]


def errors_of(system: str, tree: Path, cache: Path) -> list[str]:
    """Return mypy's lines of errors. Raises RuntimeError if mypy fails."""
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(cache / system)]
    options += ["--platform", system, "--follow-imports", "skip", "--no-warn-unused-ignores"]
    command = [sys.executable, "-m", "mypy", *options, *files_of(tree)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if ": error: " in line]


def main(tree: Path, cache: Path) -> int:
    linux, *others = (errors_of(system, tree, cache) for system in SYSTEMS)
    wrong = 0
    for system, errors in zip(SYSTEMS[1:], others, strict=True):
        for line in errors:
            if line not in linux:
                print(f"{system}: {line}")
                wrong += 1
    print(f"{len(files_of(tree))} files, {wrong} errors of {', '.join(SYSTEMS[1:])} that Linux does not have")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(*(Path(word).resolve() for word in sys.argv[1:])))
