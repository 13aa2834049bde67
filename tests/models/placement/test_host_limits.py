"""Pinned memory is counted against every limit of the system before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from material import DATA
from runners import load_runner

from vkbackend.device_info import Heap
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.models.placement import fit
from vkbackend.models.placement.fit import ON_DEVICE, ON_HOST, Budget, check_fit
from vkbackend.models.placement.host_limits import HostLimit, host_limits
from vkbackend.models.placement.memory_report import Held
from vkbackend.tools.measure.simulated import SimulatedDevice

GIB = 1 << 30
MODEL = DATA / "stories-narrow-F16.gguf"
GROUP = "limit of the control group"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 64000 kB\nMemAvailable:   48000 kB\n"}
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.no_vulkan
@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, []),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": "max\n"}, []),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/a/b/memory.max": "9000\n",
                f"{V2}/a/b/memory.current": "2000\n",
                f"{V2}/a/b/memory.stat": "anon 1500\ninactive_file 500\n",
                f"{V2}/a/memory.max": "5000\n",
                f"{V2}/a/memory.current": "4900\n",
            },
            [7500, 100],
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/id\n0::/\n",
                f"{V1}/docker/id/memory.limit_in_bytes": "8192\n",
                f"{V1}/docker/id/memory.usage_in_bytes": "9000\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1}/memory.usage_in_bytes": "12\n",
            },
            [0],
        ),
        (
            {  # in a container
                "proc/self/cgroup": "0::/../outside\n",
                f"{V2}/memory.max": "6000\n",
                f"{V2}/memory.current": "1000\n",
            },
            [5000],
        ),
    ],
)
def test_control_groups(files: dict[str, str], left: list[int], tmp_path: Path) -> None:
    limits = host_limits(tree(tmp_path, MEMINFO | files))
    assert limits == [HostLimit("available", 48_000 * 1024), *(HostLimit(GROUP, n) for n in left)]
    assert host_limits(tmp_path / "none") == []


@contextmanager
def soft_limit(name: str, nbytes: int) -> Iterator[None]:
    import resource  # not on Windows

    kind = getattr(resource, name)
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@pytest.mark.no_vulkan
def test_the_address_space_of_this_process() -> None:
    assert host_limits()[0].name == "available"
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [used] = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize:")]
    with soft_limit("RLIMIT_AS", used + GIB):
        limit = host_limits()[-1]
    assert "ulimit -v" in limit.name and 0.9 * GIB < limit.nbytes <= GIB


@pytest.mark.native
def test_a_small_limit_of_locked_memory_does_not_refuse_weights() -> None:
    """Drivers do not count pinned memory towards this limit, which is 8 MiB on most systems."""
    with soft_limit("RLIMIT_MEMLOCK", 64 << 10):
        with closing(load_runner(MODEL, devices=["0"], n_gpu_layers=0, use_mmap=False)) as runner:
            assert runner.memory()[0]["host"] > 64 << 10


def held(**homes: int) -> Held:
    planned = Held()
    planned.homes.update(homes)
    return planned


def check(device: Any, planned: Held) -> None:
    options = SimpleNamespace(n_ctx=32, split_mode="tensor", kv_offload=True, moe_cache_mib=0.0)
    check_fit([device], options, lambda changed: [planned], 1)  # type: ignore[arg-type]


@pytest.mark.no_vulkan
def test_what_a_driver_can_pin_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has more memory than the driver's heap, and the driver would allocate beyond the heap."""
    monkeypatch.setattr(fit, "least_host_limit", lambda: HostLimit("available", 1 << 50))
    device = SimulatedDevice(0, GIB)
    *_, pinned = fit.host_budgets([device, device])
    assert pinned.members == (0, 1) and pinned.homes == ON_HOST
    assert pinned.nbytes == int((128 << 30) * (1 - fit.RESERVE))
    monkeypatch.setattr(fit, "advice", lambda *_: "advice")
    check(device, held(host=100 << 30))
    with pytest.raises(OutOfDeviceMemory, match=r"driver of card0 can pin would hold .* placed on the host"):
        check(device, held(host=127 << 30))


@pytest.mark.no_vulkan
def test_memory_of_software_devices_is_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "least_host_limit", lambda: HostLimit(GROUP, GIB))
    device = SimulatedDevice(0, 64 * GIB)
    device._info = fit.replace(device._info, type="cpu", heaps=(Heap(64 * GIB, True, 64 * GIB),))
    usable = int(GIB * (1 - fit.RESERVE))
    assert fit.host_budgets([device]) == [
        Budget(f"host memory ({GROUP})", usable, (0,), homes=ON_HOST),
        Budget(f"host memory ({GROUP})", usable, (0,), homes=(*ON_DEVICE, *ON_HOST)),
    ]
    monkeypatch.setattr(fit, "advice", lambda *_: "advice")
    check(device, held(weights=GIB // 2, host=GIB // 4, mapped=8 * GIB))
    with pytest.raises(OutOfDeviceMemory, match="control group"):
        check(device, held(weights=GIB // 2, host=GIB // 2))
