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
    """A busy thread slows an engine by holding the interpreter's lock, so count the steps that this
    interpreter relays (tools/studies/bench_caller.py measures the effect)."""
    steps, run = [], Mesh.run

    def counted(mesh: Mesh, *args: Any) -> None:
        steps.append(args)
        run(mesh, *args)

    monkeypatch.setattr(Mesh, "run", counted)
    quiet, busy = measure(demo_model(), tuple(devices), process, 4, 2)
    assert quiet > 0 < busy
    assert len(steps) == (0 if process else 5 * 4)  # a warm-up, two quiet and two busy generations
