"""RoPE options override the values of the model file. A saved state can be loaded only with the same RoPE
options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import F32, STRING, U32, gguf_bytes, key
from runners import load_runner

from vkbackend.errors import InvalidArgument
from vkbackend.models.architectures.reading import read_rope
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.rope_options import state_rope
from vkbackend.rope import RopeTable
from vkbackend.step import Run
from vkbackend.tools.cli import main

pytestmark = pytest.mark.no_vulkan

PLAIN: dict[str, Any] = {}
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 256, "yarn_beta_fast": 16.0}


def table(tmp_path: Path, scaling: dict[str, Any], **options: Any) -> RopeTable:
    keys = [key("general.architecture", STRING, "llama"), key("llama.rope.freq_base", F32, 5000.0)]
    kinds = {str: STRING, float: F32, int: U32}
    keys += [key(f"llama.rope.scaling.{name}", kinds[type(v)], v) for name, v in scaling.items()]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys, [], b""))
    with GGUF.open(path) as gguf:
        state_rope(gguf, Options(str(path), **options))
        return read_rope(gguf, 64, 1024)


@pytest.mark.parametrize(
    ("scaling", "options", "wanted"),
    [
        (PLAIN, {}, {"orig_ctx": 1024}),
        (PLAIN, {"rope_freq_base": 1e6}, {"orig_ctx": 1024, "freq_base": 1e6}),
        (PLAIN, {"rope_scale": 8}, {"orig_ctx": 1024, "scaling": "linear", "factor": 8.0}),
        (PLAIN, {"rope_freq_scale": 0.125}, {"orig_ctx": 1024, "scaling": "linear", "factor": 8.0}),
        (
            PLAIN,
            {"rope_scaling": "yarn", "rope_scale": 2.0, "yarn_orig_ctx": 512, "yarn_attn_factor": 0.5},
            {"orig_ctx": 512, "scaling": "yarn", "factor": 2.0, "attn_factor": 0.5},
        ),
        (YARN, {}, {"orig_ctx": 256, "scaling": "yarn", "factor": 4.0, "beta_fast": 16.0}),
        (
            YARN,
            {"rope_scale": 2, "yarn_beta_slow": 2, "yarn_beta_fast": 64, "yarn_ext_factor": 0.5},
            {
                "orig_ctx": 256,
                "scaling": "yarn",
                "factor": 2.0,
                "beta_fast": 64.0,
                "beta_slow": 2.0,
                "ext_factor": 0.5,
            },
        ),
        (
            YARN,
            {"yarn_beta_fast": -1, "yarn_ext_factor": -1.0, "rope_freq_base": 0, "rope_scale": 0},
            {"orig_ctx": 256, "scaling": "yarn", "factor": 4.0, "beta_fast": 16.0},
        ),
        (
            YARN,
            {"rope_scaling": "linear"},
            {"orig_ctx": 256, "scaling": "linear", "factor": 4.0, "beta_fast": 16.0},
        ),
        (YARN, {"rope_scaling": "none"}, {"orig_ctx": 256, "beta_fast": 16.0}),
    ],
)
def test_the_table(tmp_path: Path, scaling: Any, options: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert table(tmp_path, scaling, **options) == RopeTable(**{"n_rot": 64, "freq_base": 5000.0} | wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_scaling": "dynamic"}, "there are: none, linear, yarn"),
        ({"rope_scale": 2, "rope_freq_scale": 0.5}, "leave one out"),
        ({"rope_freq_base": float("nan")}, "rope_freq_base"),
        ({"yarn_beta_fast": -2}, "yarn_beta_fast"),
        ({"yarn_orig_ctx": 1.5}, "yarn_orig_ctx"),
    ],
)
def test_values_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Options("model.gguf", **options)


def test_a_stretched_model_is_another(models: Path) -> None:
    marks, logits = [], []
    for options in ({}, {"rope_scale": 2.0}, {"rope_freq_scale": 0.5}, {"rope_freq_base": 500.0}):
        runner = load_runner(models / "stories-narrow-F16.gguf", devices=["numpy"], n_ctx=32, **options)
        try:
            marks.append(runner.fingerprint)
            logits.append(runner.step([1, 5, 9, 7], [Run(0, 0, 4, 0)], [3]).copy())
        finally:
            runner.close()
    assert marks[1] == marks[2] and len(set(marks)) == 3
    assert np.array_equal(logits[1], logits[2]) and np.isfinite(logits[0]).all()
    assert not np.array_equal(logits[0], logits[1]) and not np.array_equal(logits[0], logits[3])


YARN_FLAGS = "--rope-scaling yarn --rope-freq-scale 0.1 --yarn-orig-ctx 64 --yarn-attn-factor 0.2"


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for flags in ("", "--rope-scaling none --rope-freq-base 0 --yarn-ext-factor -1", YARN_FLAGS):
        words = f"{flags} --yarn-beta-slow 1.5 --yarn-beta-fast 30 --temp 0 -n 12 -dev numpy".split()
        assert main(["generate", "-p", "Once upon a time", *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    with pytest.raises(SystemExit):
        main(["generate", "-dev", "numpy", "-p", "Once", "--rope-scale", "much"])
    assert "--rope-scale" in capsys.readouterr().err
