from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tiny_vision import write_projector

from vkbackend.errors import InvalidArgument
from vkbackend.models.options import Options
from vkbackend.tools.cli import parse
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.serve import entry_of
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.router import start
from vkbackend.tools.server.router.cards import Machine
from vkbackend.tools.server.router.places import Place
from vkbackend.tools.server.router.registry import Entry, Notes, models_in
from vkbackend.tools.server.router.start import listing_of

pytestmark = pytest.mark.no_vulkan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    (models / "large").mkdir(parents=True)
    (models / "pair").mkdir()
    (models / "empty").mkdir()
    for name in (
        "tale.gguf", "large/large-00001-of-00002.gguf", "large/large-00002-of-00002.gguf",
        "large/mmproj-F16.gguf", "pair/one.gguf", "pair/two.gguf", "flat-00001-of-00001.gguf",
        "mmproj-tale.gguf",
    ):  # fmt: skip
        shutil.copy(demo_model(), models / name)
    (models / "broken.gguf").write_bytes(b"no model")
    (models / "notes.txt").write_text("no model", encoding="utf-8")
    return models


def read(*line: str) -> tuple[dict[str, Entry], Notes]:
    args = parse(["serve", *line], raises=True)[0]
    entries, notes = listing_of(args, entry_of)()
    return {entry.name: entry for entry in entries}, notes


def preset(folder: Path, text: str) -> str:
    path = folder / "presets.ini"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_names(folder: Path) -> None:
    """A model is named after its file, without suffix and part number, or after its sub-folder."""
    notes: Notes = []
    found = models_in(str(folder), notes)
    assert {name: str(path.relative_to(folder)) for name, path in found.items()} == {
        "flat": "flat-00001-of-00001.gguf",
        "large": "large/large-00001-of-00002.gguf",
        "pair/one": "pair/one.gguf",
        "pair/two": "pair/two.gguf",
        "tale": "tale.gguf",
    }
    assert notes == [f"{folder}/broken.gguf is left out: it is not a GGUF file"]


def test_a_damaged_model_is_left_out_and_a_name_twice(folder: Path) -> None:
    (folder / "cut.gguf").write_bytes(Path(demo_model()).read_bytes()[:1000])
    (folder / "tale").mkdir()
    shutil.copy(demo_model(), folder / "tale" / "x.gguf")
    shutil.rmtree(folder / "large")
    (folder / "flat-00001-of-00001.gguf").unlink()
    entries, notes = read("--models-dir", str(folder), "-c", "64")
    assert sorted(entries) == ["pair/one", "pair/two", "tale"]
    assert len(notes) == 3 and "cut is left out" in notes[2]
    assert any("has the same name" in note for note in notes)


def test_flags_of_the_line_win_over_a_section_and_a_section_over_all(folder: Path) -> None:
    path = preset(
        folder,
        f"""
        version = 1
        ; for all models
        [*]
        c = 96
        LLAMA_ARG_N_PARALLEL = 3
        temp = 0.5
        sleep-idle-seconds = 60
        [pair/one]
        ctx-size = 128
        alias = first, 1st
        no-mmap = true
        cache-prompt = off
        load-on-startup = yes
        stop-timeout = 3
        device = numpy
        [mine]
        model = {folder}/tale.gguf
        temp = 0.75
        """,
    )
    shutil.rmtree(folder / "large")
    (folder / "flat-00001-of-00001.gguf").unlink()
    entries, _ = read("--models-dir", str(folder), "--models-preset", path, "--temp", "0.25", "-np", "2")
    one, tale, mine = entries["pair/one"], entries["tale"], entries["mine"]
    assert (one.options.n_ctx, tale.options.n_ctx, one.options.n_slots) == (128, 96, 2)
    assert one.names == ("pair/one", "first", "1st") and one.config.alias == "pair/one"
    assert not one.options.use_mmap and not one.options.prefix_cache and one.devices == ("numpy",)
    assert (one.loads, one.stop_s, one.idle_s) == (True, 3.0, 60.0)
    assert (tale.loads, tale.stop_s, tale.devices) == (False, 10.0, None)
    assert [entry.config.defaults["temperature"] for entry in (one, tale, mine)] == [0.25] * 3
    assert (mine.source, tale.source) == ("preset", "models_dir")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c = 5\n[tale]", "line 1: c before a section"),
        ("[tale]\nnonsense", "line 2: expected KEY = VALUE"),
        ("[tale]\n[tale]", "line 2: the section [tale] appears twice"),
        (
            "[tale]\nctx-sice = 5",
            "[tale] ctx-sice: no flag of `vkbackend serve` has this name (did you",
        ),
        ("[tale]\nc = many", "line 2, [tale] c: argument -c/--ctx-size: invalid int value: 'many'"),
        ("[tale]\nport = 80", "line 2, [tale] port: the server has this flag"),
        ("[*]\napi-key = x", "line 2, [*] api-key: the server has this flag"),
        ("[tale]\nmodels-max = 3", "line 2, [tale] models-max: the server has this flag"),
        ("[tale]\nmmproj-url = x", "line 2, [tale] mmproj-url: "),
        ("[tale]\nload-on-startup = perhaps", "load-on-startup = perhaps: expected true or false"),
        ("[tale]\nstop-timeout = -1", "stop-timeout = -1: expected seconds"),
        ("[other]\nc = 64", "[other]: no such model in the folder; give model or hf-repo"),
        ("[tale]\nalias = flat", "two models are named 'flat'"),
        ("[x]\nmodel = /nowhere.gguf", "[x]: "),
        ("[tale]\nctk = f8", "[tale]"),
    ],
)
def test_errors_of_presets_name_line_section_and_key(folder: Path, text: str, message: str) -> None:
    shutil.rmtree(folder / "large")
    with pytest.raises(InvalidArgument) as caught:
        read("--models-dir", str(folder), "--models-preset", preset(folder, text))
    assert (message in str(caught.value) and "presets.ini" in str(caught.value)) or "two models" in message


def test_wrong_folders(tmp_path: Path) -> None:
    for line in (("--models-dir", str(tmp_path / "no")), ("--models-preset", str(tmp_path / "no.ini"))):
        with pytest.raises(InvalidArgument, match="cannot be read"):
            read(*line)
    with pytest.raises(InvalidArgument, match="no models are there"):
        read("--models-dir", str(tmp_path))


def test_fingerprints_change_with_files_and_flags(folder: Path) -> None:
    def prints(*line: str) -> dict[str, str]:
        entries, _ = read("--models-dir", str(folder), *line)
        return {name: entry.fingerprint for name, entry in entries.items()}

    shutil.rmtree(folder / "large")
    (folder / "flat-00001-of-00001.gguf").unlink()
    first = prints()
    assert len(set(first.values())) == len(first) and prints() == first
    assert all(first[name] != changed for name, changed in prints("-c", "64").items())
    os.utime(folder / "tale.gguf", (1, 1))
    second = prints()
    assert {name for name in first if first[name] != second[name]} == {"tale"}


def test_a_file_that_is_replaced_is_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def places_of(options: Options, *_: object) -> list[Place]:
        planned.append(Path(options.path).stat().st_size)
        return []

    monkeypatch.setattr(start, "places_of", places_of)
    plan = start._plan(Machine({}, (), None), {})
    path = tmp_path / "a.gguf"
    path.write_bytes(b"1")
    entry = Entry("a", Options(str(path)), Config("a", "a"))
    for _ in range(2):
        plan(entry, {})
    assert planned == [1]
    path.write_bytes(b"22")
    plan(entry, {})
    assert planned == [1, 2]


def test_one_model_with_an_idle_limit() -> None:
    entries, _ = read("-m", demo_model(), "--sleep-idle-seconds", "5", "-dev", "numpy")
    (entry,) = entries.values()
    assert (entry.name, entry.idle_s, entry.loads, entry.devices) == ("demo", 5.0, True, ("numpy",))


def test_the_projector_of_a_sub_folder(folder: Path) -> None:
    """A projector belongs to the models of its sub-folder. A file that is not a projector is reported."""
    shutil.rmtree(folder / "large")
    projector = folder / "pair" / "mmproj-F16.gguf"
    shutil.copy(demo_model(), projector)
    entries, notes = read("--models-dir", str(folder))
    assert entries["pair/one"].options.mmproj is None
    assert any("mmproj-F16.gguf is left out: " in note for note in notes)
    write_projector(projector, 64)
    entries, _ = read("--models-dir", str(folder))
    seeing = {name: entry.options.mmproj for name, entry in entries.items() if entry.options.mmproj}
    assert seeing == dict.fromkeys(["pair/one", "pair/two"], str(projector))
    before = entries["pair/one"].fingerprint
    write_projector(projector, 128)
    assert read("--models-dir", str(folder))[0]["pair/one"].fingerprint != before
    text = "[pair/one]\nno-mmproj = true\n[tale]\nmmproj = x.gguf"
    entries, _ = read("--models-dir", str(folder), "--models-preset", preset(folder, text))
    assert entries["pair/one"].options.mmproj is None and entries["tale"].options.mmproj == "x.gguf"
