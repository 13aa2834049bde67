"""Build hook that compiles all shaders into the wheel, so that installing needs no shader compiler.

The file pyproject.toml contains all other settings.
"""

import sys
from pathlib import Path

from setuptools import setup  # type: ignore[import-untyped,unused-ignore]
from setuptools.command.build_py import build_py  # type: ignore[import-untyped,unused-ignore]

ROOT = Path(__file__).resolve().parent


class BuildWithShaders(build_py):  # type: ignore[misc,unused-ignore]
    """The build_py command, which also writes the SPIR-V into the built package. An editable install compiles
    shaders on first use."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        sys.path.insert(0, str(ROOT))  # build frontends do not add the project to sys.path
        from vkbackend import shaderlib

        shaderlib.build(Path(self.build_lib) / "vkbackend" / "shaders" / "spv")


setup(cmdclass={"build_py": BuildWithShaders})
