"""Downloads model files from the Hugging Face Hub. `user/repo:Q4_K_M` becomes the path of a local file.

`huggingface_hub` downloads and stores files, and reads HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
This module chooses the file and checks the free disk space.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from vkbackend.errors import InvalidArgument, VkbackendError
from vkbackend.models.arguments import text_of

# On Windows, links need a privilege. Without links, the library moves files, and its warning helps nobody.
os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")
CONNECT_S = 8.0
PROGRESS_S = 0.5
PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")  # the order for names without a tag, as in llama.cpp
PROJECTORS = ("F16", "BF16", "Q8_0", "F32")
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<tag>[\w.-]+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


Progress = Callable[[str, int, int], None]  # (file, bytes fetched, bytes in all)


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def fetch(name: str, file: str | None = None, progress: Progress | None = None) -> str:
    """Download `user/repo`, `user/repo:TAG` or `file` of the repository, and return its path (the first part
    of a split model). `progress` is called for each file that is missing, also from a thread. Raises
    InvalidArgument if the name, repository or file does not exist, and VkbackendError if there is no
    connection or not enough disk space."""
    repo, tag = _named(name)
    return _fetched(repo, lambda sizes: chosen(repo, sizes, tag, file), progress)[0]


def fetch_projector(name: str, file: str | None = None, progress: Progress | None = None) -> str | None:
    """Download the projector (mmproj) of the model that `fetch` chooses, and return its path, or None if the
    repository has none. Raises the errors of `fetch`."""
    repo, tag = _named(name)

    def projector(sizes: Mapping[str, int]) -> list[str]:
        return projectors(sizes, chosen(repo, sizes, tag, file)[0])[:1]

    return next(iter(_fetched(repo, projector, progress)), None)


def _named(name: str) -> tuple[str, str | None]:
    match = _NAME.fullmatch(text_of("repository", name))
    if not match:
        raise InvalidArgument(f"{name!r} is not a repository; expected user/repo or user/repo:Q4_K_M")
    return match["repo"], match["tag"]


def _fetched(
    repo: str, choose: Callable[[Mapping[str, int]], list[str]], progress: Progress | None = None
) -> list[str]:
    """Download the files that `choose` selects from the sizes of a repository's files. Return their paths."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        sizes = _offline(repo) if constants.HF_HUB_OFFLINE else _online(repo)
        parts = choose(sizes)
        missing = [part for part in parts if not isinstance(try_to_load_from_cache(repo, part), str)]
        if not constants.HF_HUB_OFFLINE:
            _check_room(constants.HF_HUB_CACHE, sum(sizes[part] for part in missing))
        if progress is not None:
            for part in missing:
                progress(part, 0, sizes[part])
        paths = []
        for part in parts:
            with _followed(repo, part, sizes[part], progress if part in missing else None):
                paths.append(hf_hub_download(repo, part))
        return paths
    except RepositoryNotFoundError:
        raise InvalidArgument(
            f"{repo} does not exist or is private; check the name, or set HF_TOKEN"
        ) from None
    except LocalEntryNotFoundError as error:
        raise VkbackendError(f"{repo} is not in {constants.HF_HUB_CACHE}: {_first_line(error)}") from None
    except EntryNotFoundError as error:
        raise InvalidArgument(f"{repo}: {_first_line(error)}") from None
    except (HTTPError, OSError) as error:
        raise VkbackendError(
            f"{repo} cannot be fetched from {constants.ENDPOINT}: {_first_line(error)}; the part that was "
            "fetched is kept: try again"
        ) from None


@contextmanager
def _followed(repo: str, part: str, nbytes: int, progress: Progress | None) -> Iterator[None]:
    """Call `progress` while a file is fetched. The bytes so far are counted in the repository's folder of the
    cache."""
    if progress is None:
        yield
        return
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type="model"), "blobs")
    before, is_over = _nbytes(blobs, is_whole=True), threading.Event()

    def follow() -> None:
        while not is_over.wait(PROGRESS_S):
            progress(part, max(0, min(nbytes, _nbytes(blobs) - before)), nbytes)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    progress(part, nbytes, nbytes)


def _nbytes(folder: Path, *, is_whole: bool = False) -> int:
    total = 0
    for path in folder.glob("*"):
        if not (is_whole and path.suffix == ".incomplete"):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


def _online(repo: str) -> dict[str, int]:
    from huggingface_hub import HfApi, constants, get_session
    from huggingface_hub.errors import HTTPError

    try:  # fail early, because the library retries for half a minute
        get_session().head(constants.ENDPOINT, timeout=CONNECT_S)
    except (HTTPError, OSError) as error:
        raise VkbackendError(
            f"{repo} cannot be fetched from {constants.ENDPOINT}: {_first_line(error)}; connect this "
            "machine, or name a file with -m; a model that was fetched before loads with --offline"
        ) from None
    tree = HfApi().list_repo_tree(repo, recursive=True)
    return {entry.path: int(getattr(entry, "size", 0) or 0) for entry in tree}


def _offline(repo: str) -> dict[str, int]:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(repo, local_files_only=True))
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*.gguf")}


def chosen(repo: str, sizes: Mapping[str, int], tag: str | None, file: str | None) -> list[str]:
    models = sorted(path for path in sizes if path.lower().endswith(".gguf") and "mmproj" not in path.lower())
    if not models:
        raise InvalidArgument(f"{repo} has no .gguf file; look for a repository that was converted to GGUF")
    if file is not None:
        if file not in sizes:
            raise InvalidArgument(f"{repo} has no file {file!r}; there are: {', '.join(models)}")
        first = file
    elif tag is not None:
        if not (tagged := _tagged(models, tag)):
            raise InvalidArgument(f"{repo} has no model {tag!r}; there are: {', '.join(models)}")
        first = tagged[0]
    else:
        first = next((tagged_[0] for wish in PREFERRED if (tagged_ := _tagged(models, wish))), models[0])
    if not (part := _PART.search(first)):
        return [first]
    stem, n_parts = first[: part.start()], int(part[2])
    parts = [f"{stem}-{i:05}-of-{part[2]}{first[-5:]}" for i in range(1, n_parts + 1)]
    if missing := [path for path in parts if path not in sizes]:
        raise InvalidArgument(f"{repo} lacks a part of {first!r}: {missing[0]}")
    return parts


def projectors(sizes: Mapping[str, int], model: str) -> list[str]:
    """Return the projectors among a repository's files, the best for `model` first. Projectors in the model's
    folder come before others. Otherwise the order is by type."""
    files = [path for path in sizes if path.lower().endswith(".gguf") and "mmproj" in path.lower()]

    def rank(path: str) -> tuple[bool, int, str]:
        types = [i for i, wish in enumerate(PROJECTORS) if _tagged([path], wish)]
        return os.path.dirname(path) != os.path.dirname(model), min(types, default=len(PROJECTORS)), path

    return sorted(files, key=rank)


def _tagged(models: Iterable[str], tag: str) -> list[str]:
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(tag)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [path for path in models if word.search(path)]


def _check_room(folder: str, needed: int) -> None:
    there = Path(folder)
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if needed > free:
        raise VkbackendError(
            f"{needed} bytes are needed and {there} has {free} free; make room, or set HF_HOME to a folder "
            "on another disk"
        )


def _first_line(error: BaseException) -> str:
    text = (str(error) or type(error).__name__).strip().partition("\n")[0]
    token = os.environ.get("HF_TOKEN")
    return text.replace(token, "***") if token else text
