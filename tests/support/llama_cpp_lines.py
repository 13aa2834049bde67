"""Runs commands in this process and returns their exit code and output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import pytest
from device_sets import QUICKEST

from vkbackend.tools.cli import main, parse_line

Run = Callable[..., tuple[int, str, str]]


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit code, the output and the errors of a command, which runs on the quickest device."""
    device = ("-dev", *QUICKEST) if words[0] in ("generate", "chat") else ()
    try:
        code = main([words[0], *device, *words[1:]])
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


def answer(run: Run, *words: str) -> dict[str, Any]:
    code, out, err = run("generate", "--temp", "0", "-n", "8", "--json", *words)
    assert code == 0, err
    return json.loads(out)


def parse(*words: str) -> argparse.Namespace:
    return parse_line(words)[0]
