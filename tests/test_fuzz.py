"""The fuzzer notices every kind of fault."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz import __main__ as command
from fuzz import search
from fuzz.damage import damaged
from fuzz.search import KINDS, smaller

pytestmark = pytest.mark.no_vulkan


PLANTED = "fuzz.planted:Planted"


def test_every_kind_of_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SMALLER_TRIES", 1)
    report = search.search(PLANTED, 1, 8, 60.0)
    assert report.n == 8 and report.ends == {"refused": 3, "wrong": 5}
    marks = {fault.split(" at ")[0].partition(":")[0]: case for _, fault, case in report.findings}
    assert marks == {"crash": b"C", "hang": b"H", "Wrong": b"W", "ZeroDivisionError": b"A"}
    report.name = "planted"
    command.keep(tmp_path / "kept", report)
    assert len(list((tmp_path / "kept").glob("planted-*"))) == 4


def test_memory_and_files_that_grow_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "N_WARM", 1)
    sizes = iter([(10.0, 5), (20.0, 5), (20.0, 5 + search.MORE_FILES + 1)])
    monkeypatch.setattr(search.Worker, "check", lambda self, case: ("refused", ""))
    monkeypatch.setattr(search.Worker, "size", lambda self: next(sizes))
    [(_, fault, _)] = search.search(PLANTED, 1, 3, 60.0).findings
    assert fault.startswith("leak: 10 MiB and 21 files")


def test_a_case_becomes_smaller() -> None:
    case = bytes(range(256)) * 3
    assert smaller(case, lambda c: b"\x07" in c and b"\xf0" in c) in (b"\x07\xf0", b"\xf0\x07")
    assert smaller(case, lambda c: c == case) == case


def test_seeds_repeat_cases() -> None:
    def cases(seed: int) -> list[bytes]:
        return [damaged(search.random_of(seed, "a", i), b"abc" * 50, (b"x",)) for i in range(50)]

    assert cases(1) == cases(1) != cases(2)
    assert len(set(cases(1))) > 40


@pytest.mark.wide
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KINDS)
def test_some_cases_of_every_kind(name: str) -> None:
    report = search.search(name, random.randrange(1 << 32), None, 60.0)
    assert report.n > 20 and not report.findings, report
