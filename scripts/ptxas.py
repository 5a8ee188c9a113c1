"""Reads the output of `nvcc -Xptxas -v` and prints the registers and memory of each kernel per thread on each GPU architecture. A kernel that uses
local memory (a stack frame, or spilled registers) fails, because local memory is device memory, and its loads would stall the innermost loops. A
kernel also fails if ptxas has serialised or fenced its wgmma instructions (remarks C7510 to C7519) or ignored setmaxnreg (C7508); the source shows
neither.

    scripts/ptxas.py LOG...     `make ptxas` writes the logs

The last line is "N passed, M failed", with a test per architecture. Kernels get their shared memory at the launch, so ptxas reports only memory
that a kernel declares against that rule (`static`).
"""

import re
import subprocess
import sys
from collections import namedtuple

Use = namedtuple("Use", "registers static_shared stack stores loads")


def read(text):
    """Returns {(mangled kernel, architecture): Use}. Functions that a kernel calls without inlining count as its own."""
    kernels = {}
    for block in re.split(r"Compiling entry function ", text)[1:]:
        name, arch = re.match(r"'(\S+)' for '(\S+)'", block).groups()
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block)
        stack, stores, loads = (sum(map(int, column)) for column in zip(*frames))
        shared = re.search(r"(\d+) bytes smem", block)
        kernels[name, arch] = Use(int(re.search(r"Used (\d+) registers", block)[1]), int(shared[1]) if shared else 0, stack, stores, loads)
    return kernels


FIXES = {"C7508": "__launch_bounds__ with the number of blocks, so that ptxas knows the registers at the kernel's entry",
         "C751": "wgmma_fence() after each register access and each loop, and no access before wgmma_wait()"}


def remarks(text):
    """Returns (architecture, remark of ptxas, fix) tuples. A remark precedes its kernel's report; C7508 does not name the kernel."""
    found = []
    for remark in re.finditer(r"\((C7508|C751)\d?\) .*", text):
        kernel = re.search(r" in function '(\S+?)'", remark[0])
        report = re.search(rf"Compiling entry function '{re.escape(kernel[1]) if kernel else '.*'}' for '(\S+)'", text[remark.end():])
        found.append((report[1] if report else "sm_90a", remark[0], FIXES[remark[1]]))
    return found


def demangled(names):
    """ "_ZN3gpu11rope_kernelI4bf16EEvPT_" -> "rope_kernel<bf16>" """
    out = subprocess.run(["c++filt", "-p"], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(zip(names, out.replace("gpu::", "").splitlines()))


def describe(use):
    if use is None:
        return "-"
    extra = [("static", use.static_shared), ("stack", use.stack), ("stored", use.stores), ("loaded", use.loads)]
    return " ".join([str(use.registers)] + [f"{name} {bytes}" for name, bytes in extra if bytes])


def main(logs):
    kernels = {}
    for log in logs:
        kernels |= read(open(log).read())
    archs = sorted({arch for _, arch in kernels}, key=lambda arch: int(re.search(r"\d+", arch)[0]))
    names = demangled(sorted({name for name, _ in kernels}))
    rows = [["registers", *archs]]
    rows += sorted([shown, *[describe(kernels.get((name, arch))) for arch in archs]] for name, shown in names.items())
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())

    failed = set()
    for (name, arch), use in sorted(kernels.items()):
        if use.stack or use.stores or use.loads:
            failed.add(arch)
            print(f"FAILED: {names[name]} for {arch}: {use.stack} bytes of stack, {use.stores} of spilled registers stored, {use.loads} loaded\n"
                  "  fix: use smaller tiles, or arrays whose indices the compiler knows (#pragma unroll)")
    for log in logs:
        for arch, remark, fix in remarks(open(log).read()):
            failed.add(arch)
            print(f"FAILED: {remark}\n  fix: {fix}")
    if not kernels:
        print("FAILED: no kernels in", " ".join(logs) or "no logs")
    print(f"{len(archs) - len(failed)} passed, {len(failed) or not kernels:d} failed")
    return bool(failed) or not kernels


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
