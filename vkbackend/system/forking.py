"""Calls in a forked child."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

if sys.platform == "win32":

    def in_every_child(call: Callable[[], object]) -> None:
        """Windows has no fork."""

else:

    def in_every_child(call: Callable[[], object]) -> None:
        """Call `call` in every child that is forked from now on."""
        os.register_at_fork(after_in_child=call)
