"""The list of models: the .gguf files of a folder, and presets. No device is opened and nothing is loaded."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vkbackend.errors import GGUFError, InvalidArgument
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.hub import projectors
from vkbackend.models.hub_cache import cached_projectors
from vkbackend.models.options import Options
from vkbackend.paths import quoted, why
from vkbackend.tools.flags.vision import unusable
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.router.presets import ALL, Preset

SPLIT = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-\d{5}\.gguf", re.DOTALL)
MAX_NAME, MAX_MODELS = 200, 1000
MAGIC = b"GGUF"
CACHE = "cache"  # The source of models in the Hub's cache, as in llama-server.


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that the server can load, with the `keywords` of `LLM`. `devices` are the user's choice, or
    None if the server chooses. Entries with equal `fingerprint` have the same files and flags."""

    name: str
    options: Options
    config: Config
    keywords: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    source: str = "models_dir"
    loads: bool = False
    stop_s: float = 10.0
    idle_s: float = -1.0  # Unload the model after this many seconds without a request; below 0: never.
    fingerprint: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.config.other_names


# Builds an entry from a name and the words of its flags.
Make = Callable[[str, Sequence[str], Preset, str], Entry]
Notes = list[str]


def listed(
    folder: str | None, presets: Mapping[str, Preset], make: Make, cached: Mapping[str, Path] = {}
) -> tuple[dict[str, Entry], Notes]:
    """Return the models by name, and notes about omitted files. `cached` are models of the Hub's cache.
    Raises InvalidArgument for a wrong folder or preset."""
    notes: Notes = []
    everywhere = presets.get(ALL, Preset())
    entries: dict[str, Entry] = {}
    inside = models_in(folder, notes) if folder is not None else {}
    paths = {**cached, **inside}
    for name, path in paths.items():
        preset = presets.get(name, everywhere)
        words = preset.words if {"model", "hf_repo"} & preset.dests else ["-m", str(path), *preset.words]
        if not {"model", "hf_repo", "mmproj", "mmproj_auto"} & preset.dests:
            found = _beside(path, Path(str(folder)), notes) if name in inside else cached_projectors(path)
            words = [*_flag_of(found, notes), *words]
        try:
            entries[name] = _made(make, name, words, preset, "models_dir" if name in inside else CACHE)
        except (GGUFError, OSError) as error:
            notes.append(f"{name} is left out: {why(error)}")
    for name, preset in presets.items():
        if name in (ALL, *paths):
            continue
        if not {"model", "hf_repo"} & preset.dests:
            raise InvalidArgument(f"{preset.where}: no such model in the folder; give model or hf-repo")
        _check_name(name, preset.where)
        try:
            entries[name] = _made(make, name, preset.words, preset, "preset")
        except GGUFError as error:
            raise InvalidArgument(f"{preset.where}: {error}") from None
    if len(entries) > MAX_MODELS:
        raise InvalidArgument(f"{len(entries)} models, at most {MAX_MODELS} can be listed")
    _check_aliases(entries.values())
    return entries, notes


def _made(make: Make, name: str, words: Sequence[str], preset: Preset, source: str) -> Entry:
    try:
        entry = make(name, words, preset, source)
    except InvalidArgument as error:
        raise InvalidArgument(f"{preset.where}: {error}" if preset.words else str(error)) from None
    with GGUF.open(entry.options.path):
        return entry


def models_in(folder: str, notes: Notes) -> dict[str, Path]:
    """Return the first file of each model by name. A model is a file in the folder, or all its parts in a
    sub-folder, which then names the model. Raises InvalidArgument without such a folder."""
    try:
        inside = sorted(Path(folder).iterdir())
    except OSError as error:
        raise InvalidArgument(f"--models-dir {quoted(folder)} cannot be read: {why(error)}") from None
    by_name: dict[str, Path] = {}
    for path in inside:
        models = {_stem(path): path} if _is_model(path) else {}
        if path.is_dir():
            files = [file for file in _files_of(path, notes) if _is_model(file)]
            alone = len(files) == 1
            models = {path.name if alone else f"{path.name}/{_stem(file)}": file for file in files}
        for name, file in models.items():
            if reason := _reason(name, file, by_name):
                notes.append(f"{file} is left out: {reason}")
            else:
                by_name[name] = file
    return by_name


def _beside(model: Path, folder: Path, notes: Notes) -> list[str]:
    """Return the projectors in a model's sub-folder, the best first."""
    if model.parent == folder:
        return []
    return projectors({str(file): 1 for file in _files_of(model.parent, notes)}, str(model))


def _flag_of(found: Sequence[str], notes: Notes) -> list[str]:
    """Return the flag for the first of the projectors, if its type is supported."""
    for path in found[:1]:
        if reason := unusable(path):
            notes.append(f"{path} is left out: {reason}")
        else:
            return ["--mmproj", path]
    return []


def _files_of(folder: Path, notes: Notes) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        notes.append(f"{folder} is left out: {why(error)}")
        return []


def _is_model(path: Path) -> bool:
    """Return whether a file is a model or its first part. A projector (mmproj) is not a model."""
    part = SPLIT.fullmatch(path.name)
    is_first = part is None or int(part["no"]) == 1
    return path.suffix == ".gguf" and not path.name.startswith("mmproj") and is_first and path.is_file()


def _stem(path: Path) -> str:
    part = SPLIT.fullmatch(path.name)
    return part["stem"] if part else path.stem


def _reason(name: str, path: Path, by_name: Mapping[str, Path]) -> str:
    if name in by_name:
        return f"{by_name[name]} has the same name"
    try:
        _check_name(name, str(path))
        with open(path, "rb") as file:
            return "" if file.read(4) == MAGIC else "it is not a GGUF file"
    except (InvalidArgument, OSError) as error:
        return str(error)


def _check_name(name: str, where: str) -> None:
    if not name.isprintable() or len(name) > MAX_NAME:
        raise InvalidArgument(f"{where}: a name has at most {MAX_NAME} printable characters")


def _check_aliases(entries: Iterable[Entry]) -> None:
    owners: dict[str, str] = {}
    for entry in entries:
        for name in entry.names:
            if owners.setdefault(name, entry.name) != entry.name:
                raise InvalidArgument(f"two models are named {name!r}: {owners[name]} and {entry.name}")


def fingerprint_of(options: Options, words: Sequence[str]) -> str:
    """Return the SHA-256 of a model's flags and its files' paths, sizes and modification times."""
    digest = hashlib.sha256(repr((options, list(words))).encode())
    adapters = (path for _, path, _ in options.adapters)
    for path in filter(None, (options.path, options.draft, options.mmproj, *adapters)):
        for file in _parts(Path(path)):
            try:
                status = os.stat(file)
            except OSError:
                continue
            digest.update(repr((str(file), status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


def _parts(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.iterdir())
    part = SPLIT.fullmatch(path.name)
    if part is None:
        return [path]
    files = sorted(path.parent.iterdir())
    return [file for file in files if (of := SPLIT.fullmatch(file.name)) and of["stem"] == part["stem"]]
