"""Measure a checkout's structure: `python -m vkbackend.tools.checkout.structure [FOLDER]`.

Prints the files and lines of each package, the imports between packages, and every import cycle. Imports for
type checking count only in cycles.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vkbackend.tools.checkout.syntax import children, tree_of
from vkbackend.tools.console import console, table

Imports = Mapping[str, frozenset[str]]  # module -> imported modules


@dataclass(frozen=True)
class Structure:
    files: Mapping[str, Path]
    packages: frozenset[str]
    imports: Imports  # At run time.
    typed: Imports  # With type checking.

    def package_of(self, module: str) -> str:
        return module if module in self.packages else module.rpartition(".")[0]

    def between_packages(self) -> Counter[tuple[str, str]]:
        pairs = ((self.package_of(a), self.package_of(b)) for a, to in self.imports.items() for b in to)
        return Counter((a, b) for a, b in pairs if a != b)

    def cycles(self, *, typed: bool = False) -> list[list[str]]:
        """Return groups of modules that import each other. `typed` includes imports for type checking."""
        imports = self.typed if typed else self.imports
        reach = {module: reached(imports, module) for module in imports}
        groups = {frozenset(other for other in seen if module in reach[other])
                  for module, seen in reach.items() if module in seen}  # fmt: skip
        return sorted(sorted(group) for group in groups)


def read(root: Path) -> Structure:
    mapped = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-dir"
    ]
    files: dict[str, Path] = {}
    packages = set()
    for package, folder in mapped.items():
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root / folder).with_suffix("")
            name = ".".join([package, *inner.parts]).removesuffix(".__init__")
            files[name] = path
            packages |= {name} if path.name == "__init__.py" else set()
    imports, typed = {}, {}
    for name, path in files.items():
        tree = tree_of(path)
        imports[name] = frozenset(set(imported(tree, files)) - {name})
        typed[name] = frozenset(set(imported(tree, files, typed=True)) - {name})
    return Structure(files, frozenset(packages | set(mapped)), imports, typed)


def imported(tree: ast.AST, files: Mapping[str, Path], *, typed: bool = False) -> Iterator[str]:
    """Yield the modules in `files` that a module imports, also inside functions. `typed` adds imports for
    type checking."""
    if not typed and isinstance(tree, ast.If) and getattr(tree.test, "id", None) == "TYPE_CHECKING":
        for node in tree.orelse:
            yield from imported(node, files)
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names if alias.name in files)
    elif isinstance(tree, ast.ImportFrom) and tree.module:
        for alias in tree.names:
            inner = f"{tree.module}.{alias.name}"
            if inner in files or tree.module in files:
                yield inner if inner in files else tree.module
    for child in children(tree):
        if not isinstance(child, ast.expr):
            yield from imported(child, files, typed=typed)


def reached(imports: Imports, module: str) -> set[str]:
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        new = imports[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def lines_of(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vkbackend.tools.checkout.structure", description=__doc__.partition("\n")[0]
    )
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("folder", nargs="?", type=Path, default=here, metavar="FOLDER", help="a checkout")
    structure = read(parser.parse_args().folder)
    out = console()
    between = structure.between_packages()
    rows = []
    for package in sorted(structure.packages):
        modules = [m for m in structure.files if structure.package_of(m) == package]
        inside = sum(len({b for b in structure.imports[m] if b in modules}) for m in modules)
        uses = sorted(b for a, b in between if a == package)
        if modules:
            n_lines = sum(lines_of(structure.files[m]) for m in modules)
            rows.append((package, len(modules), n_lines, inside, ", ".join(uses) or "-"))
    out.print(table("packages", ("package", "files", "lines", "imports inside", "uses"), rows))
    cycles, typed = structure.cycles(), structure.cycles(typed=True)
    n_imports = sum(map(len, structure.imports.values()))
    print(f"{len(structure.files)} files, {n_imports} imports, {len(between)} arrows between packages, "
          f"{len(cycles)} cycles, {len(typed)} with imports for type checking")  # fmt: skip
    for cycle in typed:
        print("cycle:", " <-> ".join(cycle))
    return 1 if typed else 0


if __name__ == "__main__":
    sys.exit(main())
