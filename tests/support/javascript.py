"""Runs functions of the page's JavaScript modules in node or a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browsers import browser, page_of
from scripted import ScriptedModel
from serving import served

from vkbackend.tools.server.static import FOLDER

Run = Callable[..., Any]


@contextmanager
def runner(folder: Path) -> Iterator[Run]:
    """Yield `run`, which calls the JavaScript `function` with the module's exports and `value`, and returns
    the result."""
    if node := shutil.which("node"):
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
        yield lambda module, function, value=None: in_node(node, folder / module, function, value)
        return
    with browser() as opened, served(ScriptedModel()) as address, page_of(opened, address.port) as page:
        page.goto("/page/icon.svg")
        yield lambda module, function, value=None: page.evaluate(
            f"async (v) => ({function})(await import('/page/{module}'), v)", value
        )


def in_node(node: str, module: Path, function: str, value: Any) -> Any:
    script = f"""
        let text = "";
        for await (const piece of process.stdin) text += piece;
        const found = await ({function})(await import({json.dumps(module.as_uri())}), JSON.parse(text));
        console.log(JSON.stringify(found ?? null));
    """
    command = [node, "--input-type=module", "--eval", script]
    done = subprocess.run(
        command, input=json.dumps(value), capture_output=True, text=True, encoding="utf-8", timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
