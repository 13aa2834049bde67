from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from device_sets import DEVICE_SETS, nmse
from runners import F32, load_runner

from vkbackend.models.engine.runner.runner import Runner
from vkbackend.recording import Dispatch
from vkbackend.step import Mix, Run

N_CTX = 512  # With a context of 512, a GPU divides the keys of attention among dispatches.
DEPTHS = 140, 33  # DEPTHS are the numbers of positions in the two decoding slots.
PROMPT = 21


def tokens_of(slot: int, n: int) -> list[int]:
    return [3 + (7 * slot + 5 * i) % 200 for i in range(n)]


def stored(path: Path, devices: list[str]) -> Runner:
    """Return a runner whose first two slots contain the numbers of positions in DEPTHS."""
    runner = load_runner(path, devices=devices, n_ctx=N_CTX, n_slots=3, n_ubatch=256, **F32)
    for slot, depth in enumerate(DEPTHS):
        runner.step(tokens_of(slot, depth), [Run(slot, 0, depth, 0)], [])
    return runner


@pytest.mark.parametrize(
    "devices", [["numpy"], next(p for p in DEVICE_SETS if p.id == "0")], ids=lambda d: ",".join(d)
)
def test_decoding_and_prompt_rows_in_one_step(models: Path, devices: list[str]) -> None:
    path = models / "stories-narrow-F32.gguf"
    runner = stored(path, devices)
    want = [runner.step([9], [Run(slot, 0, 1, depth)], [0])[0].copy() for slot, depth in enumerate(DEPTHS)]
    prompt = tokens_of(2, PROMPT)
    want.append(runner.step(prompt, [Run(2, 0, PROMPT, 0)], [PROMPT - 1])[0].copy())
    runner.close()
    runner = stored(path, devices)
    runs = [Run(0, 0, 1, DEPTHS[0]), Run(1, 1, 1, DEPTHS[1]), Run(2, 2, PROMPT, 0)]
    got = runner.step([9, 9, *prompt], runs, [0, 1, PROMPT + 1]).copy()
    kind = next(kind for kind in runner.mesh.steps.by_kind if kind.mix is Mix.BOTH)
    [executable] = runner.mesh.steps.by_kind[kind].executables
    ops = {c.op for c in executable.recording.accesses() if isinstance(c, Dispatch)}
    splits = set() if runner.mesh.devices[0].limits.is_cpu else {"attn_combine"}
    runner.close()
    assert nmse(got, np.array(want)) <= 1e-9
    assert {op for op in ops if op.startswith("attn")} == {"attn_decode", "attn_prefill", *splits}
