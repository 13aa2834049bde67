"""Build hook: a wheel carries the SPIR-V of the whole manifest, so that installing needs no shader compiler.

Everything else about the package is in pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import setup  # type: ignore[import-untyped,unused-ignore]
from setuptools.command.build_py import build_py  # type: ignore[import-untyped,unused-ignore]

ROOT = Path(__file__).resolve().parent


class BuildWithShaders(build_py):  # type: ignore[misc,unused-ignore]
    """build_py, then SPIR-V into the built package; an editable install compiles on first use instead."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        sys.path.insert(0, str(ROOT))  # a build frontend does not put the project on the path
        from vkbackend import shaderlib

        shaderlib.build(Path(self.build_lib) / "vkbackend" / "shaders" / "spv")


setup(cmdclass={"build_py": BuildWithShaders})
