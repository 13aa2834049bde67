"""Ways to damage the files of blocks of the KV cache."""

from __future__ import annotations

import os
from pathlib import Path


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def rename(path: Path) -> None:
    """Store another block's content under this block's name."""
    other = next(other for other in files_of(path.parent.parent) if other != path)
    path.write_bytes(other.read_bytes())


def older(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"block 1 ", b"block 0 "))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def share(path: Path) -> None:
    path.chmod(0o622)


def give(path: Path) -> None:
    os.chown(path, 12345, 12345)


DAMAGE = {
    cut: "damaged", flip: "damaged", rename: "damaged", older: "another version", pipe: "not a regular file",
    link: "symbolic link", share: "others may write", give: "another user",
}  # fmt: skip
