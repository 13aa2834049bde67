from __future__ import annotations

from types import SimpleNamespace

import pytest

from vkbackend.tools.server.router import pool


@pytest.fixture
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unload models without a garbage collection. It takes 0.1 s here, and frees nothing if models have no
    engines."""
    monkeypatch.setattr(pool, "gc", SimpleNamespace(collect=lambda: 0))
