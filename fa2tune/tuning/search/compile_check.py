"""What can be said of a config without launching it: does it compile, can the target launch it, what does the model make
of it. Runs in a child process, one config a job."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fa2tune.compiling import compiler, limits, operandcheck, registry
from fa2tune.gpus import Gpu
from fa2tune.launching import ported
from fa2tune.predicting import model
from fa2tune.spec.problem import Config, Problem, Specialization


@dataclass(frozen=True)
class CompileResult:
    """``status`` "" : it may be launched; else a short word to count, and ``why`` in full."""

    status: str = ""
    why: str = ""
    binary: dict[str, int | str] = field(default_factory=dict)  #: registers, spills, shared_bytes, binary_hash
    predicted_us: tuple[float, ...] = ()  #: one per problem asked about


def compile_check_ported(
    kernel: str, spec: Specialization, config: Config, gpu: Gpu, problems: Sequence[Problem] = ()
) -> CompileResult:
    """The same where another GPU runs the code of ``gpu``: what it launches is compiled, too. What the result says of the
    binary is of the one for ``gpu``."""
    result = compile_check(kernel, spec, config, gpu, problems)
    if result.status:
        return result
    try:
        ported.prepare(registry.variant_of(kernel, config), spec, config, ported.HOSTS[0])
    except compiler.CompileError as error:
        return CompileResult("compile_error", str(error), result.binary)
    return result


def compile_check(
    kernel: str, spec: Specialization, config: Config, gpu: Gpu, problems: Sequence[Problem] = ()
) -> CompileResult:
    """Compile for ``gpu`` (or take from Triton's cache), apply its limits, predict the time of each problem. What the host is
    to blame for is raised, and no result."""
    try:
        variant = registry.variant_of(kernel, config)
        binary = compiler.build(variant, spec, config, gpu.arch)
        for kernels in compiler.around(variant, spec, config, gpu.arch):
            for one, its_config in kernels:
                compiler.compile_kernel(one, spec, its_config, gpu.arch)
    except compiler.CompileError as error:
        return CompileResult("compile_error", str(error))
    facts: dict[str, int | str] = {
        "registers": binary.registers, "spills": binary.spills, "shared_bytes": binary.shared_bytes,
        "binary_hash": hashlib.sha256(Path(binary.cubin_path).read_bytes()).hexdigest(),
    }  # fmt: skip
    refusal = limits.after_compile(binary, gpu)
    if refusal is not None:
        return CompileResult(refusal.name, refusal.why, facts)
    if unsound := operandcheck.check(binary):
        return CompileResult(
            "miscompiled",
            f"an operand is not where the instruction reads it, on some path: {unsound[0]}",
            facts,
        )
    return CompileResult(
        binary=facts, predicted_us=tuple(model.predict(binary, problem, gpu) * 1e6 for problem in problems)
    )
