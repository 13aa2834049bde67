"""The parts of the report, the most valuable first."""

from __future__ import annotations

from vkbackend.tools.report.checks import Shapes, Verify
from vkbackend.tools.report.host_memory import HostMemory
from vkbackend.tools.report.op_times import Products, Tune
from vkbackend.tools.report.part import Part
from vkbackend.tools.report.rates import Compiling, LlamaCpp, Rates
from vkbackend.tools.report.reduces import Reduces

PARTS: dict[str, type[Part]] = {
    "verify": Verify,
    "shapes": Shapes,
    "tune": Tune,
    "products": Products,
    "host-memory": HostMemory,
    "rates": Rates,
    "reduces": Reduces,
    "compiling": Compiling,
    "llama-cpp": LlamaCpp,
}
