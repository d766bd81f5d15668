"""What can be said of a config without launching it: does it compile, can the target launch it, what does the model make
of it. Runs in a child process, one config a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fa2tune.compiling import astray, compiler, limits
from fa2tune.gpus import Gpu
from fa2tune.predicting import model
from fa2tune.problem import Config, Problem, Specialization


@dataclass(frozen=True)
class Verdict:
    """``fate`` "" : it may be launched; else a short word to count, and ``why`` in full."""

    fate: str = ""
    why: str = ""
    binary: dict[str, int] = field(default_factory=dict)  #: registers, spills, shared_bytes
    predicted_us: tuple[float, ...] = ()  #: one per problem asked about


def judge(kernel: str, spec: Specialization, config: Config, gpu: Gpu, problems: Sequence[Problem] = ()) -> Verdict:
    """Compile for ``gpu`` (or take from Triton's cache), apply its limits, predict the time of each problem. What the host is
    to blame for is raised, and no verdict."""
    try:
        variant = compiler.variant_of(kernel, config)
        binary = compiler.build(variant, spec, config, gpu.arch)
        for kernels in compiler.around(variant, spec, config, gpu.arch):
            for one, its_config in kernels:
                compiler.compile_kernel(one, spec, its_config, gpu.arch)
    except compiler.CompileError as error:
        return Verdict("compile_error", str(error))
    facts = {"registers": binary.registers, "spills": binary.spills, "shared_bytes": binary.shared_bytes}
    refusal = limits.after_compile(binary, gpu)
    if refusal is not None:
        return Verdict(refusal.name, refusal.why, facts)
    if lost := astray.of(binary):
        return Verdict("miscompiled", f"on some path the compiler forgot where an operand lies: {lost[0]}", facts)
    return Verdict(binary=facts, predicted_us=tuple(model.predict(binary, problem, gpu) * 1e6 for problem in problems))
