"""Makes cache folders for tests, so that pipelines are compiled only once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from vkbackend import env


def compiled() -> list[Path]:
    folder = env.cache_dir()
    return [] if folder is None else list(chain(folder.glob("*.spv"), folder.glob("pipelines-*")))


def fill(folder: Path, entries: Iterable[Path]) -> None:
    """Add `entries` to the folder as hard links or copies, because the cache ignores symbolic links."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for entry in entries:
        try:
            os.link(entry, folder / entry.name)
        except OSError:
            shutil.copyfile(entry, folder / entry.name)
            os.chmod(folder / entry.name, 0o600)
