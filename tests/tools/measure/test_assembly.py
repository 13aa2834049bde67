"""The parser of assembly counts instructions, widths, loops and multiply-adds in the text of three
drivers."""

from __future__ import annotations

import pytest

from vkbackend.tools.measure.assembly import Counts, counts
from vkbackend.tools.measure.dialects import listing

pytestmark = pytest.mark.no_vulkan

# RADV's listing contains two dot products and a shift in the hot loop, and two more instructions in the outer
# loop.
AMD = """BB0:
	s_load_dwordx4 s[4:7], s[2:3], null                         ; f4080101 fa000000
	v_mov_b32_e32 v1, 0                                         ; 7e020280
BB1:
	v_add_nc_u32_e32 v1, 1, v1                                  ; 4a020281
	buffer_load_dword v3, v1, s[4:7], 0 offen                   ; e0301000 80010301
BB2:
	s_clause 0x1                                                ; bfa10001
	buffer_load_dwordx2 v[2:3], v1, s[4:7], 0 offen             ; e0341000 80010201
	global_load_b128 v[4:7], v1, s[8:9]                         ; dc308000 04080001
	s_waitcnt vmcnt(1)                                          ; bf8c3f70
	buffer_load_u8 v8, v1, s[4:7], 0 offen                      ; e0341000 80010201
	s_waitcnt vmcnt(0)                                          ; bf8c3f70
	v_dot4_i32_iu8 v5, v2, v4, v5                               ; cc164005 1c160902
	(then repeated 1 times)
	v_lshlrev_b32_e32 v2, 4, v2                                 ; 30040484
	ds_write_b32 v1, v5                                         ; d8340000 00000501
	s_cbranch_vccnz BB2                                         ; bf870000
BB3:
	s_cbranch_scc0 BB4                                          ; bf840001
	s_branch BB1                                                ; bf820000
BB4:
	buffer_store_dword v5, v1, s[4:7], 0 offen                  ; e0701000 80010501
	s_endpgm                                                    ; bf810000
"""

# ANV's listing is for subgroups of 16. An instruction of 32 lanes counts twice, and an instruction of a
# single lane is scalar.
INTEL = """
mov(16)         g48<1>UD        g0.1<0,1,0>UD                   { align1 WE_all 1H compacted };

LABEL1:
send(16)        g8UD            g51UD           nullUD          0x62403500                0x03000000
                ugm MsgDesc: ( load, a32, d32, V4, L1STATE_L3MOCS bti )  BTI 3  { align1 1H $8 };
send(1)         g3UD            g66UD           nullUD          0x0240f500                0x00000000
                ugm MsgDesc: ( load, a32, d32, V64, transpose, L1STATE_L3MOCS )  { align1 WE_all 1N $9 };
send(16)        g4UD            g84UD           nullUD          0x04803500                0x00000000
                slm MsgDesc: ( load, a32, d32, V4, L1STATE_L3MOCS flat )  base_offset 0  { align1 $1 };
sync nop(1)                     null<0,1,0>UB                   { align1 WE_all 1N $8.dst };
mad(32)         g10<1>F         g12<8,8,1>F     g14<8,8,1>F     g16<1,1,1>F { align1 };
dpas.8x8(16)    g16<1>F         g24<1,1,0>F     g4<1,1,0>HF     g72<1,1,0>HF { align1 WE_all 1H $7 };
add(1)          g67<1>UD        g66<0,1,0>UD    0x00000100UD    { align1 WE_all 1N $9.dst };
(+f0.0) while(16) JIP:  LABEL1                                  { align1 1H };
"""

# In NVK's listing, the blocks of a loop may be separated by other code.
NVIDIA = """block.u 0 L1 [] -> {
      ur0     = s2r sr[0x25]                             // delay=1 wr:1
} -> [1]
block 1 L2 [0, 3] -> {
      r8        = ld.global.a64.constant.b128 [r130..132], pT          // delay=1 wr:0
      r7        = ld.global.a64.constant.b32 [r130..132], pT          // delay=2 wr:2
@!p0            bra pT L4                               // delay=1
} -> [2, 3]
block 2 L3 [1] -> {
                st.global.a64.strong.gpu.b32 [r2..4] r1 // delay=1
} -> []
block 3 L4 [1] -> {
      r1      = idp4.i8.i8 r33 r25 rZ                    // delay=1 wt=000001
      r1      = iadd3 r1 r2 rZ                           // delay=1 wt=000100
                bra pT L2                                // delay=1
} -> [1]
"""


def test_amd() -> None:
    program = listing("AMD", AMD, 64)
    assert len(program.ops) == 19 and len(program.loops) == 2
    hot = counts(program.hot_loop())
    assert hot == Counts(
        vector=3, matrix=0, scalar=0, loads=3, load_nbytes=8 + 16 + 1, in_flight=2, stores=0, shared=1,
        waits=2, barriers=0, macs=2 * 4 * 64,
    )  # fmt: skip
    whole = counts(program.ops)
    assert (whole.vector, whole.scalar, whole.loads, whole.stores) == (5, 1, 4, 1)
    wmma = listing("AMD", "\tv_wmma_f32_16x16x16_f16 v[4:11], v[68:75], v[100:107], v[4:11] ; cc40", 64)
    assert counts(wmma.ops).matrix == 1 and counts(wmma.hot_loop()).macs == 16**3
    both = listing("AMD", "\tv_dual_fmac_f32 v1, v2, v3 :: v_dual_add_f32 v4, v5, v6 ; c800", 32)
    assert (counts(both.ops).vector, counts(both.ops).macs) == (1, 32)


def test_intel() -> None:
    program = listing("Intel", INTEL, 16)
    hot = counts(program.hot_loop())
    assert hot == Counts(
        vector=2, matrix=1, scalar=1, loads=2, load_nbytes=16 + 16, in_flight=2, stores=0, shared=1,
        waits=1, barriers=0, macs=8 * 8 * 16 * 2,
    )  # fmt: skip
    assert counts(program.ops).vector == 3


def test_nvidia() -> None:
    program = listing("NVIDIA", NVIDIA, 32)
    (loop,) = program.loops
    assert [program.ops[i].name for i in loop] == ["ld", "ld", "bra", "idp4", "iadd3", "bra"]
    hot = counts(program.hot_loop())
    assert (hot.vector, hot.loads, hot.load_nbytes, hot.in_flight, hot.stores) == (2, 2, 20, 2, 0)
    assert hot.macs == 4 * 32 and counts(program.ops).stores == 1


def test_unknown_words_are_not_instructions() -> None:
    assert listing("ARM", AMD, 16).ops == ()
