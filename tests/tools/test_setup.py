"""Test the set-up scripts' syntax, options and errors. A second run changes nothing.

The tests install nothing. Fake tools on PATH replace everything that needs root or the network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.no_vulkan


SCRIPTS = (
    "tools/setup.sh",
    "tools/drivers.sh",
    "tools/glslang.sh",
    "tools/compilers.sh",
    "tools/demo.sh",
    "tools/test.sh",
    ".ci/run",
)
STAMP = ROOT / ".venv" / ".setup-stamp"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the set-up scripts need bash")

ENUMERATE = """
import json
import vulkan as vk
from vulkan import ffi, lib
info = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=info), None)
found = []
for device in vk.vkEnumeratePhysicalDevices(instance):
    driver = ffi.new("VkPhysicalDeviceDriverProperties *")
    driver.sType = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES
    device_2 = ffi.new("VkPhysicalDeviceProperties2 *")
    device_2.sType = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2
    device_2.pNext = driver
    lib.vkGetPhysicalDeviceProperties2(device, device_2)
    name = ffi.string(device_2.properties.deviceName).decode()
    found.append({"name": name, "driver": ffi.string(driver.driverName).decode(),
                  "info": ffi.string(driver.driverInfo).decode()})
print(json.dumps(found))
"""


def run(
    *command: str, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        timeout=100,
    )


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file. `os.walk` reads 20,000 files three times as fast as `rglob`."""
    files = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in (os.path.join(place, name) for name in names):
            if os.path.exists(path):
                stat = os.stat(path)
                files[path] = (stat.st_size, stat.st_mtime_ns)
    return files


@pytest.mark.parametrize("script", SCRIPTS)
def test_parses(script: str) -> None:
    done = run("bash", "-n", script)
    assert done.returncode == 0, done.stderr


def test_ci_runs_the_test_script() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert lines[-1] == "exec bash tools/test.sh"


def test_help_lists_every_option() -> None:
    done = run("bash", "tools/setup.sh", "--help")
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--test", "--drivers", "--compilers", "--kompute")), (
        done.stdout
    )


@pytest.mark.parametrize("options", ["--nope", "--test --drivers", "--compilers --kompute"])
def test_wrong_options_are_refused(options: str) -> None:
    done = run("bash", "tools/setup.sh", *options.split())
    assert done.returncode == 2
    assert done.stdout == "" and "usage:" in done.stderr


@pytest.fixture(scope="module")
def set_up() -> None:
    if not STAMP.exists():
        pytest.skip("this environment was not made by tools/setup.sh (no .venv/.setup-stamp)")
    first = run("bash", "tools/setup.sh")
    assert first.returncode == 0, first.stderr


@pytest.mark.usefixtures("set_up")
def test_second_run_changes_nothing() -> None:
    before = snapshot(ROOT / ".venv")
    second = run("bash", "tools/setup.sh")
    assert second.returncode == 0, second.stderr
    assert second.stdout == ""
    assert [line for line in second.stderr.splitlines() if not line.startswith("setup: ready")] == []
    assert snapshot(ROOT / ".venv") == before


@pytest.mark.usefixtures("set_up")
def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path: Path) -> None:
    """Python may start next to a folder named vkbackend. This folder must not hide the package."""
    (tmp_path / "vkbackend").mkdir()
    python = str(ROOT / ".venv" / "bin" / "python")
    done = run(python, "-c", "from vkbackend import LLM; print(LLM.__name__)", cwd=tmp_path)
    assert done.stdout == "LLM\n", done.stderr


@pytest.mark.usefixtures("set_up")
def test_the_install_has_types_for_every_package() -> None:
    stubs = next((ROOT / ".venv").glob("lib/python*/site-packages/vkbackend-stubs"))
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-dir"
    ]
    for package, folder in folders.items():
        linked = stubs.joinpath(*package.split(".")[1:])
        for source in (ROOT / folder).glob("*.py"):
            assert (linked / source.name).resolve() == source, f"{package}: {source.name}"
    assert (stubs / "__init__.pyi").resolve() == ROOT / "vkbackend" / "__init__.py"


@pytest.mark.wide
@pytest.mark.usefixtures("set_up")
def test_mypy_checks_a_script_that_imports_the_package(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        'from vkbackend import LLM\nreveal_type(LLM("model.gguf").generate("Once").text)\nLLM(3)\n',
        encoding="utf-8",
    )
    python = str(ROOT / ".venv" / "bin" / "python")
    if run(python, "-c", "import mypy").returncode:
        pytest.skip("mypy is not installed")
    done = run(python, "-m", "mypy", "--strict", "script.py", cwd=tmp_path)
    assert 'Revealed type is "str"' in done.stdout, done.stdout
    assert 'script.py:3: error: Argument 1 to "LLM" has incompatible type "int"' in done.stdout, done.stdout
    assert "Found 1 error in 1 file" in done.stdout, done.stdout


@pytest.fixture
def bare_checkout(tmp_path: Path) -> tuple[Path, dict[str, str], Path]:
    """Return a checkout, its environment, and a folder on PATH for fake tools such as apt-get. The fake dpkg
    reports that no package is installed."""
    checkout, bin_dir = tmp_path / "checkout with space", tmp_path / "bin"
    bin_dir.mkdir()
    (checkout / "tools").mkdir(parents=True)
    for name in ("setup.sh", "drivers.sh", "compilers.sh", "glslang.sh"):
        shutil.copy(ROOT / "tools" / name, checkout / "tools" / name)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    needed = "bash dirname flock id tr grep mktemp tail sed rm cat env sha256sum head find mkdir sort awk cut"
    for name in (*needed.split(), "touch", "mv"):
        path = shutil.which(name)
        assert path is not None, f"{name} is not on PATH"
        (bin_dir / name).symlink_to(path)
    script(bin_dir / "python3", f'exec "{sys.executable}" "$@"')
    script(bin_dir / "dpkg-query", "exit 1")
    script(bin_dir / "ldconfig", "exit 0")
    env = {
        "PATH": str(bin_dir),
        "HOME": str(tmp_path),
        "XDG_DATA_DIRS": str(tmp_path),
        "XDG_CONFIG_DIRS": str(tmp_path),
    }
    return checkout, env, bin_dir


def script(path: Path, body: str) -> None:
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def test_without_apt_names_the_packages(bare_checkout: tuple[Path, dict[str, str], Path]) -> None:
    checkout, env, _ = bare_checkout
    done = run("bash", "tools/setup.sh", env=env, cwd=checkout)
    assert done.returncode == 1
    assert "no apt here to install: libvulkan1 glslang-tools" in done.stderr
    assert "by hand" in done.stderr.splitlines()[-1]


def test_without_root_or_sudo_the_commands_are_printed(
    bare_checkout: tuple[Path, dict[str, str], Path],
) -> None:
    checkout, env, bin_dir = bare_checkout
    (bin_dir / "id").unlink()
    script(bin_dir / "id", "echo 1000")
    script(bin_dir / "apt-get", "echo must not be called >&2; exit 99")
    done = run("bash", "tools/setup.sh", env=env, cwd=checkout)
    assert done.returncode == 1
    assert "neither root nor sudo" in done.stderr and "must not be called" not in done.stderr
    assert "apt-get install -y --no-install-recommends libvulkan1 glslang-tools" in done.stderr


def test_sudo_that_needs_a_password_does_not_hang(bare_checkout: tuple[Path, dict[str, str], Path]) -> None:
    checkout, env, bin_dir = bare_checkout
    (bin_dir / "id").unlink()
    script(bin_dir / "id", "echo 1000")
    script(bin_dir / "apt-get", "exit 99")
    script(bin_dir / "sudo", '[ "$1" = -n ] && exit 1; read -r password')
    done = run("bash", "tools/setup.sh", env=env, cwd=checkout)
    assert done.returncode == 1
    assert "wants a password" in done.stderr


def test_failing_step_shows_its_log_and_advice(bare_checkout: tuple[Path, dict[str, str], Path]) -> None:
    checkout, env, bin_dir = bare_checkout
    (bin_dir / "id").unlink()
    script(bin_dir / "id", "echo 0")
    script(
        bin_dir / "apt-get",
        "for i in {1..50}; do echo line $i; done; echo E: no route to the mirror; exit 100",
    )
    done = run("bash", "tools/setup.sh", "--test", env=env, cwd=checkout)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[0] == "setup: reading apt's package lists"
    assert "    E: no route to the mirror" in lines and "    line 1" not in lines
    assert lines[-2] == "setup: FAILED: reading apt's package lists"
    assert "check the network" in lines[-1]


def test_kompute_needs_a_python_that_kp_supports(bare_checkout: tuple[Path, dict[str, str], Path]) -> None:
    checkout, env, bin_dir = bare_checkout
    script(bin_dir / "python3", f'exec "{sys.executable}" -c "import sys; sys.version_info = (3, 13); $2"')
    done = run("bash", "tools/setup.sh", "--kompute", env=env, cwd=checkout)
    assert done.returncode == 3 and "no Python 3.11 or 3.12 found" in done.stderr, done.stderr


def test_kompute_names_the_build_requirements_of_kp(bare_checkout: tuple[Path, dict[str, str], Path]) -> None:
    if sys.version_info >= (3, 13):
        pytest.skip("kp works with no Python as new as this one")
    checkout, env, _ = bare_checkout
    done = run("bash", "tools/setup.sh", "--kompute", env=env, cwd=checkout)
    assert done.returncode == 1
    assert "libvulkan-dev libfmt-dev pybind11-dev cmake make g++" in done.stderr


def test_an_installed_driver_is_unchanged(
    bare_checkout: tuple[Path, dict[str, str], Path], tmp_path: Path
) -> None:
    checkout, env, _ = bare_checkout
    (tmp_path / "vulkan" / "icd.d").mkdir(parents=True)
    (tmp_path / "vulkan" / "icd.d" / "some_icd.json").write_text("{}", encoding="utf-8")
    kept = run("bash", "tools/setup.sh", env=env, cwd=checkout)
    named = run("bash", "tools/setup.sh", env=env | {"VK_DRIVER_FILES": "/elsewhere.json"}, cwd=checkout)
    for done in (kept, named):
        assert done.returncode == 1 and "libvulkan1" in done.stderr
        assert "mesa-vulkan-drivers" not in done.stderr


@pytest.mark.parametrize(
    ("gpus", "drivers", "installs", "hints"),
    [
        (["0x10de", "0x1002"], ["nvidia_icd.json"], True, False),
        pytest.param(
            ["0x10de", "0x1002"],
            ["nvidia_icd.json", "radeon_icd.x86_64.json"],
            False,
            False,
            marks=pytest.mark.wide,
        ),
        pytest.param(
            ["0x8086", "0x1002"],
            ["intel_icd.x86_64.json", "amd_icd64.json"],
            False,
            False,
            marks=pytest.mark.wide,
        ),
        pytest.param(["0x8086", "0x10de"], ["nvidia_icd.json"], True, False, marks=pytest.mark.wide),
        (["0x10de"], ["lvp_icd.x86_64.json"], False, True),
        pytest.param(["0x1a03"], ["lvp_icd.x86_64.json"], False, False, marks=pytest.mark.wide),
    ],
)
def test_each_gpu_gets_a_driver(
    bare_checkout: tuple[Path, dict[str, str], Path],
    tmp_path: Path,
    gpus: list[str],
    drivers: list[str],
    installs: bool,
    hints: bool,
) -> None:
    checkout, env, _ = bare_checkout
    (icds := tmp_path / "vulkan" / "icd.d").mkdir(parents=True)
    for name in drivers:
        (icds / name).write_text("{}", encoding="utf-8")
    for i, vendor in enumerate([*gpus, "0x1002"]):
        (device := tmp_path / f"bus/pci/devices/0000:0{i}:00.0").mkdir(parents=True)
        is_gpu = i < len(gpus)  # the last device is a sound card
        (device / "class").write_text("0x030000\n" if is_gpu else "0x040300\n", encoding="utf-8")
        (device / "vendor").write_text(f"{vendor}\n", encoding="utf-8")
    done = run("bash", "tools/setup.sh", env=env | {"VKBACKEND_SYSFS": str(tmp_path)}, cwd=checkout)
    assert done.returncode == 1 and "no apt here to install: libvulkan1" in done.stderr
    assert ("mesa-vulkan-drivers" in done.stderr) == installs
    assert ("an NVIDIA GPU is here without its driver" in done.stderr) == hints


def test_unavailable_drivers_are_skipped(bare_checkout: tuple[Path, dict[str, str], Path]) -> None:
    checkout, env, _ = bare_checkout
    done = run("bash", "tools/setup.sh", "--drivers", env=env, cwd=checkout)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for name in ("lavapipe", "swiftshader", "radv"):
        assert f"setup: left out {name}: " in done.stderr


def test_a_missing_mirror_is_not_cached(bare_checkout: tuple[Path, dict[str, str], Path]) -> None:
    checkout, env, bin_dir = bare_checkout
    script(bin_dir / "apt-get", "exit 100")
    script(bin_dir / "dpkg-deb", "exit 1")
    for _ in range(2):
        done = run("bash", "tools/setup.sh", "--drivers", env=env, cwd=checkout)
        assert done.returncode == 0, done.stderr
        assert "left out lavapipe: none of apt's mirrors answers" in done.stderr
    script(bin_dir / "apt-get", 'echo asked again >&2; echo asked >>"$HOME/asked"; exit 100')
    run("bash", "tools/setup.sh", "--drivers", env=env, cwd=checkout)
    assert Path(env["HOME"], "asked").exists()


@pytest.fixture(scope="module")
def drivers() -> dict[str, Path]:
    if not (ROOT / ".drivers").exists():
        pytest.skip("no .drivers/ here: run `bash tools/setup.sh --drivers`")
    done = run("bash", "tools/setup.sh", "--drivers")
    assert done.returncode == 0, done.stderr
    pairs = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert all(len(pair) == 2 for pair in pairs), done.stdout
    return {name: Path(path) for name, path in pairs}


def test_drivers_output_names_manifests(drivers: dict[str, Path]) -> None:
    assert set(drivers) <= {"lavapipe", "swiftshader"}
    for manifest in drivers.values():
        library = Path(json.loads(manifest.read_text(encoding="utf-8"))["ICD"]["library_path"])
        assert manifest.is_absolute() and library.is_absolute() and library.is_file()


def test_drivers_second_run_unpacks_nothing(drivers: dict[str, Path]) -> None:
    if not drivers:
        pytest.skip("no test driver could be had here")

    def libraries() -> dict[str, tuple[int, int]]:
        return {path: state for path, state in snapshot(ROOT / ".drivers").items() if ".so" in path}

    before = libraries()
    done = run("bash", "tools/setup.sh", "--drivers")
    assert "unpacked" not in done.stderr and libraries() == before


@pytest.mark.parametrize(("name", "reported"), [("lavapipe", "llvmpipe"), ("swiftshader", "SwiftShader")])
def test_driver_works_in_an_empty_environment(drivers: dict[str, Path], name: str, reported: str) -> None:
    if name not in drivers:
        pytest.skip(f"{name} could not be had here: `bash tools/setup.sh --drivers` says why")
    manifest = str(drivers[name])
    env = {"VK_DRIVER_FILES": manifest, "VK_ICD_FILENAMES": manifest}
    done = run(sys.executable, "-c", ENUMERATE, env=env)
    assert done.returncode == 0, done.stderr
    (device,) = json.loads(done.stdout)
    assert device["name"].startswith(reported), device
    if name == "lavapipe":
        version = (ROOT / ".drivers" / "lavapipe" / "version").read_text(encoding="utf-8").strip()
        assert version in device["info"], (
            f"the loader opened another Mesa: {device['info']}, unpacked {version}"
        )
