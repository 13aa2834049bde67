"""Draw commands and their output as an SVG, such as the README's picture.

    python -m vkbackend.tools.studies.terminal_picture -o docs/terminal.svg "vkbackend devices" ...

The commands really run.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 100
COMMANDS = (
    "vkbackend devices",
    'vkbackend generate -p "Once upon a time" -n 60 --temp 0 -dev 0,1 -ts 1,1',
)
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def printed(command: str) -> str:
    """Return a command's stdout and stderr on a terminal of WIDTH columns without colors."""
    words = shlex.split(command)
    asked = [sys.executable, "-m", "vkbackend.tools.cli", *words[1:]] if words[0] == "vkbackend" else words
    reader, terminal = os.openpty()
    size = {"TERM": "dumb", "COLUMNS": str(WIDTH), "LINES": "100"}
    with subprocess.Popen(asked, stdout=terminal, stderr=terminal, env=os.environ | size) as process:
        os.close(terminal)
        said = b""
        with suppress(OSError):  # EIO means that every process has closed the terminal.
            while part := os.read(reader, 1 << 16):
                said += part
        os.close(reader)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, asked, said)
    return said.decode().replace("\r\n", "\n")


def picture(commands: list[str]) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for command in commands:
        console.print(Text("$ ", "bold green") + Text(command, "bold"))
        console.print(printed(command).rstrip(), markup=False, highlight=False)
        console.print()
    return console.export_svg(title="vkbackend", theme=MONOKAI, code_format=FORMAT, unique_id="terminal")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("commands", nargs="*", metavar="COMMAND", default=list(COMMANDS))
    parser.add_argument("-o", "--output", type=Path, default=Path("terminal.svg"), metavar="FILE")
    args = parser.parse_args()
    args.output.write_text(picture(args.commands), encoding="utf-8")


if __name__ == "__main__":
    main()
