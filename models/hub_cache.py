"""The models in the Hugging Face Hub's cache on this machine, by the names with which `hub.fetch` finds them.

The cache has a folder per repository, with files in `blobs`, and links to them in `snapshots/REVISION`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from vkbackend.errors import InvalidArgument
from vkbackend.models.hub import chosen, is_name, projectors

_TYPE = re.compile(
    r"(?<![A-Za-z0-9])(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32)(?![A-Za-z0-9])", re.IGNORECASE
)
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_models() -> dict[str, Path]:
    """Return the complete models of the cache: `user/repo:TAG` and the path of the first file. The tag is the
    type in the file's name, or the name itself."""
    models: dict[str, Path] = {}
    for folder in sorted(cache_folder().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshots = sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for snapshot in snapshots:
            paths = {path.relative_to(snapshot).as_posix(): path for path in sorted(snapshot.rglob("*.gguf"))}
            sizes = {file: path.stat().st_size for file, path in paths.items() if path.is_file()}
            for file in sizes:
                if tag := _tag_of(repo, file, sizes):
                    models.setdefault(f"{repo}:{tag}", paths[file])
    return {name: path for name, path in models.items() if is_name(name)}


def _tag_of(repo: str, file: str, sizes: Mapping[str, int]) -> str:
    """Return a tag that selects this file. Return "" if the file is a projector, belongs to an incomplete
    model, or is not the first part of a model."""
    stem = _PART.sub("", Path(file).stem)
    for tag in (*reversed(_TYPE.findall(stem)), stem):
        try:
            if chosen(repo, sizes, tag, None)[0] == file:
                return tag
        except InvalidArgument:
            continue
    return ""


def cached_projectors(model: Path) -> list[str]:
    """Return the projectors in the cache for a model of the cache, the best first. Projectors of the model's
    revision come before projectors of other revisions."""
    snapshot = _snapshot_of(model)
    found: list[str] = []
    for folder in (snapshot, *sorted(set(snapshot.parent.iterdir()) - {snapshot}, reverse=True)):
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.is_file()]
        found += [
            str(folder / file)
            for file in projectors(dict.fromkeys(files, 1), model.relative_to(snapshot).as_posix())
        ]
    return found


def _snapshot_of(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.parent.name == "snapshots")


def remove(path: Path) -> None:
    """Delete a model's files, in all revisions, and the repository's folder if it then has only
    projectors."""
    folder = _snapshot_of(path).parent.parent
    assert folder.parent == cache_folder(), path
    stem = _PART.sub("", path.stem)
    links = [link for link in folder.glob("snapshots/**/*.gguf") if _PART.sub("", link.stem) == stem]
    files = {link.resolve() for link in links}
    for link in links:
        link.unlink()
    kept = {link.resolve() for link in folder.glob("snapshots/**/*") if not link.is_dir()}
    for file in files - kept:
        if file.parent == (folder / "blobs").resolve():
            file.unlink(missing_ok=True)
    rest = [link for link in folder.glob("snapshots/**/*") if not link.is_dir()]
    if all("mmproj" in link.name.lower() for link in rest):
        shutil.rmtree(folder)
