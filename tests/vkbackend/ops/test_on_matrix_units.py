"""Ops equal their twins, and prompts run, on a lavapipe with matrix units (`tools/setup.sh --compilers`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vkbackend.errors import UnsupportedFeature
from vkbackend.ops.table import OPS
from vkbackend.tools.measure.compilers import start_with_matrix_units

pytestmark = pytest.mark.wide
OPS_OF_UNITS = {name for name, op in OPS.items() if "matrix_units" in op.needs}


def run(module: str, *arguments: str, given: str = "", timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        command, env = start_with_matrix_units(module, arguments)
    except UnsupportedFeature as why:
        pytest.skip(str(why))
    # DEBUG logs shader variants; EXACT=0 allows 16-bit activations
    env |= {"DEBUG": "4", "VKBACKEND_EXACT": "0"}
    done = subprocess.run(
        command,
        env=env,
        input=given,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=timeout_s,
    )
    assert not done.returncode, done.stderr[-3000:]
    return done


@pytest.mark.timeout(1200)
def test_ops_of_matrix_units() -> None:
    report = json.loads(run("vkbackend.tools.verify", "-c", "Coop", "--json", timeout_s=1100).stdout)
    (device,) = report["devices"]
    assert "cooperative_matrix" in device["features"], device
    ran = {row["shader"].partition(".")[0] for row in report["results"] if row["cases"]}
    assert ran >= OPS_OF_UNITS, OPS_OF_UNITS - ran
    assert not [row["failures"] for row in report["results"] if row["failures"]]


@pytest.mark.timeout(1200)
def test_rows_together() -> None:
    path = Path(__file__).with_name("test_rows_together.py")
    names = "test_rows_together_on_matrix_units", "test_a_row_does_not_depend_on_lists_of_its_tile"
    tests = [f"{path}::{name}" for name in names]
    done = run("pytest", "-q", "--all", "-p", "no:cacheprovider", *tests, timeout_s=1100)
    assert "4 passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-3000:]


@pytest.mark.timeout(1200)
def test_forms_of_products() -> None:
    path = Path(__file__).with_name("test_unit_forms.py")
    done = run("pytest", "-q", "--all", "-p", "no:cacheprovider", str(path), timeout_s=1100)
    assert "7 passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-3000:]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shape", ["llama-1b", "qwen3-30b-a3b"])
def test_prompts_of_models(shape: str) -> None:
    """Each model has a layer of realistic widths, like the models of `vkbackend gpu-report`."""
    others = [f"{name}:Q4_K" for name in ("llama-1b", "qwen3-8b", "qwen3-30b-a3b") if name != shape]
    job = {"part": "shapes", "devices": ["0"], "done": others, "rows": []}
    done = run("vkbackend.tools.report.worker", given=json.dumps(job) + "\n", timeout_s=1100)
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    rows = lines[-1]["rows"]
    assert {row["ops"] for row in rows} == {"exact", "fast"} and all(row["right"] for row in rows), rows
    product = "mat_mul_coop" if shape == "llama-1b" else "mat_mul_id_coop"
    assert f"{product}." in done.stderr and "attn_prefill_coop." in done.stderr
