"""Paths of the checkout, the test data, and files next to the checkout."""

from __future__ import annotations

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
DATA = ROOT / "tests" / "data"
GOLDEN = DATA / "golden"
SHARED = Path(os.environ.get("VKBACKEND_SHARED", ROOT.parent / "shared"))
CACHE = ROOT / ".pytest_cache" / "models"  # a build of the docs site empties .cache
