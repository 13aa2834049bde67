"""The report's first page draws the right conclusions from made-up figures."""

from __future__ import annotations

from typing import Any

import pytest

from vkbackend.tools.report.driver_quirks import kept, quirks
from vkbackend.tools.report.plain_words import sentences

pytestmark = pytest.mark.no_vulkan
ONE, TWO, BOTH = "Vulkan0", "Vulkan1", "Vulkan0 + Vulkan1"


def rate(device: str, tg: float, **more: Any) -> dict[str, Any]:
    row = {
        "device": device,
        "model": "llama-8b:Q4_K",
        "layers": "all",
        "depth": 0,
        "tg t/s": tg,
        "pp t/s": 900.0,
    }
    return row | more


def exchange(
    us: float, provider: str = "pages", signal: str = "semaphore", ahead: str = "2", sums: str = "exact"
) -> dict[str, Any]:
    how = {"provider": provider, "signal": signal, "ahead": ahead}
    return {"device": BOTH, "bytes": 16_384, "us": us, "sums": sums} | how


def test_two_cards_that_are_faster() -> None:
    """A token takes 10 ms on one card. On two cards a token takes 7 ms, of which 64 exchanges take 2 ms."""
    rows = [rate(ONE, 100), rate(TWO, 90), rate(BOTH, 1000 / 7, exchanges=64, **{"exchange ms": 2.0})]
    *_, last = sentences({"rates": rows})
    assert last == (
        f"With llama-8b:Q4_K, {BOTH} together are 1.43 times as fast as {ONE} alone. The 64 exchanges of a "
        "token take about 2000 of 7000 us. Use both."
    )


def test_two_cards_that_are_slower() -> None:
    """On two cards a token takes 13 ms, of which 64 exchanges take 6.4 ms. Without exchanges it takes 6.6 ms,
    so 64 exchanges may take 3.4 ms, or 53 us each."""
    rows = [rate(ONE, 100), rate(TWO, 50), rate(BOTH, 1000 / 13, exchanges=64, **{"exchange ms": 6.4})]
    last = sentences({"rates": rows})[-1]
    assert f"0.77 times as fast as {ONE} alone" in last and f"Use {ONE} alone" in last
    assert last.endswith("faster if an exchange took less than 53 us.")
    hopeless = [*rows[:2], rate(BOTH, 1000 / 13, exchanges=64, **{"exchange ms": 1.0})]
    assert sentences({"rates": hopeless})[-1].endswith(
        "Even exchanges that take no time would not make them faster."
    )


def test_large_figures_have_no_exponent() -> None:
    memory = {"device": ONE, "memory": "imported", "read GB/s": 999.7, "copy GB/s": 12.345}
    parts = {"rates": [rate(ONE, 1234.5) | {"pp t/s": 15_678.9}], "host-memory": [memory]}
    alone, host = sentences(parts)
    assert "generates 1,234 tokens/s" in alone and "prompts at 15,679 tokens/s" in alone
    assert "at 1,000 GB/s, and copies move it at 12.3 GB/s" in host


def test_only_equal_models_are_compared() -> None:
    rows = [rate(ONE, 100, layers="16 of 32"), rate(BOTH, 60)]
    lines = sentences({"rates": rows})
    assert "(16 of 32 layers)" in lines[0] and "no device runs it alone" in lines[1]
    deeper = [rate(ONE, 50, depth=4096)]
    assert sentences({"rates": deeper}) == ["No part with speeds was finished."]


def test_the_fastest_exact_exchange() -> None:
    rows = [exchange(100), exchange(95, "pieces"), exchange(20, "visible", sums="WRONG")]
    assert sentences({"reduces": rows})[0].endswith(
        "takes 100 us by default. No other way is clearly faster."
    )
    assert any("visible and semaphore are WRONG" in line for line in sentences({"reduces": rows}))
    rows.append(exchange(40, "host-sum", "flag", "all"))
    last = sentences({"reduces": rows})[0]
    assert "takes 40 us (host-sum, flag, all ahead)" in last and "tune --exchanges -dev 0,1`" in last
    without_pages = [exchange(80, "host-sum"), exchange(79, "visible")]
    assert "takes 80 us by default" in sentences({"reduces": without_pages})[0]


def test_segments_predictions_and_host_memory() -> None:
    rows = [
        rate(ONE, 100, **{"% of t/s in segments": 84.0, "predicted t/s": 130.0}),
        rate(TWO, 50, **{"predicted t/s": 45.0}),
    ]
    memory = [
        {"device": ONE, "memory": "cached", "read GB/s": 12.0, "copy GB/s": 24.0},
        {"device": ONE, "memory": "imported", "read GB/s": 13.0, "copy GB/s": 25.0},
    ]
    first, _, host, wrong = sentences({"rates": rows, "host-memory": memory})
    assert "reaches 84 % of this rate" in first
    assert host.startswith(f"Shaders of {ONE} read pinned host memory (imported) at 13 GB/s")
    assert wrong == (
        f"The prediction for llama-8b:Q4_K on {ONE} is wrong by more than 20 %: 130 tokens/s predicted, 100 "
        "measured."
    )


def test_a_driver_whose_waits_are_slow() -> None:
    """A wait takes 118 us on gfx906. Other drivers handle waiting submissions or events badly."""
    quick = [
        exchange(100),
        exchange(70, signal="flag"),
        exchange(140, "visible"),
        exchange(150, "visible", "event"),
        exchange(95, ahead="all"),
    ]
    assert not list(quirks(quick)) and "pages; signal flag, 2 ahead" in kept(quick)
    slow = [exchange(190), exchange(72, signal="flag")]
    assert [*quirks(slow)] == [
        f"{BOTH}: waiting for semaphores takes 118 us longer than reading a flag. `--reduce-signal flag` "
        "avoids these waits."
    ]
    waiting = [
        exchange(100),
        exchange(110, "visible"),
        exchange(440, "visible", "event"),
        exchange(300, ahead="all"),
        exchange(90, ahead="0"),
    ]
    events, ahead = quirks(waiting)
    assert "4.0 times as long as for a semaphore" in events and "3.3 times as long as with none" in ahead
    large = exchange(900, "pieces") | {"bytes": 1 << 20}
    assert "pages, pieces above 16384 bytes; signal semaphore, 2 ahead" in kept([exchange(100), large])
    assert not kept([exchange(10, sums="WRONG")])


def test_steps_in_one_call() -> None:
    rows = [exchange(100), exchange(30, "visible", ahead="one-call")]
    first, keeping = sentences({"reduces": rows})
    assert "takes 30 us (visible, semaphore, in one call)" in first
    assert "pages; signal semaphore, 2 ahead" in keeping  # the report runs too few steps
    rows.append(exchange(20, "host-sum", ahead="one-call", sums="WRONG"))
    [wrong] = quirks(rows)
    assert wrong == (
        f"{BOTH}: sums by host-sum are WRONG if one call submits a step. Do not use `--submit-ahead "
        "one-call` with it."
    )
