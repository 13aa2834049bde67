"""Test the study that predicts pairs of cards whose speeds were published."""

from __future__ import annotations

import pytest

from vkbackend.meta.balance import ratios
from vkbackend.tools.studies import pairs

pytestmark = pytest.mark.no_vulkan


def test_published_pairs_are_predicted() -> None:
    errors = [1e3 / pair.predicted().times.total_ms / pair.published - 1 for pair in pairs.PAIRS]
    assert [round(100 * error) for error in errors] == [3, 1, -18]


def test_what_would_beat_the_faster_card() -> None:
    small, large, equal = pairs.PAIRS
    for pair in (small, large):
        p = pair.predicted()
        assert p.fewer == (0,) and "7900 XTX alone; faster only if" in p.lines(pair.cards)[-1]
    assert not equal.predicted().fewer and "faster while" in equal.predicted().lines(equal.cards)[-1]
    assert [round(pair.allowed_us()) for pair in pairs.PAIRS] == [42, 60, 201]
    assert [ratios(pair.speeds(), pair.cards, (0, 1)) for pair in pairs.PAIRS] == [(16, 7), (16, 7), (16, 16)]
    # With this exchange time, the best split is as fast as the faster card alone. The bus takes 1.4 us of
    # this time.
    bus_us = 1e6 * 4 * small.n_embd / pairs.BUS
    best = small.best(small.allowed_us() - bus_us, 0.0)
    assert best.tensor_split == (11, 5) and 1e3 / best.times.total_ms == pytest.approx(111.9, rel=1e-3)


def test_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pairs"])
    assert pairs.main() == 0
    out = capsys.readouterr().out
    assert "| 73.9 | 71.5 | +3 % | 111.9 | 0.66 |" in out and "| 83 | 85.7 (11/5) | 76.3 (11/5) |" in out
