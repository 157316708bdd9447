"""Compiles CUDA C++ to PTX with NVRTC: nvrtc.py LIBRARY SOURCE OPTION..., PTX on standard output."""

import ctypes
import sys

library, source, *options = sys.argv[1:]
nvrtc = ctypes.CDLL(library)


def check(code, program=None):
    if code == 0:
        return
    if program is not None:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        sys.stderr.write(log.value.decode())
    sys.exit(f"NVRTC answered {code}")


with open(source, "rb") as file:
    text = file.read()
program = ctypes.c_void_p()
check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None))
array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
check(nvrtc.nvrtcCompileProgram(program, len(options), array), program)
size = ctypes.c_size_t()
check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
ptx = ctypes.create_string_buffer(size.value)
check(nvrtc.nvrtcGetPTX(program, ptx))
sys.stdout.write(ptx.value.decode())
