from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device_sets import device_infos

from vkbackend.tools.cli import main

needs_device = pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present")


@needs_device
def test_callers_here_and_in_a_process(models: Path, capsys: Any) -> None:
    flags = ["-m", str(models / "stories-narrow-Q8_0.gguf"), "-dev", "0", "-n", "3", "-r", "3", "-o", "json"]
    assert main(["bench", "--parallel", "1,3", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["n"], row["process"]) for row in rows] == [(1, False), (3, False), (1, True), (3, True)]
    for row in rows:
        assert 0 < row["itl_p50"] <= row["itl_p99"] and 0 < row["ttft_p50"] <= row["ttft_p99"]
        assert row["tokens_per_s"] > 0 and 0 <= row["hit_rate"] < 1
        assert row["accepted"] is None
    assert rows[1]["hit_rate"] > 0, "every other prompt begins as others do"


@needs_device
@pytest.mark.wide
def test_the_share_of_accepted_tokens(models: Path, capsys: Any) -> None:
    """N-grams cost nothing, so they are tried at any speed of the device."""
    flags = ["-m", str(models / "stories-w256-F16.gguf"), "--spec-type", "ngram", "-dev", "0"]
    flags += ["-n", "200", "-r", "1", "-o", "json"]
    assert main(["bench", "--parallel", "1", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["accepted"] is None or 0 <= row["accepted"] <= 1 for row in rows)
    assert any(row["accepted"] is not None for row in rows)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parallel", "0"], "--parallel"),
        (["--parallel", "1000"], "--parallel"),
        (["--parallel", "x"], "--parallel"),
        (["--parallel", "1", "-n", "1"], "--n-gen"),
        (["--plot", "x.svg"], "--parallel"),
        (["--spec-type", "ngram"], "--parallel"),
    ],
)
def test_wrong_flags(models: Path, capsys: Any, flags: list[str], message: str) -> None:
    model = str(models / "stories-narrow-Q8_0.gguf")
    assert main(["bench", "-m", model, "-dev", "numpy", *flags]) == 2
    assert message in capsys.readouterr().err
