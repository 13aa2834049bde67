"""`vkbackend plan`: show how a model would be split over devices, without loading it.

The plan has the heads, FFN columns, vocabulary rows and bytes of each device, the all-reduces of one token,
and the predicted time per token without attention over the context. Each new device is measured for about a
second. The exit code is 1 if the model does not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vkbackend import env
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.meta.balance import Prediction, auto_split, predict
from vkbackend.meta.plan import Plan
from vkbackend.meta.reduce import Reduce
from vkbackend.meta.split import Kind
from vkbackend.models.adapters.loaded import add_adapters
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.engine.open_devices import open_devices
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.hosts.survey import survey
from vkbackend.models.options import Keywords, Options, with_a_share
from vkbackend.models.placement.cost import bus_bytes_per_row, cost_function, cost_of
from vkbackend.models.placement.draft_plan import DraftPlan, head_token_ms, plan_draft, speed_up
from vkbackend.models.placement.fit import (
    budgets_of,
    check_fit,
    host_budgets,
    sizes_with,
    with_fitting_layers,
)
from vkbackend.models.placement.layout import Layout, lay_out, weight_nbytes
from vkbackend.models.placement.memory_report import HOMES, ITEMS, Held, itemised
from vkbackend.models.placement.step_rows import chosen_rows
from vkbackend.models.placement.tensors import check_weights, notes, weights_in_file
from vkbackend.models.placement.traced_steps import fitting_steps, in_halves, trace_reduces
from vkbackend.runtime import Device
from vkbackend.tools.console import MIB, console, printable, size, table, write_json
from vkbackend.tools.flags import runner
from vkbackend.tools.flags.adapters import add_adapter_arguments
from vkbackend.tools.flags.devices import add_device_arguments
from vkbackend.tools.flags.experiments import add_experiment_arguments
from vkbackend.tools.flags.options import options_of
from vkbackend.tools.flags.placement import add_placement_arguments, host_patterns
from vkbackend.tools.flags.speculation import add_speculation_arguments
from vkbackend.wire import wire_words

AUTO = "auto"
BUS_ROWS = 512, 2048, 4096
ACCEPTANCES, LENGTHS = (0.5, 0.7, 0.85), (1, 3, 7)  # of drafts in the prediction
SHOWN_ITEMS = dict(zip(ITEMS, ITEMS, strict=True)) | {"mirrored": "mirrored again", "kv": "KV cache"}
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
    add("-m", "--model", metavar="FILE", required=True, help="the model, a .gguf file")
    add("-c", "--ctx-size", dest="n_ctx", type=int, default=512, metavar="N",
        help="context size in tokens; 0: the model's own (default: 512)")  # fmt: skip
    add("--json", action="store_true",
        help="print one JSON object: plan, devices and totals (bytes), traffic, prediction (ms)")  # fmt: skip
    add_device_arguments(parser, shares=AUTO)
    parser.set_defaults(tensor_split=AUTO)
    add_placement_arguments(parser)
    add_adapter_arguments(parser)
    add_speculation_arguments(parser)
    add_experiment_arguments(parser)


@dataclass(frozen=True, slots=True)
class Report:
    model: Model
    devices: list[Device]
    options: Options
    layout: Layout
    sizes: list[Held]
    reduces: list[Reduce]
    prediction: Prediction
    misfit: str  # Reason and remedy.
    notes: tuple[str, ...] = ()  # The file's unused parts.
    draft: DraftPlan | None = None

    @property
    def draft_ms(self) -> float:
        """Return the time of a drafted token."""
        if self.draft or not self.model.n_ahead:
            return self.draft.token_ms if self.draft else 0.0
        limits = [device.limits for device in self.devices]
        return head_token_ms(self.model, self.layout, self.options, limits, self.prediction)

    def per_device(self) -> list[dict[str, Any]]:
        cost = cost_of(self.model, self.layout, ())
        rows = []
        for d, held in enumerate(self.sizes):
            mirrored = sum(
                weight_nbytes(load, d) for load in self.layout.loads if load.state.kind is not Kind.SPLIT
            )
            rows.append(
                {
                    "device": self.devices[d].name,
                    "share": self.prediction.tensor_split[d],
                    **{home: held.homes[home] for home in HOMES},
                    "padding": held.items["padding"],
                    "mirrored": mirrored,
                    "read_per_token": cost.read[d],
                    "host_read_per_token": cost.host[d],
                    "bytes_per_s": self.prediction.speeds[d].weights,
                }
            )
        return rows

    def bus(self) -> list[dict[str, Any]]:
        """Return a row per device that reads weights from host memory: the bytes of a token and, by rows of a
        step, of a prompt token."""
        by_rows = {n: bus_bytes_per_row(self.model, self.layout, n) for n in (1, *sorted(self.step_rows()))}
        return [
            {
                "device": device.name,
                "token": by_rows[1][d],
                "prompt": {n: by_rows[n][d] for n in by_rows if n > 1},
            }
            for d, device in enumerate(self.devices)
            if by_rows[1][d]
        ]

    def step_rows(self) -> set[int]:
        return {*BUS_ROWS, self.options.n_ubatch} - {1}

    def traffic(self) -> dict[str, int]:
        """Return the number of all-reduces of one token, the bytes of their messages, and the bytes that
        devices write to shared memory."""
        nbytes = [4 * wire_words(reduce.wire, reduce.elements) for reduce in self.reduces]
        written = sum(n * len(reduce.writers) for n, reduce in zip(nbytes, self.reduces, strict=True))
        return {"reduces": len(nbytes), "bytes": sum(nbytes), "written": written}


def report(args: argparse.Namespace) -> Report:
    """Report too little memory as `misfit`, but raise all other errors of loading."""
    given = Keywords(devices=runner.places) if runner.group else Keywords()
    if args.host_tensors:
        with GGUF.open(args.model) as gguf:
            given["override_tensor"] = host_patterns(args, gguf.tensors)
    options = options_of(args, args.model, **given)
    runner.refuse_hostfile(options)
    with GGUF.open(options.path) as gguf:
        model = load_model(gguf, options.with_heads)
        if options.lora:
            add_adapters(model, gguf, options.adapters)
        types = check_weights(gguf, model)
        model.in_file = weights_in_file(gguf, model)
        options = with_a_share(replace(options, n_ctx=options.n_ctx or model.n_ctx_train))
        if runner.group:
            devices = survey(runner.group, options.devices or (), ()).devices
        else:
            devices = open_devices(
                options.devices,
                options.runtime,
                exact=options.exact or env.exact(),
                batch_invariant=bool(options.speculation),
            )
        drafting = _open_draft(options, devices)
        try:
            draft = None
            if drafting and options.draft and options.of_draft:
                with GGUF.open(options.draft) as small:
                    draft = plan_draft(small, options.of_draft, drafting)
            plan_report = _report(model, types, devices, options, draft)
            lines = [*getattr(args, "notes", ()), *notes(gguf, model, options.n_ctx)]
            return replace(plan_report, notes=tuple(lines))
        finally:
            for device in [*devices, *drafting]:
                device.close()


def _open_draft(options: Options, devices: Sequence[Device]) -> list[Device]:
    """Open the draft model's devices, or none without a draft model."""
    wanted = options.of_draft
    if wanted is None:
        return []
    try:
        return open_devices(wanted.devices, options.runtime, exact=options.exact or env.exact())
    except BaseException:
        for device in devices:
            device.close()
        raise


def _report(
    model: Model,
    types: Mapping[str, str],
    devices: list[Device],
    options: Options,
    draft: DraftPlan | None,
) -> Report:
    limits, budgets = [device.limits for device in devices], budgets_of(devices)
    if draft:
        budgets = draft.without(budgets, devices)
    halves = in_halves(devices, options)
    if not options.n_ubatch:
        equal = replace(options, tensor_split=None) if options.tensor_split == AUTO else options
        room = [*budgets, *host_budgets(devices)]
        rows = chosen_rows(model, types, devices, equal, room, halves)
        options = replace(options, n_ubatch=rows)
    cost = cost_function(model, types, options, limits, options.n_ubatch)
    if options.tensor_split == AUTO:
        prediction = auto_split(devices, cost, budgets)
        options = replace(options, tensor_split=prediction.tensor_split)
    else:
        shares = options.shares or (1,) * len(devices)
        prediction = predict(devices, shares, cost, budgets)
    layout = lay_out(model, types, len(devices), options)
    reduces = trace_reduces(model, layout, options, limits)

    _, steps = fitting_steps(model, layout, options, limits, options.n_ubatch, halves=halves)
    planned = sizes_with(model, types, devices, steps)
    if options.n_gpu_layers == "auto":
        options = with_fitting_layers(devices, options, planned, model.n_layer)
        layout = lay_out(model, types, len(devices), options)
        cost = cost_function(model, types, options, limits, options.n_ubatch)
        prediction = predict(devices, prediction.tensor_split, cost, budgets)
    misfit = ""
    try:
        check_fit(devices, options, planned, model.n_layer)
    except OutOfDeviceMemory as error:
        misfit = str(error)
    sizes = planned(options)
    return Report(model, devices, options, layout, sizes, reduces, prediction, misfit, draft=draft)


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
    """Return a row per acceptance, with the speed-up of each length of drafts."""
    ms, times = plan_report.draft_ms, plan_report.prediction.times
    return [[f"{rate:g}", *(f"{speed_up(times, rate, n, ms):.2f}" for n in LENGTHS)] for rate in ACCEPTANCES]


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
        },
        **_draft_json(plan_report),
    }


def _draft_json(plan_report: Report) -> dict[str, Any]:
    if not plan_report.options.speculation:
        return {}
    draft, times = plan_report.draft, plan_report.prediction.times
    ms = plan_report.draft_ms
    held = {device.name: draft.nbytes(d) for d, device in enumerate(draft.devices)} if draft else {}
    gains = [
        {"acceptance": rate, "drafted": n, "speed_up": speed_up(times, rate, n, ms)}
        for rate in ACCEPTANCES
        for n in LENGTHS
    ]
    return {"draft": {"devices": held, "token_ms": ms, "speed_up": gains}}


def show(plan_report: Report) -> None:
    out = console()
    slices = ("layers", "device", *(DIMS[dim] for dim in shown_dims(plan_report.layout)))
    out.print(table("plan", slices, plan_rows(plan_report.layout, plan_report.devices)))
    keys = (
        "weights", "mapped", "mirrored", "kv", "scratch", "host", "shared", "staging", "padding",
        "read_per_token",
    )  # fmt: skip
    rows = [
        (
            row["device"],
            f"{row['share']:g}",
            *(row[key] / MIB for key in keys),
            f"{row['bytes_per_s'] / 1e9:.3g}",
        )
        for row in plan_report.per_device()
    ]
    columns = (
        "device",
        "share",
        "weights",
        "mapped",
        "of these mirrored",
        "KV",
        "scratch",
        "host-placed",
        "shared",
        "staging",
        "of all padding",
        "read per token",
        "GB/s",
    )
    out.print(table("memory in MiB", columns, rows))
    if bus := plan_report.bus():
        names = [f"prompt token, -ub {n}" for n in bus[0]["prompt"]]
        over_bus = [
            (row["device"], *(n / MIB for n in (row["token"], *row["prompt"].values()))) for row in bus
        ]
        out.print(table("weights read over the bus in MiB", ("device", "token", *names), over_bus))
    if draft := plan_report.draft:
        kinds = "weights", "kv", "scratch", "staging"
        rows_of = [
            (device.name, *(draft.held[d].homes[kind] / MIB for kind in kinds))
            for d, device in enumerate(draft.devices)
        ]
        out.print(table("draft model in MiB", ("device", "weights", "KV", "scratch", "staging"), rows_of))
    if plan_report.options.speculation:
        title = "predicted speed-up by accepted share and drafted tokens a step"
        out.print(table(title, ("accepted", *map(str, LENGTHS)), draft_rows(plan_report)))
    n, traffic = itemised(plan_report.layout, plan_report.sizes), plan_report.traffic()
    parts = " + ".join(f"{SHOWN_ITEMS[item]} {size(n[item])}" for item in ITEMS if n[item])
    lines = [
        f"all devices together {size(n['held'])} = {parts}",
        f"per token {traffic['reduces']} reduces of {size(traffic['bytes'])} together; all devices write "
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
        write_json(to_json(plan_report, args.model))
    else:
        show(plan_report)
    return 1 if plan_report.misfit else 0


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["plan", *sys.argv[1:]]))
