"""What count_instructions tells of kernels: of a recorded text everywhere, of a driver where one tells."""

from __future__ import annotations

from dataclasses import replace

import pytest
from device_sets import device_infos

from vkbackend.errors import UnsupportedFeature
from vkbackend.limits import Limits
from vkbackend.tools.studies import count_instructions

# As RADV prints it. The inner loop has 2 vectors, 2 loads, 1 LDS; the outer one 2 vectors more and a load.
TEXT = """BB0:
	s_load_dwordx4 s[4:7], s[2:3], null                         ; f4080101 fa000000
	v_mov_b32_e32 v1, 0                                         ; 7e020280
BB1:
	v_add_nc_u32_e32 v1, 1, v1                                  ; 4a020281
	buffer_load_dword v3, v1, s[4:7], 0 offen                   ; e0301000 80010301
BB2:
	s_clause 0x1                                                ; bfa10001
	buffer_load_dwordx2 v[2:3], v1, s[4:7], 0 offen             ; e0341000 80010201
	global_load_dword v4, v1, s[8:9]                            ; dc308000 04080001
	s_waitcnt vmcnt(0)                                          ; bf8c3f70
	v_dot4_i32_i8 v5, v2, v4, v5                                ; cc164005 1c160902
	(then repeated 1 times)
	ds_write_b32 v1, v5                                         ; d8340000 00000501
	s_cbranch_vccnz BB2                                         ; bf870000
BB3:
	s_cbranch_scc0 BB4                                          ; bf840001
	s_branch BB1                                                ; bf820000
BB4:
	buffer_store_dword v5, v1, s[4:7], 0 offen                  ; e0701000 80010501
	s_endpgm                                                    ; bf810000
"""


def test_instructions_and_loops_of_a_text() -> None:
    found, loops = count_instructions.instructions(TEXT)
    assert len(found) == 16 and found[1] == ("v_mov_b32_e32", "v1, 0")
    assert [found[loop.start][0] for loop in loops] == ["s_clause"]  # the outer one holds it
    counts = count_instructions.classes(found)
    assert {name: counts[name] for name in count_instructions.CLASSES} == {
        "vector": 4,
        "scalar": 5,  # without the clause and the wait
        "loads": 3,
        "stores": 1,
        "LDS": 1,
    }
    inner = count_instructions.inner_round(TEXT)
    assert inner and (inner["vector"], inner["loads"], inner["LDS"]) == (2, 2, 1)
    assert (
        count_instructions.inner_round(TEXT.replace("s_branch BB1", "").replace("vccnz BB2", "vccnz BB4"))
        is None
    )


def test_a_row_is_for_32_weights() -> None:
    try:
        from vkbackend.vulkan.pipeline_report import PipelineReport
    except UnsupportedFeature as error:
        pytest.skip(f"no Vulkan loader on this machine: {error}")
    gpu = replace(Limits.floor(), features=frozenset({"int_dot", "subgroup_arithmetic", "full_subgroups"}))
    gpu = replace(gpu, subgroup_size=32, is_cpu=False)
    made = PipelineReport(32, {"VGPRs": 24, "SGPRs": 107, "Spilled VGPRs": 1, "Spilled SGPRs": 2}, {})
    per_32 = {}
    for kernel, dispatch in count_instructions.kernels(gpu, r"MatDot\(.*q(4_0|6_k).*1024, rows=8,").items():
        cells = count_instructions.row(kernel, dispatch, made, TEXT)
        assert cells[1:9] == ("32", "4", "5", "3", "1", "1", "24", "3") and cells[0].endswith("ROWS=8 N=8")
        per_32[dispatch.variant] = cells[9:]
        assert count_instructions.row(kernel, dispatch, PipelineReport(0, {}, {}), "")[1:] == ("-",) * 11
    # a round has two rows of 32 weights, of Q6_K two rows of 16
    assert per_32 == {"q4_0": ("1", "1", "0.5"), "q6_k": ("2", "2", "1")}


def test_a_driver_tells(capsys: pytest.CaptureFixture[str]) -> None:
    told = [info for info in device_infos() if info.features["executable_info"]]
    if not told:
        pytest.skip("no driver here has VK_KHR_pipeline_executable_properties")
    assert count_instructions.main(["-dev", str(told[0].index), "-c", r"^Add\(n=1031"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| add.f32"))
    assert len(row.split("|")) == 2 + len(count_instructions.COLUMNS)


def test_the_command_says_that_a_driver_does_not() -> None:
    mute = [info for info in device_infos() if not info.features["executable_info"]]
    if not mute:
        pytest.skip("every driver here has VK_KHR_pipeline_executable_properties")
    with pytest.raises(SystemExit, match=r"^error: .*lacks VK_KHR_pipeline_executable_properties"):
        count_instructions.main(["-dev", str(mute[0].index), "-c", r"^Add\(n=1031"])
