"""The study of memory over time: it asks everything, holds still while it looks, and tells what it saw."""

from __future__ import annotations

import pytest

from vkbackend.tools.studies import soak

pytestmark = pytest.mark.no_vulkan


def test_soak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["soak", "-dev", "numpy", "--minutes", "0.05", "--interval", "1", "-t", "3", "--slots", "2"]
    monkeypatch.setattr("sys.argv", asked)
    assert soak.main() == 0
    lines = [
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line[:1] == "|"
    ]
    header = lines[0]
    assert header[:4] == ["min", "asked", "RSS", "anonymous"]
    last = dict(zip(header, [row for row in lines if len(row) == len(header)][-1], strict=True))
    assert int(last["asked"]) > 0 and float(last["RSS"]) > float(last["anonymous"]) > 0
    assert ["kind", "times"] in lines


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["soak", "-dev", "numpy", "-t", "0"])
    with pytest.raises(SystemExit, match="error: --threads=0"):
        soak.main()
