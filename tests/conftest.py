"""Define options, markers, Vulkan devices and model files for all tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

# Set this before numpy is imported, because numpy's threads would compete with a software driver's threads
# for cores. A float64 forward pass over 512 tokens took 1.2 s with two threads and 0.2 s with one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# xdist sets COLUMNS in its workers, and this would narrow the tables that tests read from pipes
os.environ.pop("COLUMNS", None)

import random_cases
from places import ROOT
from systems import WINDOWS, not_on_windows
from watchdog import Watchdog

CHILD = "VKBACKEND_TEST_CHILD"
CHILD_TIMEOUT_S = 3500  # longer than the timeout of most tests; a timeout ends the process
DEAREST = {
    "test_architectures.py", "test_chat_command.py", "test_cli.py", "test_clients.py",
    "test_eight_bits.py", "test_faults.py", "test_fork.py", "test_graph.py", "test_host_processes.py",
    "test_llama.py", "test_page.py", "test_page_looks.py", "test_random_bodies.py",
    "test_real_engine.py", "test_reduce.py", "test_spills.py", "test_template_process.py",
    "test_weight_formats.py",
}  # fmt: skip
PARAM = type(pytest.param())
WATCHDOG = Watchdog()
collect_ignore = ["models/hosts", "vkbackend/kompute"] if WINDOWS else []  # Linux only
MARKERS = (
    "wide: a wide sweep, run with --all",
    "no_vulkan: needs no Vulkan device, and fails if it opens one",
    "own_process: measures the process, so it runs in one of its own",
    "native: about the native runtime alone",
    "runtimes(wide=False): runs with every runtime (--runtime NAME); if wide, only under --all",
    "oracle: asks the programs that golden files come from, run with -m oracle",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the wide sweeps (marked `wide`)")
    parser.addoption(
        "--case", default=None, metavar="REGEX", help="run only op cases whose repr matches REGEX"
    )

    parser.addoption(
        "--runtime",
        default=None,
        metavar="NAME",
        help="the runtime that drives the devices (native, kompute)",
    )


def pytest_configure(config: pytest.Config) -> None:
    random_cases.with_all = config.getoption("--all")
    settings.register_profile(
        "untimed",
        deadline=None,
        max_examples=random_cases.examples(),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("untimed")
    gc.disable()  # the garbage collector took a tenth of the time of a test run
    # Tests expect F32 activations, but some devices round activations by default.
    os.environ["VKBACKEND_EXACT"] = "1"
    os.environ["VKBACKEND_AHEAD"] = "0"  # Idle servers would take the processor from other tests.
    if runtime := config.getoption("--runtime"):
        os.environ["VKBACKEND_RUNTIME"] = runtime
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def left_out(config: pytest.Config) -> dict[str, str]:
    """Return the markers of excluded tests, each with the flag that includes them."""
    asked = {"wide": config.getoption("--all"), "oracle": "oracle" in config.getoption("-m")}
    how = {"wide": "wide sweeps (--all)", "oracle": "questions to other programs (-m oracle)"}
    return {marker: words for marker, words in how.items() if not asked[marker]}


def pytest_report_header(config: pytest.Config) -> str | None:
    words = left_out(config).values()
    return f"left out: {', '.join(words)}" if words else None


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, obj: object
) -> list[pytest.Item] | None:
    """Leave out an excluded function before pytest makes an item for each of its thousands of parameters."""
    marks = {mark.name for mark in getattr(obj, "pytestmark", ())}
    return [] if marks & left_out(collector.config).keys() else None


def without_excluded(mark: pytest.Mark, excluded: Collection[str]) -> pytest.Mark:
    """Leave out excluded parameters before pytest makes items for them. An item takes 1 ms."""
    if mark.name != "parametrize" or isinstance(mark.kwargs.get("ids"), Sequence):
        return mark
    names, every, *more = mark.args
    values = [*every]
    kept = [v for v in values if not (isinstance(v, PARAM) and {of.name for of in v.marks} & {*excluded})]
    return pytest.mark.parametrize(names, kept or values, *more, **mark.kwargs).mark


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if WINDOWS:
        for item in items:
            if reason := not_on_windows(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))
    markers = left_out(config)  # 13,000 skips would take 20 s
    out = [item for item in items if any(marker in item.keywords for marker in markers)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if not any(marker in item.keywords for marker in markers)]
    # Run slow files first. If a worker starts a slow file at the end, the other workers wait for it.
    items.sort(key=lambda item: item.path.name not in DEAREST)
    if (runtime := os.environ.get("VKBACKEND_RUNTIME", "native")) != "native":
        if not config.getoption("--all"):
            items[:] = [item for item in items if not of_every_runtime_only_if_all(item)]
        for item in items:
            if "native" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"about the native runtime, this is {runtime}"))


def of_every_runtime_only_if_all(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("runtimes")
    return mark is not None and bool(mark.kwargs.get("wide"))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)  # With 700 objects, the collector took a fiftieth of a run's time.
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Share devices between tests, except the tests of `vkbackend/vulkan` (see kept_devices.py)."""
    if module := sys.modules.get("kept_devices"):
        module.on = not item.path.is_relative_to(ROOT / "tests" / "vkbackend" / "vulkan")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    WATCHDOG.start(settings.timeout, partial(pytest_timeout.timeout_timer, item, settings))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    WATCHDOG.stop()
    return True


def pytest_sessionfinish() -> None:
    if module := sys.modules.get("kept_devices"):
        module.destroy_idle()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    excluded, marks = left_out(metafunc.config).keys(), metafunc.definition.own_markers
    marks[:] = [without_excluded(mark, excluded) for mark in marks]
    if "device" in metafunc.fixturenames and not getattr(metafunc.module, "CHOOSES_DEVICES", False):
        from device_sets import device_params

        metafunc.parametrize("device", device_params(), indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Iterator[object]:
    from kept_devices import fresh

    from vkbackend.open_device import open_device

    with fresh():
        opened = open_device(request.param)
    yield opened
    opened.close()
    assert not opened.counts, f"left open: {opened.counts}"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all model files (see material.py)."""
    from material import lay_out_models

    folder = tmp_path_factory.mktemp("models")
    lay_out_models(folder)
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `own_process` test in a separate process."""
    if "own_process" not in pyfuncitem.keywords or CHILD in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--all"]
    done = subprocess.run(
        [*command, pyfuncitem.nodeid],
        env=os.environ | {CHILD: "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=CHILD_TIMEOUT_S,
    )
    if "1 skipped" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    return True


@pytest.fixture(autouse=True)
def no_device_opens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a test marked `no_vulkan` fail if it opens a Vulkan device."""
    if "no_vulkan" in request.keywords and (module := sys.modules.get("vkbackend.vulkan.logical_device")):

        def refuse(self: object) -> None:
            raise AssertionError("this test is marked no_vulkan and opens a Vulkan device")

        monkeypatch.setattr(module.LogicalDevice, "_create", refuse)


@pytest.fixture(autouse=True)
def silent_layer() -> Iterator[None]:
    """Fail a test if the validation layer reports an error and VKBACKEND_VALIDATION is 1."""
    from vkbackend import env

    if not env.validation():
        yield
        return
    from vkbackend.vulkan.instance import validation_messages

    before = len(validation_messages)
    yield
    assert validation_messages[before:] == []
