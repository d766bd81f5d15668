"""What can be said of a config without launching it: does it compile, can the target launch it, what does the model make
of it. Runs in a child process, one config a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fa2tune.compiling import compiler, limits, operandcheck, registry
from fa2tune.gpus import Gpu
from fa2tune.launching import machine_code, ported
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
    binary is of the one for ``gpu``, but for the hash, which is of the code that is launched."""
    result = compile_check(kernel, spec, config, gpu, problems)
    if result.status:
        return result
    try:
        variant = registry.variant_of(kernel, config)
        ported.prepare(variant, spec, config, ported.HOSTS[0])
        digest = machine_code.digest(machine_code.compiled(variant, spec, config, ported.CODE))
    except compiler.CompileError as error:
        return CompileResult("compile_error", str(error), result.binary)
    return replace(result, binary={**result.binary, "binary_hash": digest})


def compile_check(
    kernel: str, spec: Specialization, config: Config, gpu: Gpu, problems: Sequence[Problem] = ()
) -> CompileResult:
    """Compile for ``gpu`` (or take from Triton's cache), apply its limits, predict the time of each problem. What the host is
    to blame for is raised, and no result."""
    try:
        variant = registry.variant_of(kernel, config)
        binary = compiler.build(variant, spec, config, gpu.arch)
        digest = machine_code.digest(machine_code.compiled(variant, spec, config, gpu.arch))
    except compiler.CompileError as error:
        return CompileResult("compile_error", str(error))
    facts: dict[str, int | str] = {
        "registers": binary.registers, "spills": binary.spills, "shared_bytes": binary.shared_bytes,
        "binary_hash": digest,
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
