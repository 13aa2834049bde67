"""Runs the guides' command lines in this process, because a new process would import and compile again."""

from __future__ import annotations

import io
import os
import shlex
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from vkbackend.tools.cli import main


def run_line(line: str, folder: Path) -> CompletedProcess[str]:
    words = shlex.split(line)
    at = words.index("vkbackend")
    variables = dict(word.split("=", 1) for word in words[:at])
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        open(os.devnull, encoding="utf-8") as nothing,
        chdir(folder),
    ):
        with mock.patch.dict(os.environ, variables), mock.patch.object(sys, "stdin", nothing):
            try:
                code = main(words[at + 1 :])
            except SystemExit as end:
                code = int(end.code or 0)
    return CompletedProcess(line, code, out.getvalue(), err.getvalue())
