"""Plans how a model would be split over devices, for `vkbackend plan`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vkbackend import env
from vkbackend.errors import InvalidArgument, OutOfDeviceMemory
from vkbackend.meta.balance import Prediction, Times, auto_split, predict
from vkbackend.meta.host_memory import measure_gpus_host_memory
from vkbackend.meta.rates import Rates
from vkbackend.meta.reduce import Reduce
from vkbackend.meta.split import Kind
from vkbackend.models.adapters.loaded import add_adapters
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.engine.projectors import open_projector_device, planned_projector
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.fitting.fitter import Fitter
from vkbackend.models.fitting.flags import fit_note, of_encoder
from vkbackend.models.gguf.fingerprint import fingerprint
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.hosts.survey import survey
from vkbackend.models.keywords import Keywords
from vkbackend.models.options import Options, with_a_share
from vkbackend.models.placement.control_vectors import marked
from vkbackend.models.placement.cost import CostFunction, bus_bytes_per_row, cost_function, cost_of
from vkbackend.models.placement.draft_plan import DraftPlan, Gain, gains, head_token_ms, plan_draft
from vkbackend.models.placement.encoders import for_encoder, staged_cells
from vkbackend.models.placement.fit import (
    budgets_of,
    check_fit,
    host_budgets,
    without,
)
from vkbackend.models.placement.layout import Layout, weight_nbytes
from vkbackend.models.placement.memory_report import HOMES, Held
from vkbackend.models.placement.settled import row_limit, settle
from vkbackend.models.placement.tensors import check_weights, notes, weights_in_file
from vkbackend.models.placement.traced_steps import in_halves, trace_reduces
from vkbackend.models.vision.projector_plan import ProjectorPlan
from vkbackend.runtime import Device
from vkbackend.tools.flags import runner
from vkbackend.tools.flags.assumed import Assumed, assumed_of
from vkbackend.tools.flags.options import options_of
from vkbackend.tools.flags.placement import host_patterns
from vkbackend.tools.measure.synthetic import Synthetic
from vkbackend.tools.plan_mixture import Mixture, mixture_of
from vkbackend.wire import wire_words

AUTO = "auto"
BUS_ROWS = 512, 2048, 4096
LENGTHS = 1, 3, 7  # lengths of drafts in the prediction


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
    notes: tuple[str, ...] = ()  # The file's unused parts, and the options that `--fit` chose.
    draft: DraftPlan | None = None
    gains: tuple[Gain, ...] = ()  # one gain for each combination of speeds, acceptance and draft length
    mixture: Mixture | None = None  # experts in host memory
    projector: ProjectorPlan | None = None

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
                    "adapters": held.items["adapters"],
                    "padding": held.items["padding"],
                    "mirrored": mirrored,
                    "read_per_token": cost.read[d],
                    "host_read_per_token": cost.host[d],
                    "bytes_per_s": self.prediction.speeds[d].weights,
                }
            )
        return rows

    def bus(self) -> list[dict[str, Any]]:
        """Return an entry for each device that reads weights from host memory: the bytes for a generated
        token, and the bytes for a prompt token by the number of rows per step."""
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
        """Return one token's all-reduces: their number, message bytes, and the bytes that devices write to
        shared memory."""
        nbytes = [4 * wire_words(reduce.wire, reduce.elements) for reduce in self.reduces]
        written = sum(n * len(reduce.writers) for n, reduce in zip(nbytes, self.reduces, strict=True))
        return {"reduces": len(nbytes), "bytes": sum(nbytes), "written": written}


def opened(args: argparse.Namespace) -> GGUF:
    if bool(args.model) == bool(args.synthetic):
        raise InvalidArgument("give one model, with -m FILE or --synthetic SHAPE:TYPE")
    return Synthetic(args.synthetic) if args.synthetic else GGUF.open(args.model)


def report(args: argparse.Namespace) -> Report:
    """Report insufficient memory as `misfit`. Raise all other load errors."""
    given = Keywords(devices=runner.places) if runner.group else Keywords()
    assumed = assumed_of(args)
    with opened(args) as gguf:
        if args.host_tensors:
            given["override_tensor"] = host_patterns(args, gguf.tensors)
        options = options_of(args, gguf.paths[0], **given)
        runner.refuse_hostfile(options)
        model = load_model(gguf, options.with_heads, options.head)
        if options.lora:
            add_adapters(model, gguf, options.adapters)
        n_ctx = (0 if "n_ctx" in options.fit else options.n_ctx) or model.n_ctx_train
        options = with_a_share(replace(options, n_ctx=n_ctx))
        if model.encodes:
            options = for_encoder(options)
            model.n_staged = 0 if runner.group else staged_cells(model, options)
        types = check_weights(gguf, model)
        model.in_file = weights_in_file(gguf, model)
        if runner.group:
            devices = survey(runner.group, options.devices or (), ()).devices
        else:
            devices = open_devices(
                options.devices,
                options.runtime,
                exact=options.exact or env.exact(),
                batch_invariant=bool(options.speculation),
            )
        drafting, projecting = list[Device](), list[Device]()
        try:
            assumed = assumed.on(devices)
            if (wanted := options.of_draft) is not None:
                drafting = open_devices(wanted.devices, options.runtime, exact=options.exact or env.exact())
            draft = None
            if wanted is not None and options.draft:
                with GGUF.open(options.draft) as small:
                    draft = plan_draft(small, wanted, drafting)
            if options.mmproj is not None:
                residents = [draft.resident] if draft else []
                projecting = [open_projector_device(options, gguf, residents, assumed.rates[0])]
            projector = planned_projector(options, projecting[0], gguf) if projecting else None
            marks = marked(fingerprint(gguf), model.control)
            plan_report = plan_of(model, types, devices, options, draft, assumed, marks, projector)
            n_ctx = plan_report.options.n_ctx
            lines = *getattr(args, "notes", ()), *notes(gguf, model, n_ctx), *plan_report.notes
            return replace(plan_report, notes=lines)
        finally:
            for device in [*devices, *drafting, *projecting]:
                device.close()


def plan_of(
    model: Model,
    types: Mapping[str, str],
    devices: list[Device],
    options: Options,
    draft: DraftPlan | None,
    assumed: Assumed,
    fingerprint: str = "",
    projector: ProjectorPlan | None = None,
) -> Report:
    """Plan a model on open devices. `fingerprint` names the model's counts of used experts."""
    residents = [other.resident for other in (draft, projector) if other]
    limits, budgets = [device.limits for device in devices], without(budgets_of(devices), devices, residents)
    if (options.n_gpu_layers is not None or options.override_tensor) and not assumed.rates[0].host:
        measure_gpus_host_memory(devices)
    halves = in_halves(devices, options) and not model.encodes
    lines: tuple[str, ...] = ()
    if options.fit:
        asked, room = options, [*budgets, *host_budgets(devices, residents)]
        options = replace(asked, fit=())
        if model.encodes:
            asked = of_encoder(asked)
        else:
            fitter = Fitter(model, types, devices, asked, halves=halves, rates=assumed.rates[0], budgets=room)
            options = fitter.fit()
        lines = (fit_note(options, asked),)
    rates = assumed.rates[0]

    def cost_of_step() -> CostFunction:
        return cost_function(model, types, options, limits, row_limit(model, options))

    if options.tensor_split == AUTO:
        shares = auto_split(devices, cost_of_step(), budgets, rates).tensor_split
        options = replace(options, tensor_split=shares)
    shares = options.shares or (1,) * len(devices)
    alone = not any(device.node for device in devices)
    how: dict[str, Any] = {"budgets": budgets, "residents": residents, "alone": alone}
    settled = settle(model, types, devices, options, halves=halves, **how)
    options, layout, planned = settled.options, settled.layout, settled.sizes
    cost = cost_of_step()
    prediction = predict(devices, shares, cost, budgets, rates)
    reduces = trace_reduces(model, layout, options, limits)
    mixture = mixture_of(
        model, types, devices, options, prediction, fingerprint,
        halves=settled.halves, resources=rates.resources(devices),
    )  # fmt: skip
    misfit = ""
    try:
        if projector:
            projector.check_fit(residents[:-1])
        check_fit(devices, options, planned, model.n_layer, residents)
    except OutOfDeviceMemory as error:
        misfit = str(error)
    sizes = planned(options)
    report = Report(
        model,
        devices,
        options,
        layout,
        sizes,
        reduces,
        prediction,
        misfit,
        (*lines, *settled.notes),
        draft,
        mixture=mixture,
        projector=projector,
    )
    return replace(report, gains=_gains(report, cost, assumed)) if options.speculation else report


def _gains(planned: Report, cost: CostFunction, assumed: Assumed) -> tuple[Gain, ...]:
    model, options, devices = planned.model, planned.options, planned.devices
    limits, n_reduces = [device.limits for device in devices], planned.prediction.n_reduces
    lengths = [n for n in LENGTHS if n <= options.draft_max]

    def token_ms(rates: Rates, times: Times) -> float:
        """Return the time of a token that the draft model or the head drafts. N-grams take no time."""
        if planned.draft:
            return planned.draft.token_ms(rates)
        if not model.n_ahead:
            return 0.0
        return head_token_ms(model, planned.layout, options, limits, times, n_reduces)

    shares = planned.prediction.tensor_split
    return tuple(
        gain
        for rates in assumed.rates
        for gain in gains(
            devices, shares, cost, rates, assumed.acceptances, lengths, partial(token_ms, rates)
        )
    )
