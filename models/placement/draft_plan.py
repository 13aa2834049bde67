"""Memory and time of a draft model, and the speed that drafts are expected to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vkbackend.limits import Limits
from vkbackend.meta.balance import Prediction, Times, predict
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.drafting.acceptance import expected_tokens
from vkbackend.models.drafting.prices import ROW_SHARE
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import DEFAULT_ROWS, Options
from vkbackend.models.placement.cost import cost_function, cost_of, read_by_head
from vkbackend.models.placement.fit import Budget, sizes_with
from vkbackend.models.placement.layout import Layout, lay_out
from vkbackend.models.placement.memory_report import Held
from vkbackend.models.placement.tensors import check_weights
from vkbackend.models.placement.traced_steps import step_shape, step_sizes, trace_reduces
from vkbackend.runtime import Device


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """`held` has the bytes on each of `devices`, and `token_ms` is the time of a drafted token."""

    devices: tuple[Device, ...]
    held: tuple[Held, ...]
    token_ms: float

    def nbytes(self, device: int) -> int:
        return sum(self.held[device].homes.values())

    def without(self, budgets: Sequence[Budget], devices: Sequence[Device]) -> list[Budget]:
        """Return the budgets of `devices` after the draft model has been loaded."""
        left = []
        for budget in budgets:
            card = devices[budget.members[0]].physical
            used = sum(
                self.nbytes(d)
                for d, device in enumerate(self.devices)
                if card and device.physical and device.physical.uuid == card.uuid
            )
            left.append(replace(budget, nbytes=max(0, budget.nbytes - used)))
        return left


def plan_draft(gguf: GGUF, options: Options, devices: Sequence[Device]) -> DraftPlan:
    """`options` are `Options.of_draft` with the model's context length."""
    model = load_model(gguf)
    types, limits = check_weights(gguf, model), [device.limits for device in devices]
    layout = lay_out(model, types, len(devices), options)
    rows = options.n_ubatch or DEFAULT_ROWS
    shape = step_shape(model, layout, options, rows)
    held = sizes_with(model, types, devices, step_sizes(model, layout, options, limits, shape))(options)
    cost = cost_function(model, types, options, limits, rows)
    times = predict(devices, (1,) * len(devices), cost).times
    return DraftPlan(tuple(devices), tuple(held), times.total_ms)


def head_token_ms(
    model: Model, layout: Layout, options: Options, limits: Sequence[Limits], prediction: Prediction
) -> float:
    """Return the time of a token that the multi-token prediction head drafts. Weights and exchanges take the
    time per byte and per exchange of the model's own step."""
    of_model, of_head = cost_of(model, layout, ()).read, read_by_head(model, layout)
    share = max(b / a for a, b in zip(of_model, of_head, strict=True) if a)
    n = len(trace_reduces(model, layout, options, limits, ahead=True))
    times, n_reduces = prediction.times, prediction.n_reduces
    return share * times.weights_ms + (n * times.reduce_ms / n_reduces if n_reduces else 0.0)


def speed_up(times: Times, rate: float, n_drafted: int, token_ms: float = 0.0, row_ms: float = 0.0) -> float:
    """Return the tokens per second with drafts, relative to decoding without. `rate` is the probability that
    a drafted token is accepted if the tokens before it were. Drafting a token takes `token_ms`, and each
    further row adds `row_ms` to the exchanges."""
    reads = times.weights_ms + times.host_ms
    verify = reads * (1 + ROW_SHARE * n_drafted) + times.reduce_ms + row_ms * n_drafted
    return expected_tokens(rate, n_drafted) * times.total_ms / (verify + n_drafted * token_ms)
