"""Predict the memory and time of a draft model, and the speed-up by drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vkbackend.limits import Limits
from vkbackend.meta.balance import Cost, Shares, Times, times_on
from vkbackend.meta.rates import MEASURED, Rates
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.drafting.acceptance import expected_tokens
from vkbackend.models.drafting.prices import ROW_SHARE
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import DEFAULT_ROWS, Options
from vkbackend.models.placement.cost import CostFunction, cost_function, cost_of, read_by_head
from vkbackend.models.placement.fit import sizes_with
from vkbackend.models.placement.layout import Layout, layouts
from vkbackend.models.placement.memory_report import Held
from vkbackend.models.placement.resident import Resident
from vkbackend.models.placement.tensors import check_weights
from vkbackend.models.placement.traced_steps import step_shape, step_sizes, trace_reduces
from vkbackend.runtime import Device


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """`held` lists the bytes on each of `devices`; `cost` is the cost of a drafted token."""

    devices: tuple[Device, ...]
    held: tuple[Held, ...]
    cost: Cost

    def token_ms(self, rates: Rates = MEASURED) -> float:
        return times_on(self.devices, (1,) * len(self.devices), self.cost, rates).total_ms

    @property
    def resident(self) -> Resident:
        return Resident("draft model", self.devices, self.held)

    def nbytes(self, device: int) -> int:
        return sum(self.held[device].homes.values())


def plan_draft(gguf: GGUF, options: Options, devices: Sequence[Device]) -> DraftPlan:
    """`options` are `Options.of_draft` with the model's context length."""
    model = load_model(gguf)
    types, limits = check_weights(gguf, model), [device.limits for device in devices]
    layout_of = layouts(model, types, len(devices))
    layout, rows = layout_of(options), options.n_ubatch or DEFAULT_ROWS
    shape = step_shape(model, layout, options, rows)
    held = sizes_with(layout_of, devices, step_sizes(model, layout, options, limits, shape))(options)
    cost = cost_function(model, types, options, limits, rows)
    return DraftPlan(tuple(devices), tuple(held), cost((1,) * len(devices)))


def head_token_ms(
    model: Model, layout: Layout, options: Options, limits: Sequence[Limits], times: Times, n_reduces: int
) -> float:
    """Return the time of a token that the multi-token prediction head drafts. The time per byte of weights
    and the time per exchange are the same as in the model's step, `times`."""
    of_model, of_head = cost_of(model, layout, ()).read, read_by_head(model, layout)
    share = max(b / a for a, b in zip(of_model, of_head, strict=True) if a)
    n = len(trace_reduces(model, layout, options, limits, ahead=True))
    return share * times.weights_ms + (n * times.reduce_ms / n_reduces if n_reduces else 0.0)


@dataclass(frozen=True, slots=True)
class Gain:
    """The tokens per second with drafts of `n_drafted` tokens, relative to decoding without drafts. A drafted
    token is accepted with probability `acceptance` if the tokens before it are. `exchange_us` is the time of
    an exchange that the user gave, or else the mean of the step's exchanges. `token_ms` is the time of a
    drafted token."""

    exchange_us: float
    token_ms: float
    acceptance: float
    n_drafted: int
    speed_up: float


def gains(
    devices: Sequence[Device],
    shares: Shares,
    cost: CostFunction,
    rates: Rates,
    acceptances: Sequence[float],
    lengths: Sequence[int],
    token_ms: Callable[[Times], float],
) -> list[Gain]:
    """`token_ms` computes the time of a drafted token from the times of a one-row step."""
    plain_cost = cost(shares)
    plain = times_on(devices, shares, plain_cost, rates)
    verify = {n: times_on(devices, shares, cost(shares, 1 + n), rates) for n in lengths}
    n_reduces = len(plain_cost.reduces) + len(plain_cost.inner)
    exchange_us = 1e3 * plain.reduce_ms / n_reduces if n_reduces else 0.0
    if rates.exchange_s is not None:
        exchange_us = 1e6 * rates.exchange_s
    drafted_ms = token_ms(plain)
    return [
        Gain(exchange_us, drafted_ms, rate, n, speed_up(plain, verify[n], rate, n, drafted_ms))
        for rate in acceptances
        for n in lengths
    ]


def speed_up(plain: Times, verify: Times, rate: float, n_drafted: int, token_ms: float = 0.0) -> float:
    """Return the speed-up of drafts of `n_drafted` tokens. `plain` and `verify` are the times of steps with
    one row and with all rows. Computing a row adds ROW_SHARE of the time of reading."""
    reads = (verify.weights_ms + verify.host_ms) * (1 + ROW_SHARE * n_drafted)
    return (
        expected_tokens(rate, n_drafted) * plain.total_ms / (reads + verify.reduce_ms + n_drafted * token_ms)
    )
