from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from block_damage import DAMAGE, files_of, give
from systems import IS_ROOT, WINDOWS

from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.cache import block_files
from vkbackend.models.engine.cache.block_files import BlockFiles
from vkbackend.models.engine.cache.block_store import BlockStore
from vkbackend.models.engine.cache.prefix_tree import digest_of
from vkbackend.ops import CELL_BLOCK

pytestmark = pytest.mark.no_vulkan

IDENTITY = bytes(range(32))
NAMES = [f"{i:064x}.0" for i in range(6)]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    files = BlockFiles(str(tmp_path / "kv"), IDENTITY, 1 << 20)
    for i, name in enumerate(NAMES[:2]):
        assert files.write(name, bytes([i]) * 1000, time.time_ns())
    assert files.flush(60)
    yield files
    files.close()


def read(files: BlockFiles, name: str, nbytes: int = 1000) -> bytes | None:
    return files.begin_read(name, nbytes, time.time_ns()).result(60)


def is_private(path: Path) -> bool:
    """Return whether only this user may use a file or a folder. On Windows, files have no mode."""
    status = path.lstat()
    return WINDOWS or stat.S_IMODE(status.st_mode) == (0o700 if stat.S_ISDIR(status.st_mode) else 0o600)


def test_files_are_found_by_the_next_process(files: BlockFiles, tmp_path: Path) -> None:
    assert all(is_private(path) for path in (tmp_path / "kv", *files_of(tmp_path / "kv")))
    later = BlockFiles(str(tmp_path / "kv"), IDENTITY, 1 << 20)
    other = BlockFiles(str(tmp_path / "kv"), bytes(32), 1 << 20)
    assert [name in later for name in NAMES] == [True, True, *[False] * 4]
    assert read(later, NAMES[1]) == b"\1" * 1000 and read(later, NAMES[2]) is None
    assert not any(name in other for name in NAMES) and other.nbytes == later.nbytes > 2000
    for opened in (later, other):
        opened.close()


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_and_foreign_files(
    files: BlockFiles, tmp_path: Path, damage: Callable[[Path], None], capfd: Any
) -> None:
    if damage is give and not IS_ROOT:
        pytest.skip("only root can give a file away")
    path = files.folder / NAMES[1]
    damage(path)
    later = BlockFiles(str(tmp_path / "kv"), IDENTITY, 1 << 20)
    assert NAMES[1] in later and read(later, NAMES[1]) is None and NAMES[1] not in later
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and DAMAGE[damage] in said and repr(str(path)) in said
    assert later.counts["refused"] == 1 and read(later, NAMES[0]) == bytes(1000)
    assert later.write(NAMES[1], b"2" * 1000, time.time_ns()) and later.flush(60)
    assert read(later, NAMES[1]) == b"2" * 1000 and is_private(path)
    later.close()


def test_a_block_of_another_size_is_refused(files: BlockFiles, capfd: Any) -> None:
    assert read(files, NAMES[0], 999) is None and read(files, NAMES[1], 1004) is None
    assert capfd.readouterr().err.count("computed again") == 2


def test_a_deleted_folder_is_made_again(files: BlockFiles, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "kv")
    assert read(files, NAMES[0]) is None
    assert files.write(NAMES[2], b"2" * 1000, time.time_ns()) and files.flush(60)
    assert read(files, NAMES[2]) == b"2" * 1000 and NAMES[1] not in files
    assert [path.name for path in files_of(tmp_path / "kv")] == [NAMES[2]] and files.nbytes < 2000
    assert is_private(tmp_path / "kv")


def test_a_full_disk_is_reported_once(files: BlockFiles, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for name in NAMES[2:]:
        files.write(name, bytes(9), time.time_ns())
    assert files.flush(60) and NAMES[2] not in files and len(files_of(files.folder.parent)) == 2
    assert capfd.readouterr().err.count("No space left") == 1


def test_too_much_waits_to_be_written(files: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_files, "QUEUE_NBYTES", 500)
    assert not files.write(NAMES[2], bytes(501), 0) and NAMES[2] not in files
    assert files.has_room(500) and not files.has_room(501)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("shared", "others may write"), ("file", "Not a directory"), ("link", "symbolic link")],
)
def test_folders_that_are_refused(tmp_path: Path, kind: str, why: str) -> None:
    path = tmp_path / kind
    if kind == "shared":
        path.mkdir()
        path.chmod(0o777)
    elif kind == "file":
        path.write_bytes(b"")
    else:
        path.symlink_to(tmp_path)
    with pytest.raises(InvalidArgument, match=f"cache_disk.*{kind}.*{why}"):
        BlockFiles(str(path), IDENTITY, 1 << 20)


def test_memory_has_a_limit() -> None:
    store = BlockStore(1024, None)
    for i in range(6):
        store.put(str(i), bytes(256), i)
    assert [str(i) in store for i in range(6)] == [False, False, True, True, True, True]
    assert store.begin_read("2", 256, 9).result() == bytes(256)
    store.put("6", bytes(256), 6)
    assert "2" in store and "3" not in store and store.ram_nbytes == 1024
    store.put("7", bytes(2048), 7)
    assert "7" not in store and "6" in store


def test_the_folder_has_a_limit(tmp_path: Path) -> None:
    """The least recently used files of all models are removed, and no others."""
    other = tmp_path / ("0" * 32)
    other.mkdir(mode=0o700)
    for name, age in (
        (f"{'1' * 64}.0", 9),
        (f"{'2' * 64}.0", 1),
        ("notes", 20),
        (f".{'3' * 64}.0.12345678", 9999),
    ):
        (other / name).write_bytes(bytes(300_000))
        then = time.time() - age
        os.utime(other / name, (then, then))
    files = BlockFiles(str(tmp_path), bytes(range(32)), 1 << 20)
    assert sorted(path.name[:2] for path in other.iterdir()) == ["11", "22", "no"]
    for i in range(2):
        assert files.write(f"{i:064x}.0", bytes(300_000), time.time_ns()) and files.flush(60)
    assert sorted(path.name[:2] for path in other.iterdir()) == ["22", "no"]
    assert files.nbytes <= 1 << 20 and all(f"{i:064x}.0" in files for i in range(2))
    files.write("a" * 64 + ".0", bytes(2 << 20), time.time_ns())
    assert files.flush(60) and "a" * 64 + ".0" not in files
    files.close()


def test_a_digest_covers_all_blocks_before() -> None:
    key, other = tuple(range(CELL_BLOCK)), tuple(range(1, 1 + CELL_BLOCK))
    marked = (("a", 1.0, 0),), *key
    digests = [
        digest_of(digest_of(bytes(32), key), key),
        digest_of(digest_of(bytes(32), other), key),
        digest_of(digest_of(b"1" * 32, key), key),
        digest_of(digest_of(bytes(32), marked), key),
        digest_of(digest_of(bytes(32), key), marked),
        digest_of(digest_of(bytes(32), key), ((("a", 0.5, 0),), *key)),
        digest_of(digest_of(bytes(32), key), ((("a", 1.0, 3),), *key)),
        digest_of(digest_of(bytes(32), key), ((("b", 1.0, 0),), *key)),
    ]
    assert len(set(digests)) == len(digests)
