"""count_instructions takes its counts from a recorded text, from drivers, or from compilers for absent
GPUs."""

from __future__ import annotations

import csv
import json
import struct
from pathlib import Path

import pytest
from device_sets import device_infos

from vkbackend import shaderlib
from vkbackend.errors import VkbackendError
from vkbackend.tools.measure import compilers, llama_cpp_choices
from vkbackend.tools.measure.kernel_row import COLUMNS, cells, row_of
from vkbackend.tools.studies import count_instructions

ASSEMBLY = "BB0:\n\tv_dot4_i32_iu8 v5, v2, v4, v5 ; cc\n\tv_add_nc_u32 v1, 1, v1 ; 4a\n\ts_branch BB0 ; bf\n"


def test_a_row() -> None:
    statistics = {"Instructions": 3, "VGPRs": 24, "SGPRs": 107, "Spilled VGPRs": 1, "Spilled SGPRs": 2}
    row = row_of("NAVI21", "AMD", "mat_dot.q4_0", 64, statistics, {"Assembly": ASSEMBLY})
    assert (row.instructions, row.registers, row.spills, row.waves, row.scratch) == (3, 24, 3, None, None)
    assert (row.vector, row.macs, row.vector_per_32) == (2, 4 * 64, 16)
    shown = dict(zip(COLUMNS, cells(row), strict=True))
    assert shown["vector / 32 MAC"] == "16" and shown["waves"] == "-" and shown["GPU"] == "NAVI21"
    unread = row_of("X", "NVIDIA", "k", 32, {"SLM size": 4}, {"NAK assembly": "nothing known"})
    assert (unread.scratch, unread.vector, unread.vector_per_32) == (4, None, None)


def test_arrays_that_v3dv_counts_as_spilled() -> None:
    arrays = "".join(
        f"    decl_var  INTERP_MODE_NONE none {of}\n"
        for of in ("mat4 rows", "uint[8] key#2", "vec4[3] value")
    )
    nir = {"NIR (MESA_SHADER_COMPUTE)": f"decl_var shared none float[9] tile\nimpl main {{\n{arrays}"}
    nbytes = 16 * 4 * (16 + 8 + 12)  # 16 lanes
    statistics = {"Instruction Count": 3, "Spill Size": nbytes + 64, "TMU Spills": nbytes + 64}
    row = row_of("V3D42", "Broadcom", "k", 16, statistics, nir)
    assert (row.instructions, row.scratch, row.spills) == (3, 64, None)
    in_memory = {name: text + "@load_scratch" for name, text in nir.items()}
    assert row_of("V3D42", "Broadcom", "k", 16, statistics, in_memory).scratch == nbytes + 64


def test_arguments_of_a_module() -> None:
    assert count_instructions.spirv_argument("a/b.spv") == ("a/b.spv", {}, 0)
    assert count_instructions.spirv_argument("b.spv:0=64,3=1:32") == ("b.spv", {0: 64, 3: 1}, 32)
    theirs = llama_cpp_choices.prefill("NAVI31", "q4_0")
    argument = theirs.argument(Path("x"))
    assert argument == (
        "x/matmul_q4_0_q8_1_cm1.spv:0=512,1=128,2=128,3=32,4=32,5=32,6=2,7=16,8=16,9=16,10=32,11=4:32"
    )


def test_bindings_of_a_module() -> None:
    vulkan = pytest.importorskip("vkbackend.tools.measure.spirv")
    assert vulkan.bindings(shaderlib.spirv("mat_dot", "q4_0")) == {0: {0, 1, 2, 3}}
    with pytest.raises(VkbackendError, match="not SPIR-V"):
        vulkan.bindings(struct.pack("<5I", 1, 2, 3, 4, 5))


@pytest.mark.no_vulkan
def test_how_a_compiler_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilers, "FOLDER", tmp_path)
    monkeypatch.setenv("RADV_FORCE_FAMILY", "NAVI10")
    with pytest.raises(VkbackendError, match=r"run `bash tools/setup.sh --compilers`"):
        compilers.gpu_of("dg2")
    with pytest.raises(VkbackendError, match=r"'NAVI99'; there are NAVI21"):
        compilers.gpu_of("NAVI99")
    for name in ("icd.json", "ld.so", "shim.so"):
        (tmp_path / "nvk").mkdir(exist_ok=True)
        (tmp_path / "nvk" / name).write_text("", encoding="utf-8")
    command, env = compilers.start(compilers.gpu_of("ampere"), "some.module", ["-x"])
    assert command[:3] == ["env", f"LD_PRELOAD={tmp_path}/nvk/shim.so", f"{tmp_path}/nvk/ld.so"]
    assert command[-3:] == ["-m", "some.module", "-x"]
    assert env["NOUVEAU_CHIPSET"] == "172" and env["VK_DRIVER_FILES"] == f"{tmp_path}/nvk/icd.json"
    assert "RADV_FORCE_FAMILY" not in env


@pytest.mark.no_vulkan
def test_how_a_compiler_for_arm_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilers, "ARM", tmp_path)
    monkeypatch.setenv("NOUVEAU_CHIPSET", "162")
    manifest = tmp_path / "root" / "usr" / "share" / "vulkan" / "icd.d" / "panfrost_icd.json"
    program = tmp_path / "root" / "usr" / "bin" / "python3.13"
    for path in (manifest, program, program.with_name("python3.13-config")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    with pytest.raises(VkbackendError, match=r"G610: .*run `bash tools/setup.sh --aarch64`"):
        compilers.gpu_of("g610")
    shim = tmp_path / "shims" / "panvk.so"
    shim.parent.mkdir()
    shim.write_text("", encoding="utf-8")
    command, env = compilers.start(compilers.gpu_of("g610"), "some.module", ["-x"])
    assert command[:3] == ["env", f"LD_PRELOAD={shim}", str(tmp_path / "qemu-aarch64")]
    assert command[-5:] == [str(program), "-P", "-m", "some.module", "-x"]
    assert env["PAN_GPU_ID"] == "a867" and env["VK_DRIVER_FILES"] == str(manifest)
    assert "NOUVEAU_CHIPSET" not in env
    (tmp_path / "root" / "v3dv-version").write_text("25", encoding="utf-8")
    (tmp_path / "root" / "mesa-version").write_text("26", encoding="utf-8")
    for name in ("broadcom", "asahi"):
        manifest.with_name(f"{name}_icd.json").write_text("", encoding="utf-8")
    for name in ("v3dv", "honeykrisp"):
        shim.with_name(f"{name}.so").write_text("", encoding="utf-8")
    _, env = compilers.start(compilers.gpu_of("v3d71"), "some.module", [])
    assert env["V3D_VERSION"] == "71"
    _, env = compilers.start(compilers.gpu_of("g13g"), "some.module", [])
    assert "V3D_VERSION" not in env and "" not in env
    assert [compilers.version(compilers.gpu_of(name)) for name in ("v3d42", "g13g")] == ["25", "26"]


@pytest.mark.parametrize("gpu", ["NAVI31", pytest.param("BMG", marks=pytest.mark.wide),
                                 pytest.param("AMPERE", marks=pytest.mark.wide)])  # fmt: skip
def test_counts_of_a_compiler(gpu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if why := compilers.missing(compilers.GPUS[gpu]):
        pytest.skip(why)
    case = r"^MatDot\(type='q4_0', n=3072, k=1024, rows=1,"
    (ours,) = count_instructions.rows_of(gpu, ["-c", case])
    assert ours.gpu == gpu and ours.spills == 0 and ours.in_flight and ours.in_flight >= 4
    assert ours.macs == 2 * 32 * ours.lanes
    assert ours.vector_per_32 and 30 < ours.vector_per_32 < 250
    module = tmp_path / "module.spv"
    module.write_bytes(shaderlib.spirv("mat_dot", "q4_0"))
    values = [word.split("=")[1] for word in ours.kernel.split()[1:]]
    argument = f"{module}:{','.join(f'{i}={value}' for i, value in enumerate(values))}:{ours.lanes}"
    assert count_instructions.main(["-g", gpu, "--spirv", argument, "--json"]) == 0
    (same,) = json.loads(capsys.readouterr().out)
    assert (same["kernel"], same["instructions"], same["macs"]) == ("module", ours.instructions, ours.macs)
    path = tmp_path / "counts.csv"
    assert (
        count_instructions.main([f"--gpus={gpu}", "--case", case, "--per-op", "1", "--record", str(path)])
        == 0
    )
    with path.open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["gpu"], row["kernel"], row["instructions"]) == (gpu, ours.kernel, str(ours.instructions))
    assert all(row.values()), "an empty column"


def test_counts_of_a_driver(capsys: pytest.CaptureFixture[str]) -> None:
    able = [info for info in device_infos() if info.features["executable_info"]]
    if not able:
        pytest.skip("no driver here has VK_KHR_pipeline_executable_properties")
    assert count_instructions.main(["-dev", str(able[0].index), "-c", r"^Add\(n=1031"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "add.f32" in line)
    assert len(row.split("|")) == 2 + len(COLUMNS)


def test_the_command_reports_a_driver_without_counts() -> None:
    mute = [info for info in device_infos() if not info.features["executable_info"]]
    if not mute:
        pytest.skip("every driver here has VK_KHR_pipeline_executable_properties")
    with pytest.raises(SystemExit, match=r"^error: .*lacks VK_KHR_pipeline_executable_properties"):
        count_instructions.main(["-dev", str(mute[0].index), "-c", r"^Add\(n=1031"])
