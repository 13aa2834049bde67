"""Makes `golden/*.npz`, the logits of every fixture. Two independent programs must agree on them. If
transformers lacks a model, only llama.cpp computes its logits.

    PYTHONPATH=tests/support python tests/support/oracles/make_golden.py [NAME ...]  # Writes the files.

Needs torch, transformers and xllamacpp. Each file stores transformers' logits, the versions, the NMSE between
both programs, and the smallest effect of a tensor on the logits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from math import inf, isnan
from pathlib import Path

import numpy as np
from oracles import hf, llama_cpp
from oracles.fixture import N_PREFILL, N_STEERED, N_VOCAB, PROMPT, Fixture, write
from oracles.fixtures import FIXTURES, build
from places import GOLDEN

STEPS = [PROMPT[:N_PREFILL], *([token] for token in PROMPT[N_PREFILL:])]
# Bounds on the NMSE between the two programs, and between one batch and single tokens in one program.
# llama.cpp's GELU uses an F16 table with errors of up to 5e-4, and rounding decides which entry is read.
BOUNDS, WITH_GELU = (1e-10, 1e-11), (1e-6, 1e-8)
GELU = {"bloom", "codeshell", "falcon", "gpt2", "gptneox", "grok", "phi2", "starcoder", "starcoder2"}
NO_OTHER = "transformers lacks this model"
MATTERS = 1e-2  # a neutral tensor in place of any tensor must change the logits by at least this relative RMS


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(((got - want) ** 2).sum() / (want**2).sum())


def golden(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray, dict[str, object]]:
    fixture = build(name)
    if fixture.alone.startswith("llama.cpp refuses"):
        return by_transformers(fixture)
    path = write(fixture, folder / "model.gguf")
    theirs, theirs_stepped = (llama_cpp.logits(path, batches, N_VOCAB) for batches in ([PROMPT], STEPS))
    steering = fixture.steering()
    if name not in hf.BUILDERS:
        steered = llama_cpp.logits(path, [PROMPT], N_VOCAB, steering)
        about = {"made by": llama_cpp.versions(), "agrees with": f"nobody: {NO_OTHER}", "nmse": []}
        assert nmse(steered, theirs) > MATTERS**2, f"{name}: control vectors change nothing"
        weakest = checked(fixture, theirs, [nmse(theirs_stepped, theirs)], folder)
        return theirs, steered[-N_STEERED:], about | weakest
    ours, ours_stepped = (hf.logits(fixture, batches) for batches in ([PROMPT], STEPS))
    steered = hf.logits(fixture, [PROMPT], steering)
    known = {il: v for il, v in steering.items() if il not in fixture.unsteered}
    alike = hf.logits(fixture, [PROMPT], known) if fixture.unsteered else steered
    apart_steered = nmse(llama_cpp.logits(path, [PROMPT], N_VOCAB, steering), alike)
    agree, _ = bounds(fixture)
    apart, stepped = nmse(theirs, ours), (nmse(theirs_stepped, theirs), nmse(ours_stepped, ours))
    if not fixture.alone:
        assert max(apart, apart_steered) <= agree, f"{name}: NMSE {apart:.1e}, steered {apart_steered:.1e}"
    about = {
        "made by": hf.versions(),
        "agrees with": f"nobody: {fixture.alone}" if fixture.alone else llama_cpp.versions(),
        "nmse": [float(f"{x:.1e}") for x in (apart, apart_steered)],
    }
    assert nmse(steered, ours) > MATTERS**2, f"{name}: control vectors change nothing"
    return ours, steered[-N_STEERED:], about | checked(fixture, theirs, stepped, folder)


def by_transformers(fixture: Fixture) -> tuple[np.ndarray, np.ndarray, dict[str, object]]:
    logits, stepped = (hf.logits(fixture, batches) for batches in ([PROMPT], STEPS))
    steered = hf.logits(fixture, [PROMPT], fixture.steering())
    assert nmse(steered, logits) > MATTERS**2, f"{fixture.name}: control vectors change nothing"
    about = {"made by": hf.versions(), "agrees with": f"nobody: {fixture.alone}", "nmse": []}
    of_neutral = lambda neutral: hf.logits(neutral, [PROMPT])  # noqa: E731
    return logits, steered[-N_STEERED:], about | least(fixture, logits, [nmse(stepped, logits)], of_neutral)


def bounds(fixture: Fixture) -> tuple[float, float]:
    return WITH_GELU if fixture.arch.startswith("gemma") or fixture.arch in GELU else BOUNDS


def checked(
    fixture: Fixture, theirs: np.ndarray, stepped: Sequence[float], folder: Path
) -> dict[str, object]:
    def of_neutral(neutral: Fixture) -> np.ndarray:
        return llama_cpp.logits(write(neutral, folder / "neutral.gguf"), [PROMPT], N_VOCAB)

    return least(fixture, theirs, stepped, of_neutral)


def least(
    fixture: Fixture, logits: np.ndarray, stepped: Sequence[float], of: Callable[[Fixture], np.ndarray]
) -> dict[str, object]:
    """Check that single steps equal a batch, and that every tensor changes the logits. `of` returns a
    fixture's logits. Return the tensor with the smallest effect on the logits."""
    assert max(stepped) <= bounds(fixture)[1], f"{fixture.name}: steps differ from a batch, NMSE {stepped}"
    change, tensor = min((change, tensor) for tensor, change in changes(fixture, logits, of).items())
    assert change > MATTERS, f"{fixture.name}: without {tensor} the logits change by {change:.1e} only"
    return {"matters least": [tensor, float(f"{change:.1e}")]}


def changes(fixture: Fixture, logits: np.ndarray, of: Callable[[Fixture], np.ndarray]) -> dict[str, float]:
    errors = {}
    for name, values in fixture.tensors.items():
        if fixture.unread and name.startswith(fixture.unread):
            continue
        neutral = deepcopy(fixture)
        multiplies = "norm" in name or "rope_" in name or "scale" in name
        neutral.tensors[name] = np.ones_like(values) if multiplies else np.zeros_like(values)
        change = nmse(of(neutral), logits) ** 0.5
        # Division by the neutral tensor's zeros produces NaN.
        errors[name] = inf if isnan(change) else change
    return errors


def main() -> None:
    for name in sys.argv[1:] or FIXTURES:
        with tempfile.TemporaryDirectory() as folder:
            logits, steered, about = golden(name, Path(folder))
        np.savez_compressed(GOLDEN / f"{name}.npz", logits=logits, steered=steered, about=json.dumps(about))
        print(f"{name:16} {about}", flush=True)


if __name__ == "__main__":
    main()
