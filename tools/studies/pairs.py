"""Predict tensor parallelism on two published pairs of cards, and compare with the published rates.

The speed of a card comes from its published rate alone, so nothing is fitted to the rates of the pair. An
exchange takes the published time. The cost of a cut comes from the published slowdown of one card whose step
is cut into layers. The study also prints which exchange time would make each pair as fast as its faster card.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vkbackend.meta.balance import Cost, Prediction, Shares, predict
from vkbackend.meta.known_speed import Speed
from vkbackend.meta.rates import Rates
from vkbackend.runtime import Device
from vkbackend.tools.console import write_md
from vkbackend.tools.measure.simulated import SimulatedDevice

BUS = 12e9  # bytes per second of PCIe 3.0 x16; a token's sums of 16 to 20 KB take less than 2 us
MEMORY_NBYTES = 64 << 30  # no split is limited by memory here
SIXTEENTHS = 16


@dataclass(frozen=True, slots=True)
class Pair:
    """A model on two cards. `alone` lists the published tokens per second of each card alone. `published` is
    the rate of both cards with `shares`. Each layer has two exchanges of `exchange_us`. `cut` is the share of
    the first card's time that cutting a step into layers costs."""

    cards: tuple[str, str]
    model: str
    nbytes: float
    n_layers: int
    n_embd: int
    alone: tuple[float, float]
    shares: Shares
    published: float
    exchange_us: float
    cut: float

    @property
    def n_exchanges(self) -> int:
        return 2 * self.n_layers

    @property
    def cut_us(self) -> float:
        return 1e6 * self.cut / self.alone[0] / self.n_exchanges

    @property
    def devices(self) -> list[Device]:
        return [SimulatedDevice(d, MEMORY_NBYTES) for d in range(2)]

    def cost(self, shares: Shares) -> Cost:
        read = tuple(round(self.nbytes * share / sum(shares)) for share in shares)
        busy = sum(share > 0 for share in shares)
        reduces = (4 * self.n_embd,) * self.n_exchanges if busy > 1 else ()
        return Cost(read, read, (0, 0), reduces, n_layers=self.n_layers)

    def predicted(
        self, exchange_us: float | None = None, cut_us: float | None = None, shares: Shares | None = None
    ) -> Prediction:
        us = self.exchange_us if exchange_us is None else exchange_us
        cut = self.cut_us if cut_us is None else cut_us
        rates = PairRates(exchange_s=1e-6 * us, cut_s=1e-6 * cut, per_card=self.speeds())
        return predict(self.devices, shares or self.shares, self.cost, rates=rates)

    def speeds(self) -> tuple[float, ...]:
        return tuple(rate * self.nbytes for rate in self.alone)

    def best(self, exchange_us: float, cut_us: float) -> Prediction:
        """Return the prediction for the fastest shares. Shares are multiples of 1/16."""
        every = [self.predicted(exchange_us, cut_us, (n, SIXTEENTHS - n)) for n in range(1, SIXTEENTHS)]
        return min(every, key=lambda of: of.times.total_ms)

    def allowed_us(self) -> float:
        """Return the time at which the pair is as fast as its faster card, for an exchange and its cut
        together."""
        return self.best(0.0, 0.0).break_even_us


@dataclass(frozen=True, slots=True)
class PairRates(Rates):
    per_card: tuple[float, ...] = field(default=())

    def speed(self, device: Device) -> Speed:
        info = device.physical
        assert info is not None
        return Speed(self.per_card[info.index], BUS)


XTX_2070, MI50 = ("7900 XTX", "RTX 2070"), ("MI50", "MI50")
# llama.cpp's tensor split (pull request 25051), measured by ccarokh on 11 September 2026. The RTX 2070 cannot
# hold the 27B model. Its rate for 27B is estimated from the 7900 XTX's rate and the ratio of both cards with
# the 9B model.
PAIRS = (
    Pair(XTX_2070, "Qwen3.5-9B Q4_K_M", 5.6e9, 32, 4096, (111.9, 49.8), (3, 1), 71.5, 83.0, 0.16),
    Pair(
        XTX_2070,
        "Qwen3.6-27B Q4_K_M",
        16.5e9,
        64,
        5120,
        (39.0, 39.0 * 49.8 / 111.9),
        (3, 1),
        30.0,
        83.0,
        0.11,
    ),
    # llmx. `alone` is the rate of its layer split, because the layers run on both cards in turn.
    Pair(MI50, "Qwen3-32B Q8_0", 34.8e9, 64, 5120, (19.4, 19.4), (1, 1), 29.7, 118.0, 0.0),
)
HEAD = (
    "cards",
    "model",
    "split",
    "t/s",
    "published",
    "error",
    "faster card",
    "together",
    "exchange us, allowed",
)


def rows() -> Iterator[Sequence[str]]:
    for pair in PAIRS:
        p = pair.predicted()
        rate = 1e3 / p.times.total_ms
        yield (
            " + ".join(pair.cards),
            pair.model,
            "/".join(f"{share:g}" for share in pair.shares),
            f"{rate:.1f}",
            f"{pair.published:.1f}",
            f"{100 * (rate / pair.published - 1):+.0f} %",
            f"{max(pair.alone):.1f}",
            f"{rate / max(pair.alone):.2f}",
            f"{pair.exchange_us + pair.cut_us:.0f}, {pair.allowed_us():.0f}",
        )


def sweep(pair: Pair) -> Iterator[Sequence[str]]:
    """Yield a row for each exchange time: the rate of the best split without cuts and with cuts."""
    for us in (0.0, 20.0, 30.0, 40.0, 50.0, 83.0, 118.0):
        cells = [f"{us:.0f}"]
        for cut_us in (0.0, pair.cut_us):
            p = pair.best(us, cut_us)
            cells.append(f"{1e3 / p.times.total_ms:.1f} ({p.tensor_split[0]:g}/{p.tensor_split[1]:g})")
        yield cells


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for row in (HEAD, ["---"] * len(HEAD), *rows()):
        write_md(row)
    for pair in PAIRS:
        sys.stdout.write(f"\n{' + '.join(pair.cards)}, {pair.model}, {max(pair.alone)} t/s alone\n\n")
        for row in (("exchange us", "t/s (best split)", "with cuts"), ["---"] * 3, *sweep(pair)):
            write_md(row)
        for line in pair.predicted().lines(pair.cards):
            sys.stdout.write(f"\n{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
