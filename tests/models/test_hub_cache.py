"""Test the names of models in the Hub's cache, and the removal of models."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest
from systems import WINDOWS

from vkbackend.models.hub_cache import cached_models, cached_projectors, remove

pytestmark = pytest.mark.no_vulkan

FILES = (
    "tale-Q4_K_M.gguf", "tale-Q8_0.gguf", "big/tale-BF16-00001-of-00002.gguf",
    "big/tale-BF16-00002-of-00002.gguf", "cut-Q2_K-00001-of-00002.gguf", "mmproj-F16.gguf",
    "tale.imatrix.gguf",
)  # fmt: skip


@pytest.fixture(params=["links", "files"])
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two revisions of me/tale. The older revision lacks a file. With links, files of the same name share a
    blob. Without links, as on most Windows machines, the snapshots hold the files."""
    has_links = request.param == "links"
    if has_links and WINDOWS:
        pytest.skip("links need a privilege")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--me--tale"
    (folder / "blobs").mkdir(parents=True)
    for revision, names in (("a" * 40, FILES[1:]), ("b" * 40, FILES)):
        for name in names:
            blob, link = folder / "blobs" / name.replace("/", "_"), folder / "snapshots" / revision / name
            link.parent.mkdir(parents=True, exist_ok=True)
            (blob if has_links else link).write_bytes(b"GGUF")
            if has_links:
                link.symlink_to(blob)
    (tmp_path / "models--me--gone" / "snapshots" / "c").mkdir(parents=True)
    if has_links:
        (tmp_path / "models--me--gone" / "snapshots" / "c" / "x-Q4_0.gguf").symlink_to(tmp_path / "nothing")
    (tmp_path / "datasets--me--set").mkdir()
    return folder


def test_names(cache: Path) -> None:
    revision = cache / "snapshots" / ("b" * 40)
    assert cached_models() == {
        "me/tale:BF16": revision / FILES[2],
        "me/tale:Q4_K_M": revision / FILES[0],
        "me/tale:Q8_0": revision / FILES[1],
        "me/tale:tale.imatrix": revision / FILES[6],
    }


def test_removal(cache: Path) -> None:
    """All parts in all revisions are removed, and no other file."""
    models = cached_models()
    remove(models.pop("me/tale:BF16"))
    assert cached_models() == models and not [path for path in cache.rglob("*") if "BF16" in path.name]
    assert len({path.name for path in cache.rglob("*.gguf") if path.is_file()}) == len(FILES) - 2
    for path in models.values():
        remove(path)
    kept = {path.name for path in cache.rglob("*") if path.is_file()}
    assert cached_models() == {} and kept == {"cut-Q2_K-00001-of-00002.gguf", "mmproj-F16.gguf"}


def test_the_last_file_takes_its_folder(cache: Path) -> None:
    for name in FILES[1:]:
        for link in cache.glob(f"snapshots/*/{name}"):
            link.unlink()
    remove(cached_models()["me/tale:Q4_K_M"])
    assert not cache.exists()


def test_projectors(cache: Path) -> None:
    """A projector may be in another folder or revision than the model."""
    for path in cached_models().values():
        assert cached_projectors(path)[0] == str(cache / "snapshots" / ("b" * 40) / "mmproj-F16.gguf")
    (cache / "snapshots" / ("b" * 40) / "mmproj-F16.gguf").unlink()
    path = cached_models()["me/tale:Q8_0"]
    assert cached_projectors(path) == [str(cache / "snapshots" / ("a" * 40) / "mmproj-F16.gguf")]
    for other in cache.glob("snapshots/*/cut-*"):
        other.unlink()
    for path in cached_models().values():
        remove(path)
    assert not cache.exists(), "a projector alone is removed"
