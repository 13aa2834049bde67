"""`vkbackend plan`: show how a model would be split over devices, without loading it.

The plan lists the heads, FFN columns, vocabulary rows and bytes of each device. It also lists the all-reduces
of one token, and the predicted time per token without attention over the context. Each new device is measured
for about a second, unless its speeds are given. The exit code is 1 if the model does not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vkbackend.figures import short
from vkbackend.meta.plan import Plan
from vkbackend.models.placement.layout import Layout
from vkbackend.models.placement.memory_report import ITEMS, itemised
from vkbackend.runtime import Device
from vkbackend.tools.console import MIB, console, printable, size, table, write_json
from vkbackend.tools.flags.adapters import add_adapter_arguments
from vkbackend.tools.flags.assumed import add_assumed_arguments
from vkbackend.tools.flags.devices import add_device_arguments
from vkbackend.tools.flags.experiments import add_experiment_arguments
from vkbackend.tools.flags.placement import add_placement_arguments
from vkbackend.tools.flags.speculation import add_speculation_arguments
from vkbackend.tools.flags.vision import add_vision_arguments
from vkbackend.tools.plan_mixture import show_mixture
from vkbackend.tools.plan_report import AUTO, Report, report

MEMORY_COLUMNS = {
    "weights": "weights",
    "mapped": "mapped",
    "mirrored": "of these mirrored",
    "adapters": "of these adapters",
    "kv": "KV",
    "scratch": "scratch",
    "host": "in host memory",
    "stream": "for weights in the file",
    "shared": "shared",
    "staging": "staging",
    "padding": "of all padding",
    "read_per_token": "read per token",
}
PROJECTOR_COLUMNS = {"weights": "weights", "kv": "tables", "scratch": "scratch", "staging": "staging"}
SHOWN_ITEMS = dict(zip(ITEMS, ITEMS, strict=True)) | {
    "mirrored": "mirrored again",
    "kv": "KV cache",
    "stream": "memory for weights in the file",
}
RECURRENT = ("k_heads", "ssm_heads", "ssm_groups")  # hidden without such layers
DIMS = {
    "heads": "heads",
    "kv_heads": "kv heads",
    "k_heads": "key heads",
    "ssm_heads": "ssm heads",
    "ssm_groups": "ssm groups",
    "ffn": "ffn columns",
    "vocab": "vocabulary rows",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-m", "--model", metavar="FILE", help="the model, a .gguf file")
    add("--synthetic", metavar="SHAPE:TYPE",
        help="a published shape instead of a file, for example llama-8b:Q4_K")  # fmt: skip
    add("-c", "--ctx-size", dest="n_ctx", type=int, default=512, metavar="N",
        help="context size in tokens; 0: the model's own (default: 512)")  # fmt: skip
    add("--json", action="store_true",
        help="print one JSON object: plan, devices and totals (bytes), traffic, prediction (ms)")  # fmt: skip
    add_device_arguments(parser, shares=AUTO)
    parser.set_defaults(tensor_split=AUTO)
    add_placement_arguments(parser)
    add_adapter_arguments(parser)
    add_speculation_arguments(parser)
    add_vision_arguments(parser)
    add_experiment_arguments(parser)
    add_assumed_arguments(parser)


def runs(plans: Sequence[Plan], names: Sequence[str]) -> list[tuple[str, Plan]]:
    """Merge consecutive layers with equal plans, for example into ("blk.0..3", plan)."""
    out: list[tuple[str, str, Plan]] = []
    for name, plan in zip(names, plans, strict=True):
        if out and out[-1][2] == plan:
            out[-1] = out[-1][0], name, plan
        else:
            out.append((name, name, plan))
    return [(a if a == b else f"{a}..{b.rpartition('.')[2]}", plan) for a, b, plan in out]


def named_plans(layout: Layout) -> list[tuple[str, Plan]]:
    names = [f"blk.{il}" for il in range(len(layout.plans))]
    return runs([*layout.plans, layout.output_plan], [*names, "output"])


def shown_dims(layout: Layout) -> list[str]:
    return [dim for dim in DIMS if dim not in RECURRENT or any(dim in plan.ranges for plan in layout.plans)]


def plan_rows(layout: Layout, devices: Sequence[Device]) -> list[list[str]]:
    """Return a row per device for each group of equal layers, with "begin:end" of every dimension and the
    number of expert columns."""
    rows = []
    for name, plan in named_plans(layout):
        for d, device in enumerate(devices):
            cells = []
            for dim in shown_dims(layout):
                begin, end = plan.ranges.get(dim, ((0, 0),) * len(devices))[d]
                cell = f"{begin}:{end}" if end > begin else "-"
                if dim == "ffn" and plan.experts:
                    columns = [e[d][1] - e[d][0] for e in plan.experts]
                    beside = f", {cell}" if dim in plan.ranges else ""
                    cell = f"{sum(columns)} of {len(columns)} experts{beside}"
                cells.append(cell)
            rows.append([name if not d else "", device.name, *cells])
    return rows


def draft_rows(plan_report: Report) -> list[list[str]]:
    """Return a row per exchange time and acceptance, with the speed-up of each length of drafts."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for gain in plan_report.gains:
        key = f"{gain.exchange_us:.0f}", short(gain.token_ms), f"{gain.acceptance:g}"
        rows.setdefault(key, []).append(f"{gain.speed_up:.2f}")
    return [[*key, *cells] for key, cells in rows.items()]


def to_json(plan_report: Report, path: str) -> dict[str, Any]:
    plans = [*plan_report.layout.plans, plan_report.layout.output_plan]
    names = [*(f"blk.{il}" for il in range(len(plan_report.layout.plans))), "output"]
    p = plan_report.prediction
    return {
        "model": path,
        "fits": not plan_report.misfit,
        "advice": plan_report.misfit,
        "notes": list(plan_report.notes),
        "plan": [
            {"layer": name, **plan.ranges, **({"experts": plan.experts} if plan.experts else {})}
            for name, plan in zip(names, plans, strict=True)
        ],
        "devices": plan_report.per_device(),
        "totals": itemised(plan_report.layout, plan_report.sizes),
        "traffic": plan_report.traffic(),
        "bus": plan_report.bus(),
        "prediction": {
            "tensor_split": p.tensor_split,
            **asdict(p.times),
            "total_ms": p.times.total_ms,
            "fewer": [plan_report.devices[d].name for d in p.fewer],
            "fewer_total_ms": p.fewer_times.total_ms if p.fewer_times else None,
            "alone": plan_report.devices[p.alone].name if p.alone_times else None,
            "alone_total_ms": p.alone_times.total_ms if p.alone_times else None,
            "break_even_us": p.break_even_us if p.alone_times else None,
        },
        **({"mixture": plan_report.mixture.to_json()} if plan_report.mixture else {}),
        **_draft_json(plan_report),
        **_projector_json(plan_report),
    }


def _draft_json(plan_report: Report) -> dict[str, Any]:
    if not plan_report.gains:
        return {}
    draft = plan_report.draft
    held = {device.name: draft.nbytes(d) for d, device in enumerate(draft.devices)} if draft else {}
    return {"draft": {"devices": held, "gains": [asdict(gain) for gain in plan_report.gains]}}


def _projector_json(plan_report: Report) -> dict[str, Any]:
    if (projector := plan_report.projector) is None:
        return {}
    held = {home: projector.held.homes[home] for home in PROJECTOR_COLUMNS}
    return {"projector": {"device": projector.device.name, **held, "held": sum(held.values())}}


def show(plan_report: Report) -> None:
    out = console()
    slices = ("layers", "device", *(DIMS[dim] for dim in shown_dims(plan_report.layout)))
    out.print(table("plan", slices, plan_rows(plan_report.layout, plan_report.devices)))
    per_device, columns = plan_report.per_device(), dict(MEMORY_COLUMNS)
    for rare in ("adapters", "stream"):
        if not any(row[rare] for row in per_device):
            del columns[rare]
    rows = [
        (
            row["device"],
            f"{row['share']:g}",
            *(row[key] / MIB for key in columns),
            short(row["bytes_per_s"] / 1e9),
        )
        for row in per_device
    ]
    out.print(table("memory in MiB", ("device", "share", *columns.values(), "GB/s"), rows))
    if bus := plan_report.bus():
        names = [f"prompt token, -ub {n}" for n in bus[0]["prompt"]]
        over_bus = [
            (row["device"], *(n / MIB for n in (row["token"], *row["prompt"].values()))) for row in bus
        ]
        out.print(table("weights read over the bus in MiB", ("device", "token", *names), over_bus))
    if plan_report.mixture:
        show_mixture(out, plan_report.mixture)
    if draft := plan_report.draft:
        kinds = "weights", "kv", "scratch", "staging"
        rows_of = [
            (device.name, *(draft.held[d].homes[kind] / MIB for kind in kinds))
            for d, device in enumerate(draft.devices)
        ]
        out.print(table("draft model in MiB", ("device", "weights", "KV", "scratch", "staging"), rows_of))
    if projector := plan_report.projector:
        nbytes = [projector.held.homes[home] / MIB for home in PROJECTOR_COLUMNS]
        titles = ("device", *PROJECTOR_COLUMNS.values())
        out.print(table("projector in MiB", titles, [(projector.device.name, *nbytes)]))
    if plan_report.gains:
        lengths = dict.fromkeys(f"{gain.n_drafted} drafted" for gain in plan_report.gains)
        titles = ("exchange us", "drafted token ms", "accepted", *lengths)
        out.print(table("predicted speed-up by drafts", titles, draft_rows(plan_report)))
    n, traffic = itemised(plan_report.layout, plan_report.sizes), plan_report.traffic()
    parts = " + ".join(f"{SHOWN_ITEMS[item]} {size(n[item])}" for item in ITEMS if n[item])
    lines = [
        f"all devices together {size(n['held'])} = {parts}",
        f"per token {traffic['reduces']} exchanges of {size(traffic['bytes'])} together; all devices write "
        f"{size(traffic['written'])}",
        *plan_report.prediction.lines([device.name for device in plan_report.devices]),
        *plan_report.notes,
        *([f"does not fit: {plan_report.misfit}"] if plan_report.misfit else []),
    ]
    for line in lines:
        out.print(printable(line), markup=False, soft_wrap=not out.is_terminal)


def run(args: argparse.Namespace) -> int:
    plan_report = report(args)
    if args.json:
        write_json(to_json(plan_report, args.model or args.synthetic))
    else:
        show(plan_report)
    return 1 if plan_report.misfit else 0


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["plan", *sys.argv[1:]]))
