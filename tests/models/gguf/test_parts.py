from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf_files import F32, STRING, U32, array, gguf_bytes, key, tensor
from runners import load_runner

from vkbackend.errors import GGUFError, InvalidArgument
from vkbackend.models.gguf.parts import MAX_PARTS, cut, merge_gguf, part_paths, split_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.step import Run
from vkbackend.tools.cli import main

pytestmark = pytest.mark.no_vulkan

NBYTES = [4, 400, 40, 1200, 4, 4]  # size of each F32 tensor in bytes


def file_of(path: Path, align: int = 64) -> Path:
    rng, rows, data = np.random.default_rng(3), [], b""
    for i, nbytes in enumerate(NBYTES):
        rows.append(tensor(f"blk.{i}", (nbytes // 4,), 0, len(data)))
        data += rng.bytes(nbytes) + bytes(-nbytes % align)
    keys = [key("general.architecture", STRING, "llama"), array("odd", F32, [1.5, float("nan")])]
    path.write_bytes(gguf_bytes([*keys, key("split.count", U32, 0)], rows, data, align=align))
    return path


def contents(path: Path) -> dict[str, bytes]:
    with GGUF.open(path) as model:
        return {name: model.data(name).tobytes() for name in model.tensors}


def values(path: Path) -> dict[str, bytes]:
    with GGUF.open(path) as model:
        return {key: model.metadata.stored(key) for key in model.metadata if not key.startswith("split.")}


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        ({"max_tensors": 4}, [4, 2]),
        ({"max_tensors": 4, "first_without": True}, [0, 4, 2]),
        ({"max_nbytes": 404}, [2, 1, 1, 2]),
        ({"max_nbytes": 10**9}, [6]),
    ],
)
def test_split_then_merge_is_the_identity(tmp_path: Path, limits: dict[str, int], counts: list[int]) -> None:
    whole = file_of(tmp_path / "whole.gguf")
    with GGUF.open(whole) as model:
        parts = cut(model.tensors.values(), **limits)  # type: ignore[arg-type]
        paths = split_gguf(model, tmp_path / "part", parts)
    assert [len(part) for part in parts] == counts
    assert paths == [tmp_path / f"part-{i + 1:05d}-of-{len(counts):05d}.gguf" for i in range(len(counts))]
    assert contents(paths[-1]) == contents(whole) and values(paths[0]) == values(whole)
    for path, count in zip(paths, counts, strict=True):
        assert len(GGUFReader(path).tensors) == count
    with GGUF.open(paths[0]) as model:
        merge_gguf(model, tmp_path / "merged.gguf")
    assert contents(tmp_path / "merged.gguf") == contents(whole)
    assert values(tmp_path / "merged.gguf") == values(whole)


def test_a_split_model_runs(models: Path, tmp_path: Path) -> None:
    path, logits = models / "stories-narrow-F16.gguf", []
    assert main(["split", str(path), str(tmp_path / "part"), "--split-max-tensors", "7"]) == 0
    first = next(iter(sorted(tmp_path.glob("part-00001-of-*.gguf"))))
    assert main(["merge", str(first), str(tmp_path / "merged.gguf")]) == 0
    for of in (path, first, tmp_path / "merged.gguf"):
        runner = load_runner(of, devices=["numpy"], n_ctx=32)
        try:
            logits.append(runner.step([1, 5, 9], [Run(0, 0, 3, 0)], [2]).copy())
        finally:
            runner.close()
    assert np.isfinite(logits[0]).all()
    assert all(np.array_equal(logits[0], other) for other in logits[1:])


def test_no_file_is_left_if_a_part_cannot_be_written(tmp_path: Path) -> None:
    whole = file_of(tmp_path / "whole.gguf")
    (tmp_path / "part-00002-of-00002.gguf").mkdir()
    with GGUF.open(whole) as model, pytest.raises(GGUFError, match="not a regular file"):
        split_gguf(model, tmp_path / "part", cut(model.tensors.values(), max_tensors=3))
    assert {path.name for path in tmp_path.iterdir()} == {"whole.gguf", "part-00002-of-00002.gguf"}


def test_the_source_is_not_overwritten(tmp_path: Path) -> None:
    whole = file_of(tmp_path / "whole.gguf")
    before = whole.read_bytes()
    with GGUF.open(whole) as model, pytest.raises(InvalidArgument, match="file of the source model"):
        merge_gguf(model, whole)
    assert whole.read_bytes() == before


def test_too_many_parts() -> None:
    with pytest.raises(InvalidArgument, match="at most 65535"):
        part_paths("part", MAX_PARTS + 1)


@pytest.mark.parametrize(
    "words", [["--split-max-size", "2T"], ["--split-max-tensors", "0"], ["--split-max-size", "M"]]
)
def test_invalid_limits_are_refused(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = file_of(tmp_path / "whole.gguf")
    with pytest.raises(SystemExit):
        main(["split", str(whole), str(tmp_path / "part"), *words])
    assert words[1] in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 1


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = file_of(tmp_path / "whole.gguf")
    assert main(["split", str(whole), str(tmp_path / "part"), "--split-max-tensors", "4", "--dry-run"]) == 0
    assert "part-00002-of-00002.gguf: 2 tensors" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 1
