"""The report is a Markdown and a JSON file, which are rewritten after every part.

Host names, user names and paths are removed from errors and drivers' texts.
"""

from __future__ import annotations

import getpass
import json
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vkbackend import __version__
from vkbackend.atomic_file import replacing
from vkbackend.errors import InvalidArgument
from vkbackend.figures import short
from vkbackend.paths import why
from vkbackend.tools.console import jsonable, size
from vkbackend.tools.report.children import Outcome
from vkbackend.tools.report.part import Row
from vkbackend.tools.report.parts import PARTS
from vkbackend.tools.report.plain_words import sentences

NAME = "gpu-report"
SHORTEST = 3  # A shorter name could be part of a word.
_NAME = r"[^\s/\\'\":,;()\[\]<>|]+"
_NAMES = rf"(?:[/\\]{{1,2}}{_NAME})*[/\\]*"  # `repr` doubles backslashes.
# A path begins with a slash that does not follow a word, with a drive, or with two backslashes.
_PATH = re.compile(
    rf"(?<![\w.)/])~?(?:/{_NAME}){{2,}}/?"
    rf"|(?:\\{{2,4}}\?\\{{1,2}})?(?<!\w)[A-Z]:[/\\]{{1,2}}{_NAME}{_NAMES}"
    rf"|(?<![\w\\])\\{{2,4}}(?:\?\\{{1,2}})?{_NAME}\\{{1,2}}{_NAME}{_NAMES}",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Report:
    minutes: float
    date: str
    machine: dict[str, Any] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[str, list[Outcome]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def problems(self) -> list[str]:
        problems = []
        for name, outcomes in self.parts.items():
            for outcome in outcomes:
                where = f"{name}, {self.names(outcome)}"
                wrong = [why for row in outcome.rows if (why := PARTS[name].wrong(row))]
                problems += [f"{where}: {why}" for why in wrong]
                problems += [f"{where}: {case}: {why}" for case, why in outcome.failed]
        return problems

    def plain_words(self) -> list[str]:
        n_late = sum(outcome.n_late for outcomes in self.parts.values() for outcome in outcomes)
        n_wrong, checked = len(self.problems()) - n_late, []
        if n_wrong:
            checked.append(f"{checks(n_wrong)} failed or gave wrong results. Do not trust this driver.")
        if n_late:
            checked.append(
                f"{checks(n_late)} did not end in time. Either a device hangs, or the machine was busy: run "
                "this again while no other program computes."
            )
        has_run = any(outcome.rows for outcomes in self.parts.values() for outcome in outcomes)
        return [
            *(checked or ["No check failed." if has_run else "No check has ended."]),
            *sentences({name: self.rows(name) for name in self.parts}),
        ]

    def unfinished(self) -> list[str]:
        missing = [
            f"{name}, {self.names(outcome)}: {outcome.unfinished}"
            for name, outcomes in self.parts.items()
            for outcome in outcomes
            if outcome.unfinished
        ]
        return missing + [f"{name}: not begun" for name in PARTS if name not in self.parts]

    def names(self, outcome: Outcome) -> str:
        return " + ".join(f"Vulkan{index}" for index in outcome.devices)

    def rows(self, name: str) -> list[Row]:
        return [{"device": self.names(outcome)} | row for outcome in self.parts[name] for row in outcome.rows]

    def save(self, folder: Path) -> None:
        """Replace both files. Raise InvalidArgument if a file cannot be written."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"--output {folder}: cannot be made: {why(error)}") from None
        value = scrubbed(jsonable(self.values()))
        for suffix, text in ((".json", json.dumps(value, indent=1) + "\n"), (".md", scrubbed(self.text()))):
            with replacing(folder / (NAME + suffix), InvalidArgument) as part:
                part.write_text(text, encoding="utf-8")

    def values(self) -> dict[str, Any]:
        parts = {
            name: [
                {
                    "devices": self.names(outcome),
                    "unfinished": outcome.unfinished,
                    "cases": len(outcome.cases),
                    "done": len(outcome.done),
                    "rows": outcome.rows,
                    "left_out": dict(outcome.left_out),
                    "failed": dict(outcome.failed),
                }
                for outcome in outcomes
            ]
            for name, outcomes in self.parts.items()
        }
        head = {"version": __version__, "date": self.date, "minutes": self.minutes, "machine": self.machine}
        ends = {"problems": self.problems(), "unfinished": self.unfinished(), "seconds": self.seconds}
        words = {"plain_words": self.plain_words()}
        return head | words | {"devices": self.devices} | ends | {"parts": parts}

    def text(self) -> str:
        lines = [f"# GPU report of vkbackend {__version__}, {self.date}", ""]
        lines += [
            "## In plain words",
            "",
            *(f"- {line}" for line in self.plain_words()),
            "",
            "## Devices",
            "",
        ]
        lines.append(", ".join(f"{name} {value}" for name, value in self.machine.items()))
        lines += ["", *table(*self._device_table())]
        for title, problems in (("Wrong or failed", self.problems()), ("Unfinished", self.unfinished())):
            lines += ["", f"## {title}", "", *([f"- {line}" for line in problems] or ["Nothing."])]
        for name, outcomes in self.parts.items():
            seconds = self.seconds.get(name, 0.0)
            lines += ["", f"## {PARTS[name].title}", "", f"Part `{name}`, {seconds:.0f} s."]
            if rows := self.rows(name):
                lines += ["", *table(*PARTS[name].columns(rows))]
            lines += self._left_out(outcomes)
        return "\n".join(lines) + "\n"

    def _device_table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        head = ("device", "name", "type", "driver", "Vulkan", "memory", "features")
        lines: list[Sequence[object]] = []
        for device in self.devices:
            heaps = ", ".join(size(heap["nbytes"]) for heap in device["heaps"] if heap["device_local"])
            on = ", ".join(sorted(name for name, value in device["features"].items() if value is True))
            driver = f"{device['driver']} {device['driver_version']}"
            lines.append(
                (f"Vulkan{device['index']}", device["name"], device["type"], driver, device["api"], heaps, on)
            )
        return head, lines

    def _left_out(self, outcomes: Sequence[Outcome]) -> list[str]:
        lines = []
        for outcome in outcomes:
            reasons: dict[str, list[str]] = {}
            for case, reason in outcome.left_out:
                reasons.setdefault(reason, []).append(case)
            for reason, cases in reasons.items():
                name = cases[0] if len(cases) == 1 else f"{len(cases)} cases"
                lines.append(f"- {self.names(outcome)}, left out: {name}: {reason}")
        return ["", *lines] if lines else []


def checks(n: int) -> str:
    return "1 check" if n == 1 else f"{n} checks"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return short(value)
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


@cache
def _private() -> tuple[re.Pattern[str], re.Pattern[str] | None]:
    """Return regular expressions for paths in private folders, and for the names of the host and the user.
    These folders may contain blanks, which `_PATH` does not accept."""
    folders = {str(Path.home()), str(Path.cwd()), tempfile.gettempdir(), sys.prefix}
    folders |= {str(Path(folder).resolve()) for folder in folders}
    names = {platform.node(), platform.node().partition(".")[0]}
    try:
        names.add(getpass.getuser())
    except (OSError, KeyError):  # no user name
        pass
    words = sorted((re.escape(name) for name in names if len(name) >= SHORTEST), key=len, reverse=True)
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(words)})(?![A-Za-z0-9])", re.I) if words else None
    folders |= {folder.replace("\\", "\\\\") for folder in folders}
    longest_first = sorted((re.escape(f) for f in folders if len(f) > 1), key=len, reverse=True)
    return re.compile(rf"(?:{'|'.join(longest_first)})(?![\w-]){_NAMES}", re.IGNORECASE), pattern


def scrubbed(value: Any) -> Any:
    """Replace private paths by "(path)" and names by "(name)" in all texts of `value`."""
    if isinstance(value, dict):
        return {key: scrubbed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [scrubbed(item) for item in value]
    if not isinstance(value, str):
        return value
    folders, names = _private()
    value = _PATH.sub("(path)", folders.sub("(path)", value))
    return names.sub("(name)", value) if names else value
