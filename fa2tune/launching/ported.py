"""Runs the code of GPUs without wgmma on a Hopper GPU: their PTX, assembled for it.

The instructions are those of an A100: mma.sync and cp.async, the same barriers, the same traffic through shared memory. What
ptxas makes of them, clocks, the rates of mma.sync and float32, L2 and memory are this GPU's. docs/a100.md says what that means
for a time.

A process runs either its GPU's own code or this, so ``begin`` is for processes of their own.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fa2tune.compiling import compiler
from fa2tune.gpus import Gpu
from fa2tune.launching.image import Image
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import Variant

#: Compute capability whose code stands for that of every GPU without wgmma: 8.0 to 8.9 and 12.x. They differ in shared memory,
#: which is a matter of configs, and the kernels use nothing that 8.0 lacks.
CODE = 80
#: Compute capabilities of GPUs that it was tried on.
HOSTS = (90,)
RESERVED = 1024  #: bytes of shared memory that the system takes for each block

_running = 0
_for: Gpu | None = None
_crowding = True


def can_stand_for(arch: int, here: int) -> bool:
    """Whether a GPU of compute capability ``here`` can run the code of one of ``arch``."""
    return here in HOSTS and (80 <= arch < 90 or 120 <= arch < 130)


def begin(gpu: Gpu | None = None, crowd: bool = True) -> None:
    """From now on every kernel that this process compiles and loads is ``CODE``'s. ``gpu``: whose rows, defaults and limits its
    calls of ``fa2tune.attention`` get, and, with ``crowd``, how many blocks a multiprocessor holds (``crowded``). Before the
    first kernel is loaded."""
    global _running, _for, _crowding
    _running, _for, _crowding = CODE, gpu, crowd


def running() -> int:
    """The compute capability whose code runs in place of the GPU's own; 0: its own does."""
    return _running


def crowding() -> bool:
    """Whether kernels ask for as much shared memory as ``crowded`` has it."""
    return _crowding


def running_for() -> Gpu | None:
    """The GPU whose rows calls get in place of those of the GPU that is here; None: they get these."""
    return _for


@cache
def _assembler() -> str:
    """Version of ptxas, as it says it."""
    command = [compiler.tool("ptxas"), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assembled(compiled: Any, here: int) -> bytes:
    """The cubin for compute capability ``here`` of what Triton compiled for an older one, kept in Triton's cache. CompileError:
    ptxas refuses it."""
    from triton.runtime.cache import get_cache_manager

    ptx = compiled.asm["ptx"]
    kept = get_cache_manager(hashlib.sha256(f"{_assembler()} sm_{here} {ptx}".encode()).hexdigest())
    if (known := kept.get_file("ported.cubin")) is not None:
        return Path(known).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [compiler.tool("ptxas"), f"--gpu-name=sm_{here}", str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode < 0:
            raise compiler.HostTrouble(f"ptxas was killed by signal {-done.returncode}")
        if done.returncode:
            reason = (done.stderr or done.stdout).strip().partition("\n")[0]
            raise compiler.CompileError(f"ptxas refuses the PTX of sm_{CODE} for sm_{here}: {reason}"[:300])
        code = cubin.read_bytes()
    kept.put(code, "ported.cubin", binary=True)
    return code


def crowded(image: Image, other: Gpu, here: Gpu) -> Image:
    """The same kernel, asking for so much shared memory that a multiprocessor of ``here`` holds no more blocks than one of
    ``other``, by shared memory and warps."""
    blocks = max(1, min(other.shared_per_sm // (image.shared + RESERVED), other.warps_per_sm // image.warps))
    room = min(here.shared_per_sm // blocks - RESERVED, here.shared_per_block)
    return replace(image, shared=max(image.shared, room))


def prepare(variant: Variant, spec: Specialization, config: Config, here: int) -> None:
    """Compile and assemble a config's kernel, and those around it, so that another process finds them in Triton's cache.
    Needs no GPU. CompileError: one of them does not compile."""
    before, after = compiler.around(variant, spec, config, CODE)
    for one, its_config in (*before, (variant, config), *after):
        assembled(compiler.compile_kernel(one, spec, compiler.binary_config(one, its_config), CODE), here)
