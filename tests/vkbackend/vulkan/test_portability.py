"""The loader lists a portability device, such as MoltenVK's on macOS, its extension is enabled, and a model
runs without what such a device may lack."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kept_devices
import numpy as np
import pytest
from device_sets import one_driver, two_drivers
from prefills import opened, prefill

from vkbackend.meta.imported_pages import ImportedPages

SUBSET = "VK_KHR_portability_subset"
LISTED = "from vkbackend.vulkan.instance import devices; print(len(devices()))"
# An instance that does not ask for portability devices.
UNASKED = """
from vkbackend.vulkan.vk import NULL, ffi, lib, new
app = new("VkApplicationInfo", apiVersion=1 << 22 | 1 << 12)
count, instance = ffi.new("uint32_t *"), ffi.new("VkInstance *")
if not lib.vkCreateInstance(new("VkInstanceCreateInfo", pApplicationInfo=app), NULL, instance):
    lib.vkEnumeratePhysicalDevices(instance[0], count, NULL)
print(count[0])
"""


@one_driver
def test_the_loader_lists_portability_devices(tmp_path: Path) -> None:
    driver = os.environ["VKBACKEND_TEST_DRIVERS"].split(":")[0].partition("=")[2]
    manifest = json.loads(Path(driver).read_text(encoding="utf-8"))
    manifest["ICD"]["is_portability_driver"] = True
    (tmp_path / "icd.json").write_text(json.dumps(manifest), encoding="utf-8")
    env = os.environ | dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), str(tmp_path / "icd.json"))

    def printed(program: str) -> str:
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True)
        return done.stdout.decode().strip()

    assert printed(UNASKED) == "0"
    assert printed(LISTED) == "1"


class PortabilityDriver:
    """The Vulkan library, with VkDevices that refuse to be created without portability_subset. The driver
    below does not know the extension, so it is not passed on."""

    def __init__(self, lib: Any) -> None:
        self.lib, self.created = lib, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lib, name)

    def vkCreateDevice(self, physical: Any, create: Any, allocator: Any, handle: Any) -> int:
        from vkbackend.vulkan.vk import C, string, strings

        names = [string(create.ppEnabledExtensionNames[i]) for i in range(create.enabledExtensionCount)]
        if SUBSET not in names:
            return int(C.VK_ERROR_INITIALIZATION_FAILED)
        passed = strings([name for name in names if name != SUBSET])
        create.enabledExtensionCount, create.ppEnabledExtensionNames = len(names) - 1, passed
        self.created += 1
        return int(self.lib.vkCreateDevice(physical, create, allocator, handle))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> PortabilityDriver:
    from vkbackend.vulkan import logical_device

    of_driver = logical_device.extensions_of
    driver = PortabilityDriver(logical_device.lib)
    monkeypatch.setattr(logical_device, "lib", driver)
    monkeypatch.setattr(logical_device, "extensions_of", lambda physical: of_driver(physical) | {SUBSET})
    return driver


TOKENS = np.random.default_rng(9).integers(3, 512, 20).tolist()


@one_driver
@pytest.mark.parametrize(
    ("devices", "lacks"),
    [
        (["0", "0"], "host_import,device_map,timeline"),
        pytest.param(["0", "1"], "host_import,device_map", marks=[two_drivers, pytest.mark.wide]),
    ],
    ids=["0,0", "0,1"],
)
def test_a_portability_device_runs_the_floor(
    models: Path, monkeypatch: pytest.MonkeyPatch, driver: PortabilityDriver, devices: list[str], lacks: str
) -> None:
    monkeypatch.setenv("VKBACKEND_FLOOR", "1")
    monkeypatch.setenv("VKBACKEND_DISABLE", lacks)
    with kept_devices.fresh(), opened(models / "stories-narrow-Q8_0.gguf", devices) as runner:
        assert driver.created == len(devices)
        for device in runner.mesh.devices:
            assert SUBSET in device.extensions and not device.imports_pages
            assert "event" not in getattr(device.queue, "signals", ())
        assert not isinstance(runner.mesh.provider, ImportedPages)
        got = prefill(runner, TOKENS)
    monkeypatch.undo()
    monkeypatch.setenv("VKBACKEND_FLOOR", "1")
    with opened(models / "stories-narrow-Q8_0.gguf", devices) as runner:
        assert np.array_equal(got, prefill(runner, TOKENS))


@one_driver
@pytest.mark.parametrize("page", [pytest.param(16_384, marks=pytest.mark.wide), 1 << 16])
def test_a_model_on_larger_pages(models: Path, monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    """The kernels of some ARM machines have larger pages. The file is not mapped, because its pages have 4096
    bytes here."""
    path, how = models / "stories-narrow-Q8_0.gguf", {"reduce_provider": "pages", "use_mmap": False}
    with opened(path, ["0", "0"], **how) as runner:
        want = prefill(runner, TOKENS)
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    with opened(path, ["0", "0"], **how) as runner:
        provider = runner.mesh.provider
        assert isinstance(provider, ImportedPages)
        assert provider.pages.address % page == 0 == provider.pages.nbytes % page
        assert np.array_equal(prefill(runner, TOKENS), want)
