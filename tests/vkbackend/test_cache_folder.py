"""The cache folder returns only undamaged entries of this user. Damaged or foreign entries count as missing,
with one message."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from systems import IS_ROOT, WINDOWS

from vkbackend import cache_folder, env

pytestmark = pytest.mark.no_vulkan

NAME, BODY = "some.entry", os.urandom(5000)
OTHER_USER = 65534


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path / "parent" / "cache"))
    monkeypatch.setattr(cache_folder, "_reported", set())
    return tmp_path / "parent" / "cache"


@pytest.fixture
def entry(folder: Path) -> Path:
    assert cache_folder.write(NAME, BODY)
    return folder / NAME


def mkfifo(path: Path) -> None:
    os.mkfifo(path)


def one_message_with(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vkbackend: ") and all(word in line for word in words), line


def entry_is_refused(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    assert cache_folder.read(NAME) is None is cache_folder.read(NAME)
    one_message_with(capsys, NAME, *words)
    assert cache_folder.write(NAME, b"new") and cache_folder.read(NAME) == b"new"
    assert capsys.readouterr().err == ""


def folder_is_unused(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    assert cache_folder.read(NAME) is None
    assert not cache_folder.write(NAME, BODY) and not cache_folder.write_json(NAME, [1])
    assert cache_folder.read_json(NAME) is None
    cache_folder.remove(NAME)
    one_message_with(capsys, *words)


def give_to_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, OTHER_USER, OTHER_USER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)


# ---- entries ----


@pytest.mark.parametrize("body", [b"", b"x", BODY, bytes(1 << 20)], ids=len)
def test_write_and_read(folder: Path, body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache_folder.read(NAME) is None
    assert cache_folder.write(NAME, body) and cache_folder.read(NAME) == body
    assert cache_folder.write(NAME, body + b"more") and cache_folder.read(NAME) == body + b"more"
    if not WINDOWS:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
    cache_folder.remove(NAME)
    cache_folder.remove(NAME)
    assert cache_folder.read(NAME) is None and not list(folder.iterdir())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("keep", [0, 1, 17, 18, 19, 81, 82, 83, 84, 1000, -1])
def test_truncated(entry: Path, keep: int, capsys: pytest.CaptureFixture[str]) -> None:
    entry.write_bytes(entry.read_bytes()[:keep])
    entry_is_refused(capsys, "damaged")


@pytest.mark.parametrize("at", [0, 17, 18, 81, 82, 83, 2000, -1])
def test_one_changed_bit(entry: Path, at: int, capsys: pytest.CaptureFixture[str]) -> None:
    blob = bytearray(entry.read_bytes())
    blob[at] ^= 0x10
    entry.write_bytes(blob)
    entry_is_refused(capsys, "damaged")


def test_appended_bytes(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry.write_bytes(entry.read_bytes() + b"\0")
    entry_is_refused(capsys, "damaged")


def test_the_file_of_another_entry(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache_folder.write("other.entry", b"other")
    entry.with_name("other.entry").replace(entry)
    entry_is_refused(capsys, "damaged")


def test_a_file_too_large(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache_folder.read(NAME, len(BODY)) == BODY
    assert cache_folder.read(NAME, len(BODY) - 1) is None
    one_message_with(capsys, "5083 bytes")
    os.truncate(entry, 1 << 40)
    assert cache_folder.read(NAME) is None


@pytest.mark.parametrize("make", [mkfifo, lambda path: path.symlink_to("kept"), lambda path: path.mkdir()])
def test_not_a_regular_file(
    entry: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    entry.rename(entry.with_name("kept"))
    make(entry)
    if not entry.is_dir() or entry.is_symlink():
        entry_is_refused(capsys, NAME)
        assert entry.is_file() and not entry.is_symlink()
        assert entry.with_name("kept").stat().st_size == len(BODY) + 83
        return
    assert cache_folder.read(NAME) is None and not cache_folder.write(NAME, b"new")
    cache_folder.remove(NAME)
    assert "not a regular file" in capsys.readouterr().err
    assert sorted(path.name for path in entry.parent.iterdir()) == ["kept", NAME]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write(entry: Path, mode: int, capsys: pytest.CaptureFixture[str]) -> None:
    entry.chmod(mode)
    entry_is_refused(capsys, "others may write to it", f"{mode:o}")


@pytest.mark.skipif(not IS_ROOT, reason="only root gives a file away")
def test_the_file_of_another_user(
    entry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_to_another_user(entry, monkeypatch)
    entry_is_refused(capsys, "belongs to another user (id 65534)")


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "9" * 5000, "\0\xff", '{"a":' * 50_000, "[1]" * 2, '"\\ud800'], ids=len
)
def test_invalid_json(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    cache_folder.write(NAME, text.encode("latin-1"))
    assert cache_folder.read_json(NAME) is None is cache_folder.read_json(NAME)
    one_message_with(capsys, NAME)
    assert cache_folder.write_json(NAME, {"a": [1, 2.5]}) and cache_folder.read_json(NAME) == {"a": [1, 2.5]}


# ---- folders ----


def test_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VKBACKEND_CACHE", "off")
    assert not cache_folder.write(NAME, BODY) and cache_folder.read(NAME) is None
    cache_folder.remove(NAME)
    assert not list(tmp_path.iterdir()) and capsys.readouterr().err == "", "it was asked for"


def test_a_link_in_place_of_the_folder(entry: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")
    folder_is_unused(capsys, str(folder), "is not used as the cache folder: it is a symbolic link")
    assert (folder / NAME).read_bytes().endswith(BODY)


@pytest.mark.parametrize("make", [mkfifo, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_not_a_folder(folder: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    folder.parent.mkdir()
    make(folder)
    folder_is_unused(capsys, str(folder), "is not used as the cache folder")


def test_parent_is_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.parent.touch()
    folder_is_unused(capsys, str(folder), "is not used as the cache folder")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write(entry: Path, mode: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder in which other users may write, such as /tmp, is not used, and its mode is not changed."""
    entry.parent.chmod(mode)
    folder_is_unused(capsys, "others may write to it", f"{mode:o}", "VKBACKEND_CACHE")
    assert stat.S_IMODE(entry.parent.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777])
def test_the_default_folder_is_made_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VKBACKEND_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder.write(NAME, BODY)
    (tmp_path / "vkbackend").chmod(mode)
    assert cache_folder.read(NAME) == BODY
    assert stat.S_IMODE((tmp_path / "vkbackend").stat().st_mode) == 0o700
    assert capsys.readouterr().err == ""


def test_the_folder_of_another_user(
    entry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_to_another_user(entry.parent, monkeypatch)
    if os.geteuid() == entry.parent.stat().st_uid:
        pytest.skip("this is that user")
    folder_is_unused(capsys, str(entry.parent), "belongs to another user")


def test_a_user_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("VKBACKEND_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(cache_folder, "_reported", set())
    assert env.cache_dir() is None
    folder_is_unused(capsys, "no home")


def test_a_disk_that_is_full(
    entry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not cache_folder.write(NAME, b"new") and not cache_folder.write("other", b"new")
    one_message_with(capsys, str(entry.parent), "No space left on device")
    monkeypatch.undo()
    assert [path.name for path in entry.parent.iterdir()] == [NAME]
    assert entry.read_bytes().endswith(BODY)


READ_ONLY = """
import os, sys
from vkbackend import cache_folder
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
print(cache_folder.read("entry"), cache_folder.write("entry", b"new"), cache_folder.write("more", b"new"))
"""


@pytest.mark.skipif(not IS_ROOT, reason="only root makes what another user may only read")
def test_a_folder_of_root_that_may_only_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not in tmp_path, because each session of pytest closes the folder of all sessions to other users.
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        parent.chmod(0o755)
        if closed := [str(path) for path in parent.parents if not path.stat().st_mode & 0o001]:
            pytest.skip(f"other users cannot reach temporary files, because {closed[0]} is closed to them")
        folder = parent / "cache"
        monkeypatch.setenv("VKBACKEND_CACHE", str(folder))
        cache_folder.write("entry", b"body")
        folder.chmod(0o755)
        (folder / "entry").chmod(0o644)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=60,
        )
    assert done.stdout == "b'body' False False\n", done.stderr
    (line,) = done.stderr.splitlines()
    assert "Permission denied" in line and str(folder) in line


def test_concurrent_writes_and_reads(folder: Path) -> None:
    bodies = [bytes([i]) * 20_000 for i in range(8)]
    cache_folder.write(NAME, bodies[0])
    with ThreadPoolExecutor(8) as pool:
        writing = [pool.submit(cache_folder.write, NAME, body) for body in bodies * 8]
        reads = [pool.submit(cache_folder.read, NAME) for _ in range(64)]
        assert all(done.result() for done in writing)
        assert all(done.result() in bodies for done in reads)
    assert len(list(folder.iterdir())) == 1
