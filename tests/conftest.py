"""Shared fixtures: every Vulkan device present, opened once per session; model files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No example fails for taking long on a busy machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# numpy's threads and those of a software driver take each other's cores: a float64 forward of 512 tokens took
# 1.2 s with two threads and 0.2 s with one. Set before anything imports numpy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("VKBACKEND_SHARED", ROOT.parent / "shared"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the wide sweeps (marked `wide`)")
    parser.addoption(
        "--case", default=None, metavar="REGEX", help="run only op cases whose repr matches REGEX"
    )

    parser.addoption(
        "--runtime",
        default=None,
        metavar="NAME",
        help="the runtime that drives the devices (see runtimes.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Models are held to tolerances of F32 activations, on devices that would round them, too.
    os.environ["VKBACKEND_EXACT"] = "1"
    if runtime := config.getoption("--runtime"):
        os.environ["VKBACKEND_RUNTIME"] = runtime  # for whatever opens devices, also in processes of its own
    config.addinivalue_line("markers", "wide: a wide sweep, run with --all")
    config.addinivalue_line("markers", "native: about the native runtime alone")
    config.addinivalue_line("markers", "runtimes: tools/test.sh runs it with every runtime (--runtime NAME)")
    config.addinivalue_line(
        "markers", "oracle: asks the programs that golden files come from, run with -m oracle"
    )


def left_out(config: pytest.Config) -> dict[str, str]:
    """Markers of what is left out unless asked for, and how to ask."""
    asked = {"wide": config.getoption("--all"), "oracle": "oracle" in config.getoption("-m")}
    how = {"wide": "wide sweeps (--all)", "oracle": "questions to other programs (-m oracle)"}
    return {marker: words for marker, words in how.items() if not asked[marker]}


def pytest_report_header(config: pytest.Config) -> str | None:
    words = left_out(config).values()
    return f"left out: {', '.join(words)}" if words else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    markers = left_out(config)  # left out rather than skipped: 13,000 skips took 20 s
    out = [item for item in items if any(marker in item.keywords for marker in markers)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if not any(marker in item.keywords for marker in markers)]
    if (runtime := os.environ.get("VKBACKEND_RUNTIME", "native")) != "native":
        for item in items:
            if "native" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"about the native runtime, this is {runtime}"))


def device_infos() -> list:  # type: ignore[type-arg]
    """Every Vulkan device present; empty without a loader or a driver."""
    from vkbackend.errors import UnsupportedFeature

    try:
        from vkbackend.instance import devices

        return devices()
    except UnsupportedFeature:
        return []


def device_params() -> list:  # type: ignore[type-arg]
    """Every device present as a parameter; without any one that is skipped and says so."""
    found = [pytest.param(i, id=f"{i.index}-{i.driver.split()[0].lower()}") for i in device_infos()]
    none = pytest.param(None, id="none", marks=pytest.mark.skip(reason="no Vulkan device is present"))
    return found or [none]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", device_params(), indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Iterator[object]:
    """An opened device; the test runs once for each one present."""
    from vkbackend.runtimes import open_device

    opened = open_device(request.param)
    yield opened
    opened.close()
    assert not opened.counts, f"left open: {opened.counts}"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all model files, what llama.cpp computes with them, and a text (see material.py)."""
    from material import lay_out_models

    folder = tmp_path_factory.mktemp("models")
    lay_out_models(folder)
    return folder


@pytest.fixture(autouse=True)
def silent_layer() -> Iterator[None]:
    """With VKBACKEND_VALIDATION=1 a test fails by what the layer says of the devices in this process."""
    from vkbackend import env

    if not env.validation():
        yield
        return
    from vkbackend.instance import validation_messages

    before = len(validation_messages)
    yield
    assert validation_messages[before:] == []
