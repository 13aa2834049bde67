from __future__ import annotations

from typing import Any

import pytest
from device_sets import DEVICE_SETS

from vkbackend.meta.mesh import Mesh
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.studies.bench_caller import measure


@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id == "0,0"])
@pytest.mark.parametrize("process", [False, True])
def test_the_relay_runs_in_another_interpreter_than_a_busy_thread(
    devices: list[str], process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy thread holds the interpreter's lock, and so slows every step that this interpreter runs. The
    test counts the steps of this interpreter. tools/studies/bench_caller.py measures the slowdown."""
    steps, run = [], Mesh.run

    def counted(mesh: Mesh, *args: Any) -> None:
        steps.append(args)
        run(mesh, *args)

    monkeypatch.setattr(Mesh, "run", counted)
    quiet, busy = measure(demo_model(), tuple(devices), process, 4, 2)
    assert quiet > 0 < busy
    # five generations of 4 steps: one warm-up, two without a busy thread, and two with a busy thread
    assert len(steps) == (0 if process else 5 * 4)
