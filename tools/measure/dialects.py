"""Parses the assembly of AMD (RADV, LLVM's disassembler), Intel (ANV, DG2 and later) and NVIDIA (NVK) into
ops of assembly.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from vkbackend.tools.measure.assembly import Block, Listing, Op, natural_loops

_LABEL = re.compile(r"^(\w+):")
_AMD_LINE = re.compile(r"^\s+([a-z]\w*)([^;]*)")
_AMD_AGAIN = re.compile(r"^\s+\(then repeated (\d+) times\)")
_AMD_WIDTHS = {
    "b32": 4,
    "b64": 8,
    "b96": 12,
    "b128": 16,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}
_AMD_WIDTHS |= {"u8": 1, "ubyte": 1, "sbyte": 1, "i8": 1, "u16": 2, "ushort": 2, "sshort": 2, "i16": 2}
_AMD_MEMORY = ("buffer_", "global_", "flat_")
_AMD_MACS = (  # multiply-adds per lane
    (re.compile(r"v_dot4"), 4, 2),
    (re.compile(r"v_(dual_)?dot2"), 2, 1),
    (re.compile(r"v_pk_(fma|mad)"), 2, 1),
    (
        re.compile(
            r"v_(dual_)?(fma|fmac|mad|mac|fmamk|fmaak|madmk|madak)(mk|ak|_mix|_mixlo|_mixhi)?_(legacy_)?f"
        ),
        1,
        1,
    ),
)


def _amd(text: str, lanes: int) -> Iterator[str | Op]:
    last: Op | None = None
    for line in text.splitlines():
        if label := _LABEL.match(line):
            yield label[1]
        elif (again := _AMD_AGAIN.match(line)) and last:
            yield from [last] * int(again[1])
        elif match := _AMD_LINE.match(line):
            last = _amd_op(match[1], match[2].strip(), lanes)
            yield last


def _amd_op(name: str, operands: str, lanes: int) -> Op:
    if name.startswith(_AMD_MEMORY):
        width = next((_AMD_WIDTHS[part] for part in reversed(name.split("_")) if part in _AMD_WIDTHS), 4)
        return Op(name, "load" if "load" in name else "store", nbytes=width)
    if name.startswith("scratch_"):
        return Op(name, "load" if "load" in name else "store", nbytes=4)
    if name.startswith("ds_"):
        return Op(name, "shared")
    if name.startswith("v_wmma"):
        m, n, k = map(int, re.findall(r"(\d+)x(\d+)x(\d+)", name)[0])
        return Op(name, "matrix", macs=m * n * k, power=3)
    if name.startswith("v_"):
        macs, power = 0, 0
        for part in (name, *re.findall(r":: (v_\w+)", operands)):  # A dual instruction has two ops.
            for pattern, each, kind in _AMD_MACS:
                if pattern.match(part):
                    macs, power = macs + each * lanes, kind
                    break
        return Op(name, "vector", macs=macs, power=power)
    if name.startswith(("s_waitcnt", "s_wait_")):
        left = re.search(r"vmcnt\((\d+)\)", operands)
        fixed = re.match(r"(0x[0-9a-f]+)", operands) if name == "s_wait_loadcnt" else None
        most = left[1] if left else str(int(fixed[1], 16)) if fixed else ""
        return Op(name, "wait", waits=(f"<{most}",) if most else ())
    if name.startswith("s_barrier"):
        return Op(name, "barrier")
    if name.startswith(("s_branch", "s_cbranch")):
        return Op(name, "branch", target=operands)
    if name.startswith(("s_clause", "s_nop", "s_delay_alu", "s_code_end", "s_endpgm", "s_sendmsg")):
        return Op(name, "none")
    return Op(name, "scalar")


_INTEL_LINE = re.compile(r"^(?:\([^)]*\) )?([a-z]\w*)((?:\.[\w.]+)?)(?: \w+)?\((\d+)\)(.*)")
_INTEL_MESSAGE = re.compile(
    r"^\s+(\w+) MsgDesc: *\( *(\w+)(?:, \w+, d(\d+)\w*, (?:V(\d+)|\w+)(, transpose)?)?"
)
_INTEL_TOKEN = re.compile(r"\$(\d+)(\.dst|\.src)?")


def _intel(text: str, lanes: int) -> Iterator[str | Op]:
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if label := _LABEL.match(line):
            yield label[1]
        elif match := _INTEL_LINE.match(line):
            name, suffix, width, rest = match[1], match[2], int(match[3]), match[4]
            message = (
                _INTEL_MESSAGE.match(lines[i + 1]) if name.startswith("send") and i + 1 < len(lines) else None
            )
            notes = rest + (lines[i + 1] if message else "")
            tokens = _INTEL_TOKEN.findall(notes[notes.rfind("{") :])
            waits = tuple(n for n, kind in tokens if kind == ".dst")
            token = next((n for n, kind in tokens if not kind), "")
            target = re.search(r"JIP: *(\w+)", rest) if name == "while" else None
            yield _intel_op(
                name, suffix, width, rest, lanes, message, token, waits, target[1] if target else ""
            )


def _intel_op(
    name: str,
    suffix: str,
    width: int,
    rest: str,
    lanes: int,
    message: re.Match[str] | None,
    token: str,
    waits: tuple[str, ...],
    target: str,
) -> Op:
    if message:
        unit, action, bits, many, transposed = message.groups()
        nbytes = int(bits or 0) // 8 * int(many or 1)
        if transposed:  # The lanes share one message.
            nbytes = -(-nbytes // lanes)
        kind = (
            {"load": "load", "store": "store"}.get(action, "scalar") if unit in ("ugm", "tgm") else "scalar"
        )
        kind = "shared" if unit == "slm" and action in ("load", "store") else kind
        kind = "barrier" if unit == "gateway" and action == "barrier" else kind
        return Op(name, kind, nbytes=nbytes, token=token, waits=waits)
    if name == "dpas":
        depth, repeat = map(int, re.findall(r"(\d+)x(\d+)", suffix)[0])
        each = 4 if re.search(r"[>)]U?B\b", rest) else 2  # elements packed in 32 bits
        return Op(name, "matrix", macs=depth * each * repeat * width, power=3, waits=waits)
    if name == "sync":
        return Op(name, "wait", waits=waits)
    if name in ("while", "if", "else", "endif", "break", "cont", "jmpi", "halt", "do", "nop"):
        return Op(name, "branch", target=target, waits=waits)
    if width == 1:
        return Op(name, "scalar", waits=waits)
    macs, power = 0, 0
    if name == "dp4a":
        macs, power = 4 * width, 2
    elif name in ("mad", "mac") and re.match(r"\s+\S+<\d+>H?F", rest):
        macs, power = width, 1
    return Op(name, "vector", weight=width / lanes, macs=macs, power=power, waits=waits)


_NV_BLOCK = re.compile(r"^block\S* (\d+) L\d+ \[([\d, ]*)\]")
_NV_LINE = re.compile(r"^(?:@!?\S+)?\s+(?:[^=/]*= )?([a-z]\w*)((?:\.[\w.]+)*)(.*)")
_NV_UNIFORM = re.compile(r"^(?:@!?\S+)?\s+u[rp]\d+[^=]*=")


def _nvidia(text: str, lanes: int) -> Iterator[Block | Op]:
    for line in text.splitlines():
        if block := _NV_BLOCK.match(line):
            yield Block(int(block[1]), tuple(int(i) for i in block[2].split(",") if i.strip()))
        elif (match := _NV_LINE.match(line)) and not line.startswith(("block", "}")):
            yield _nvidia_op(match[1], match[2], line, lanes)


def _nvidia_op(name: str, suffix: str, line: str, lanes: int) -> Op:
    mask = re.search(r"wt=([01]+)", line)
    waits = tuple(str(i) for i, bit in enumerate(reversed(mask[1] if mask else "")) if bit == "1")
    signal = re.search(r"wr:(\d+)", line)
    if name in ("ld", "ldg", "st", "stg"):
        if "shared" in suffix:
            return Op(name, "shared", waits=waits)
        bits = re.search(r"\.[bui](\d+)", suffix)
        kind = "load" if name.startswith("ld") else "store"
        return Op(
            name,
            kind,
            nbytes=int(bits[1]) // 8 if bits else 4,
            token=signal[1] if signal else "",
            waits=waits,
        )
    if name in ("lds", "sts", "ldsm", "atoms"):
        return Op(name, "shared", waits=waits)
    if name in ("hmma", "imma"):
        m, n, k = map(int, re.findall(r"m(\d+)n(\d+)k(\d+)", suffix)[0])
        return Op(name, "matrix", macs=m * n * k, power=3, waits=waits)
    if name in ("bra", "brx", "exit", "bssy", "bsync", "bclear", "nop", "warpsync"):
        return Op(name, "branch", waits=waits)
    if name == "bar":
        return Op(name, "barrier", waits=waits)
    if _NV_UNIFORM.match(line) or name in ("ldc", "membar", "cctl"):
        return Op(name, "scalar", waits=waits)
    macs, power = {"idp4": (4, 2), "ffma": (1, 1), "hfma2": (2, 1)}.get(name, (0, 0))
    return Op(name, "vector", macs=macs * lanes, power=power, waits=waits)


_DIALECTS: dict[str, Callable[[str, int], Iterator[str | Block | Op]]] = {
    "AMD": _amd,
    "Intel": _intel,
    "NVIDIA": _nvidia,
}


def listing(vendor: str, text: str, lanes: int) -> Listing:
    """Return a kernel's instructions for subgroups of `lanes`. The listing is empty for an unknown vendor."""
    read = _DIALECTS.get(vendor)
    ops: list[Op] = []
    labels: dict[str, int] = {}
    blocks: list[Block] = []
    loops: list[Sequence[int]] = []
    for item in read(text, lanes) if read else ():
        if isinstance(item, str):
            labels[item] = len(ops)
        elif isinstance(item, Block):
            blocks.append(replace(item, start=len(ops)))
        else:
            ops.append(item)
    for i, op in enumerate(ops):
        if op.target and not blocks and labels.get(op.target, len(ops)) <= i:
            loops.append(range(labels[op.target], i + 1))
    return Listing(tuple(ops), tuple(loops) + tuple(natural_loops(blocks, len(ops))))
