"""The folders are layers. Imports point in one direction and never form cycles."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

from vkbackend.tools.checkout import structure
from vkbackend.tools.checkout.syntax import nodes, statements, tree_of
from vkbackend.tools.cli import COMMANDS

pytestmark = pytest.mark.no_vulkan


LAYERS = ("shaders", "vkbackend", "meta", "models", "tools")
MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
PACKAGE = ROOT / "vkbackend" / "__init__.py"  # test_package_is_lazy checks this file's imports.
COMMAND = ROOT / "vkbackend" / "__main__.py"  # `python -m vkbackend` runs this file. No module imports it.
NOT_INSTALLED = {"vkbackend.tools.checkout", "vkbackend.tools.studies"}
MAY_PRINT = ("tools/", "vkbackend/profiling.py")


@cache
def checkout() -> structure.Structure:
    return structure.read(ROOT)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(module: str) -> str | None:
    """Return the folder of a module such as `vkbackend.meta.plan`, or None for another project's module."""
    parts = module.split(".")
    if parts[0] != "vkbackend":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "vkbackend"


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def imported(tree: ast.AST, package: str, dynamic: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the line and the module of every import, including imports in functions, in TYPE_CHECKING blocks,
    and by import_module("...")."""
    for node in nodes(tree) if dynamic else statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*package.split(".")[: -node.level + 1 or None], base]))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) == "import_module" and node.args:
            first = node.args[0]
            if isinstance(first, ast.JoinedStr):
                first = first.values[0]
            if isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def wrong_arrows(tree: ast.Module, layer: str, dynamic: bool = True) -> list[str]:
    package = "vkbackend" if layer == "vkbackend" else f"vkbackend.{layer}"
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    return [
        f"line {line}: {layer} imports {module}"
        for line, module in imported(tree, package, dynamic)
        if (target := layer_of(module)) is not None and target not in allowed
    ]


def test_imports_point_in_one_direction() -> None:
    wrong = {
        name_of(path): arrows
        for path in MODULES
        if path not in (PACKAGE, COMMAND)
        and (
            arrows := wrong_arrows(
                tree_of(path),
                path.relative_to(ROOT).parts[0],
                "import_module" in path.read_text(encoding="utf-8"),
            )
        )
    }
    assert not wrong


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("vkbackend", "from vkbackend.meta.plan import Plan"),
        ("vkbackend", "def f():\n    from vkbackend import models"),
        ("vkbackend", "import vkbackend.tools.cli"),
        ("meta", "from ..models import llm"),
        ("meta", "import importlib\nimportlib.import_module(f'vkbackend.models.{name}')"),
        ("models", "if TYPE_CHECKING:\n    from vkbackend.tools import cli"),
    ],
)
def test_a_wrong_import_is_reported(layer: str, source: str) -> None:
    assert wrong_arrows(ast.parse(source), layer)


def test_no_cycles() -> None:
    cycles = checkout().cycles(typed=True)
    assert not cycles, "\n".join(" <-> ".join(cycle) for cycle in cycles)


def test_every_package_has_a_row_in_the_docs() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([a-z_/]+)/` \|", page, re.MULTILINE))
    packages = {name.removeprefix("vkbackend.") for name in checkout().packages}
    below = {f"vkbackend/{name}" for name in ("ops", "system", "twins", "vulkan", "kompute")}
    assert {name.replace(".", "/") for name in packages} <= rows | {name.partition("/")[2] for name in below}


def test_a_cycle_is_named(tmp_path: Path) -> None:
    """The files a and b import each other, one of them inside a function. The files d and e import each other
    only for type checking, which does not count."""
    (tmp_path / "p").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.setuptools.package-dir]\np = "p"\n', encoding="utf-8")
    sources = {
        "__init__": "",
        "a": "from p import b",
        "b": "def f():\n    from p.a import f",
        "c": "import p.a\nfrom typing import TYPE_CHECKING",
        "d": "import p.c\nif TYPE_CHECKING:\n    import p.e",
        "e": "import p.d",
    }
    for name, source in sources.items():
        (tmp_path / "p" / f"{name}.py").write_text(source, encoding="utf-8")
    assert structure.read(tmp_path).cycles() == [["p.a", "p.b"]]


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "packages"
    ]
    assert set(listed) == checkout().packages - NOT_INSTALLED | {"vkbackend.shaders"}


def test_commands_and_studies_are_never_imported() -> None:
    """A module that several commands share is not a command. Nothing may depend on `studies` or `checkout`,
    because a wheel does not contain them."""
    commands = {f"vkbackend.tools.{module}" for module, _ in COMMANDS.values()}
    tree = checkout()
    wrong = [
        f"{module} imports {name}"
        for module, names in tree.imports.items()
        for name in names
        if name in commands or tree.package_of(name) in NOT_INSTALLED - {tree.package_of(module)}
    ]
    assert not wrong, "\n".join(wrong)


def test_package_is_lazy() -> None:
    """At run time, importing the package imports no other layer. Only type checkers see those imports."""
    tree = tree_of(PACKAGE)
    guarded = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    hidden = {id(node) for block in guarded for node in ast.walk(block)}
    seen = ast.Module([n for n in tree.body if id(n) not in hidden], [])
    assert {layer_of(module) for _, module in imported(seen, "vkbackend")} <= {None, "vkbackend"}


def test_no_module_has_a_standard_library_name() -> None:
    """If a program runs such a module by its path, the module replaces the standard module."""
    assert not [name_of(path) for path in MODULES if path.stem in sys.stdlib_module_names]


def test_no_print_below_the_tools() -> None:
    quiet = [path for path in MODULES if not name_of(path).startswith(MAY_PRINT)]
    calls = [
        f"{name_of(path)}:{node.lineno}"
        for path in quiet
        if "print(" in path.read_text(encoding="utf-8")
        for node in nodes(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert quiet and not calls
