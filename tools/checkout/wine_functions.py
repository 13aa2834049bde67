"""Functions that Wine 10 lacks. tools/windows.sh installs this file as sitecustomize.

A call of C99's complex functions ends the process, and `import numpy` calls some. Here, x86-64 machine code
replaces these functions. By Microsoft's calling convention, a complex float is in rcx, a complex double at
the address in rcx, and a long double is a double.

CreateSymbolicLinkW succeeds, but makes no link. Here, it needs a privilege, as for most users of Windows.
"""

import ctypes
import os
from typing import Any

FLOAT_REAL = "66 0f 6e c1 c3"  # movd xmm0, ecx; ret
FLOAT_IMAG = "48 c1 e9 20 66 0f 6e c1 c3"  # shr rcx, 32; movd xmm0, ecx; ret
DOUBLE_REAL = "f2 0f 10 01 c3"  # movsd xmm0, [rcx]; ret
DOUBLE_IMAG = "f2 0f 10 41 08 c3"  # movsd xmm0, [rcx + 8]; ret
CODE = {
    "crealf": FLOAT_REAL,
    "cimagf": FLOAT_IMAG,
    "creal": DOUBLE_REAL,
    "cimag": DOUBLE_IMAG,
    "creall": DOUBLE_REAL,
    "cimagl": DOUBLE_IMAG,
}
EXECUTE_READ_WRITE = 0x40
PRIVILEGE_NOT_HELD = 1314


def refuse_link(source: Any, target: Any, *_: Any, **__: Any) -> None:
    raise OSError(22, "A required privilege is not held by the client", source, PRIVILEGE_NOT_HELD, target)


def replace_functions() -> None:
    load: Any = vars(ctypes)["WinDLL"]
    kernel = load("kernel32")
    if not hasattr(load("ntdll"), "wine_get_version"):
        return
    vars(os)["symlink"] = refuse_link
    kernel.GetModuleHandleW.restype = kernel.GetProcAddress.restype = ctypes.c_void_p
    kernel.GetProcAddress.argtypes = ctypes.c_void_p, ctypes.c_char_p
    kernel.VirtualProtect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p
    library, before = kernel.GetModuleHandleW("ucrtbase.dll"), ctypes.c_uint32()
    for name, words in CODE.items():
        code = bytes.fromhex(words)
        if address := kernel.GetProcAddress(library, name.encode()):
            kernel.VirtualProtect(address, len(code), EXECUTE_READ_WRITE, ctypes.byref(before))
            ctypes.memmove(address, code, len(code))
            kernel.VirtualProtect(address, len(code), before, ctypes.byref(before))


if __name__ == "sitecustomize":
    replace_functions()
