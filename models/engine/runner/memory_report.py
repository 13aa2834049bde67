from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vkbackend.buffer import Home
from vkbackend.meta.mesh import Mesh
from vkbackend.models.engine.runner.group import Group
from vkbackend.models.placement.layout import Layout, adapters_nbytes


def memory_report(
    mesh: Mesh, layout: Layout, free_before: Sequence[int | None], group: Group | None
) -> list[dict[str, Any]]:
    """Return bytes by purpose for each device of all nodes, as in `LLM.memory`.

    Host pages that all devices share count for the first device: tables in `shared`, and reduce slots in
    `staging`.
    """
    report: list[dict[str, Any]] = []
    others = group.memory() if group else {}
    for i, device in enumerate(mesh.devices):
        if i in others:
            report.append(others[i] | {"device": device.name})
            continue
        n = device.nbytes
        shared, slots = mesh.pages_nbytes if i == 0 else (0, 0)
        report.append(
            {
                "device": device.name,
                "weights": n[Home.WEIGHTS],
                "adapters": adapters_nbytes(layout, i),
                "mapped": mesh.stores.mapped_nbytes(i),
                "kv": n[Home.KV],
                "scratch": n[Home.SCRATCH],
                "host": n[Home.HOST],
                "stream": n[Home.STREAM],
                "shared": shared,
                "staging": n[Home.STAGING] + n[Home.VISIBLE] + n[Home.SLOTS] + slots,
                "free_before": free_before[i],
                "free": device.free_nbytes(),
            }
        )
    return report
