"""Predicts the speed-up of drafts for models of 8B and 70B on two cards, by the time of an exchange.

    python -m vkbackend.tools.studies.draft_gain --gb-per-s 400 --bus-gb-per-s 12

The bytes and exchanges of a token come from the real layouts. The speeds are arguments, because the
prediction is for cards that the machine does not have; `vkbackend plan` predicts for the machine's devices.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from vkbackend.meta.balance import times
from vkbackend.meta.known_speed import Speed
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.options import Options
from vkbackend.models.placement.cost import cost_function
from vkbackend.models.placement.draft_plan import speed_up
from vkbackend.models.placement.tensors import check_weights
from vkbackend.tools.console import console, table
from vkbackend.tools.measure.synthetic import Synthetic

MODELS = "llama-8b:Q4_K", "llama-70b:Q4_K"
EXCHANGES_US = 30, 83, 300
ACCEPTANCES, LENGTHS = (0.5, 0.7, 0.85), (1, 3, 7)


def exchange_s(us: float, nbytes: int) -> float:
    """Return the same time for every size, because the bus is counted per row."""
    return 1e-6 * us


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gb-per-s", type=float, default=400, help="a card's rate of reading weights")
    parser.add_argument("--bus-gb-per-s", type=float, default=12, help="the rate of each card's bus")
    parser.add_argument("--draft-ms", type=float, default=0, help="time of a drafted token (default: 0)")
    args = parser.parse_args(words)
    limits = [device.limits for device in open_devices(("numpy", "numpy"), None)]
    rows = []
    for name in MODELS:
        gguf = Synthetic(name)
        model = load_model(gguf)
        options = Options("model.gguf", devices=("numpy", "numpy"), tensor_split=(1, 1))
        cost = cost_function(model, check_weights(gguf, model), options, limits)((1, 1))
        speeds = [Speed(1e9 * args.gb_per_s, 1e9 * args.bus_gb_per_s)] * 2
        # Each device writes its own and reads the other's partial sums of one row.
        row_ms = 1e3 * sum(cost.reduces) / (1e9 * args.bus_gb_per_s)
        for us in EXCHANGES_US:
            token = times(cost, speeds, (0, 1), partial(exchange_s, us))
            gains = [
                f"{speed_up(token, rate, n, args.draft_ms, row_ms):.2f}"
                for rate in ACCEPTANCES
                for n in LENGTHS
            ]
            rows.append((name, us, len(cost.reduces), f"{token.total_ms:.1f}", *gains))
    columns = [f"{rate:g}, {n}" for rate in ACCEPTANCES for n in LENGTHS]
    title = "speed-up by accepted share and drafted tokens a step"
    console().print(table(title, ("model", "exchange us", "exchanges", "ms a token", *columns), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
