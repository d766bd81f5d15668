"""Whether Triton is asked for machine code out of the ordinary: then no binary from a file stands for what it compiles."""

from __future__ import annotations

import os
import sys

#: How the variables begin by which Triton and its LLVM compile otherwise.
TRITONS = (
    "TRITON_", "ALLOW_LHS_", "DISABLE_LLVM_OPT", "DISABLE_MMA_", "DISABLE_PTXAS_OPT", "LLVM_ENABLE_TIMING", "LLVM_IR_ENABLE_",
    "LLVM_PASS_PLUGIN_PATH", "MLIR_DUMP_PATH", "MLIR_ENABLE_", "NVPTX_ENABLE_", "PTXAS_OPTIONS", "USE_IR_LOC",
)  # fmt: skip
#: Of them, those that change no instruction, or name another assembler for the same program.
HARMLESS = {f"TRITON_{name}" for name in (
    "CACHE_DIR", "CACHE_MANAGER", "CUDACRT_PATH", "CUDART_PATH", "CUOBJDUMP_PATH", "CUPTI_INCLUDE_PATH", "CUPTI_LIB_PATH",
    "DISABLE_LINE_INFO", "DUMP_DIR", "HOME", "INTERPRET", "LIBCUDA_PATH", "LIBDEVICE_PATH", "NVDISASM_PATH", "OVERRIDE_DIR",
    "PRINT_AUTOTUNING", "PTXAS_BLACKWELL_PATH", "PTXAS_PATH", "REPRODUCER_PATH", "STORE_BINARY_ONLY",
)}  # fmt: skip


#: What a program may ask of Triton that changes what it compiles, by group.
KNOBS = {
    "compilation": ("always_compile", "override", "instrumentation_mode", "enable_asan"),
    "nvidia": ("disable_ptxas_opt", "ptxas_options"),
}


def found() -> str | None:
    """Why binaries are left aside, where Triton is asked for something out of the ordinary. By the names of its variables,
    since it may not be imported yet: one that is not known here counts."""
    named = [name for name in os.environ if name.startswith(TRITONS) and name not in HARMLESS]
    found = [f"{name} is set" for name in sorted(named) if os.environ[name] not in ("", "0")]
    knobs = sys.modules.get("triton.knobs")
    for group, names in KNOBS.items():
        for name in names:
            if getattr(getattr(knobs, group, None), name, None) and not found:
                found.append(f"Triton is asked for {name}")
    return ", ".join(found) or None
