"""Proves the packed Hopper kernels on a GPU, case by case, each in a process of its own.

    python benchmarks/packed_proof.py [--only REGEX] [--jobs 4] [--seconds 40]
    python benchmarks/packed_proof.py --compile [--rows]

Every case prints PASS, WRONG, STRAY, FAULT, HANG or ERROR, and the next one runs whatever became of it. The first case, the
smallest with grouped heads, runs alone. A case calls kernels by explicit config, once for each
way in which its tensors can lie (benchmarks/guarded_memory.py). Results are held against float64 by the error rule of
fa2tune/measuring/verify.py, large ones against what serves a call that is not deterministic. Gradients of the split
backward are computed twice and have to be the same bits. A case that faults runs again with CUDA_LAUNCH_BLOCKING=1, which names
the kernel.

Binaries are compiled before, by as many processes as there are cores, and the operands of each are checked
(fa2tune/compiling/operandcheck.py). --compile does only that, without a GPU; --rows for what shipped rows serve packed calls
by.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from guarded_memory import STAGES, Memory, Stray
from packed import documents

import fa2tune
from fa2tune import gpus
from fa2tune.compiling import compiler, limits, operandcheck, registry
from fa2tune.launching import passes
from fa2tune.measuring import reference, verify
from fa2tune.measuring.reference import DTYPE_OF_NAME
from fa2tune.rows import reader
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import FUSED, SPLIT, STRATEGIES, Problem, Specialization
from fa2tune.spec.variant import WARP_SPECIALIZED, Variant

#: Rows of q and of k.
PACKINGS: dict[str, tuple[tuple[int, int], ...]] = {
    "equal": tuple((n, n) for n in (1, 0, 63, 64, 65, 127, 128, 129, 1000, 0, 513)),
    "unequal": ((5, 900), (0, 40), (700, 300), (129, 0), (64, 64), (1, 2000), (65, 63)),
    "many": tuple((1 + n % 37, 1 + n % 41) for n in range(300)),
    "53 documents": tuple((n, n) for n in documents(53, 32768, 3756)),
    "4 of 4096": ((4096, 4096),) * 4,
}
LARGE = ("53 documents", "4 of 4096")
SPARE = 70  #: rows behind the last sequence
SCALE = 0.11
MASKS = {"causal": CAUSAL, "full": FULL, "window": band(65, 300), "left": band(128, 0), "chunked": Mask("chunked", 200)}
OUTCOMES = ("PASS", "WRONG", "STRAY", "FAULT", "ERROR")
CACHE, ROWS = Path(__file__).parent.parent / "cache", ("h200.sqlite", "h100.sqlite")

TOGETHER = {"ORDER": "together"}
CONCATENATED = {**TOGETHER, "BLOCK_M": 64, "num_warps": 8, "EXPONENTIALS_FIRST": False}
FINISHED = {"BESIDE": True, "FINISH_BESIDE": True}
ONE_GROUP = {
    "BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3, "PINGPONG": False, "NUMBERED": False, "maxnreg": 80, "Q_IN_REGISTERS": True,
}  # fmt: skip


#: Kernel's file, specialization, config.
Binary = tuple[str, Specialization, dict[str, Any]]


def _hopper(kernel: str) -> Variant:
    return registry.variant_named(f"sm90/{kernel}")


@dataclass(frozen=True)
class Case:
    name: str
    heads: tuple[int, int]
    dims: tuple[int, int] = (128, 128)
    dtype: str = "bf16"
    masks: tuple[str, ...] = ("causal",)
    settings: dict[str, Any] = field(default_factory=dict)  #: where they differ from the default config
    packings: tuple[str, ...] = ("unequal", "equal", "many")

    @property
    def forward(self) -> bool:
        return self.name.startswith("forward")

    @property
    def strategy(self) -> str:
        """Of a backward."""
        return SPLIT if self.name.startswith("split") else FUSED

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("fwd",) if self.forward else STRATEGIES[self.strategy]

    def configs(self, spec: Specialization) -> dict[str, dict[str, Any]]:
        """By kernel. ValueError: no such form."""
        found = {}
        for kernel in self.kernels:
            variant = _hopper(kernel)
            own = {name: value for name, value in self.settings.items() if name in variant.space.dimensions}
            packed = bwd_fused.PACKED if kernel == "bwd_fused" else {}
            found[kernel] = {**variant.space.default(spec, 90), **packed, **own}
            if broken := variant.space.broken(found[kernel], spec, 90):
                raise ValueError(f"{self.name}: {broken.why}")
        return found

    def binaries(self) -> Iterator[Binary]:
        """Those of each mask, and of what runs around them."""
        for mask in self.masks:
            spec = Specialization(self.dtype, *self.dims, MASKS[mask].name, extent=RAGGED)
            for kernel, config in self.configs(spec).items():
                variant = _hopper(kernel)
                before, after = compiler.around(variant, spec, config, 90)
                yield from ((one.name, spec, its_config) for one, its_config in ((variant, config), *before, *after))


SECOND_Q, SMALLER = {"Q_STAGES": 2}, {"BLOCK_M": 128, "Q_STAGES": 2}
IN_REGISTERS = {**SECOND_Q, "Q_IN_REGISTERS": True, "NUMBERED": False}
BY_TMA, FROM_REGISTERS = {"REDUCE": "tma"}, {"REDUCE": "vector"}
AHEAD = {**FROM_REGISTERS, "ORDER": "ahead", "EXPONENTIALS_FIRST": False}
DOCUMENTS, SQUARES = ("53 documents",), ("4 of 4096",)
BOTH, WINDOWS = ("causal", "full"), ("window", "left", "chunked")
CASES = (
    Case("forward, grouped", (8, 1), packings=("unequal",)),
    Case("backward, grouped", (8, 1), packings=("unequal",)),
    Case("forward, not grouped", (4, 4), masks=BOTH),
    Case("forward, a second Q", (12, 4), settings=SECOND_Q, masks=BOTH),
    Case("forward, a second Q in registers", (12, 4), settings=IN_REGISTERS),
    Case("forward, windows", (4, 2), masks=WINDOWS),
    Case("forward, fp16, 64, three groups", (6, 2), (64, 64), "fp16"),
    Case("forward, fp16, 64, a second Q", (6, 2), (64, 64), "fp16", settings=SMALLER),
    Case("forward, 64, one group", (6, 2), (64, 64), settings=ONE_GROUP),
    Case("forward, 256", (2, 1), (256, 256)),
    Case("forward, 192 and 128", (2, 1), (192, 128), masks=("full",)),
    Case("forward, 96", (2, 1), (96, 96)),
    Case("forward, large", (32, 8), packings=DOCUMENTS),
    Case("forward, large, 64, a second Q", (32, 32), (64, 64), settings=SMALLER, packings=SQUARES),
    Case("backward, not grouped", (4, 4), masks=BOTH),
    Case("backward, 64", (4, 2), (64, 64), masks=BOTH),
    Case("backward, fp16, 80", (4, 2), (80, 80), "fp16"),
    Case("backward, windows", (4, 2), masks=WINDOWS),
    Case("backward, from registers", (4, 2), settings=FROM_REGISTERS),
    Case("backward, together, by TMA", (4, 2), settings={**TOGETHER, **BY_TMA}),
    Case("backward, 64, scores ahead", (4, 2), (64, 64), settings=AHEAD),
    Case("backward, concatenated", (4, 2), settings={**CONCATENATED, **BY_TMA}),
    Case("backward, 64, concatenated", (4, 2), (64, 64), settings={**CONCATENATED, **FROM_REGISTERS}),
    Case("backward, prepared beside", (8, 2), settings={"BESIDE": True}),
    Case("backward, and finished", (8, 2), settings={**TOGETHER, **FINISHED, **BY_TMA}),
    Case("backward, concatenated, and finished", (4, 2), settings={**CONCATENATED, **FINISHED, **FROM_REGISTERS}),
    Case("backward, large", (32, 8), packings=DOCUMENTS),
    Case("split, grouped", (8, 1), packings=("unequal",)),
    Case("split, 256", (4, 2), (256, 256), masks=BOTH),
    Case("split, 256, windows", (2, 1), (256, 256), masks=WINDOWS),
    Case("split, not grouped", (4, 4), masks=BOTH),
    Case("split, windows", (4, 2), masks=WINDOWS),
    Case("split, fp16, 64", (6, 2), (64, 64), "fp16", masks=BOTH),
    Case("split, 192 in two parts", (4, 2), (192, 192)),
    Case("split, 192 and 128", (2, 1), (192, 128), masks=("full",)),
    Case("split, fp16, 256, one head a wave", (8, 2), (256, 256), "fp16", settings={"HEADS_PER_WAVE": 1}),
    Case("split, large", (32, 8), packings=DOCUMENTS),
    Case("backward, large, and finished", (32, 8), settings={**TOGETHER, **FINISHED, **BY_TMA}, packings=DOCUMENTS),
)


def packed_rows(total: int, heads: int, dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """(1, heads, total, dim) of random numbers, [total, heads, dim] in memory."""
    return torch.randn(total, heads, dim, device=device).to(dtype).transpose(0, 1)[None]


def spans(lengths: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    """Rows of q and of k of each sequence."""
    first, begin = 0, 0
    for queries, keys in lengths:
        yield slice(first, first + queries), slice(begin, begin + keys)
        first, begin = first + queries, begin + keys


class Call:
    """One case with one mask and packing: its inputs, what is right, and how it is run."""

    def __init__(self, case: Case, mask: str, packing: str, device: str = "cuda") -> None:
        self.case, self.mask, self.device, self.packing = case, MASKS[mask], device, packing
        self.lengths, dtype = PACKINGS[packing], DTYPE_OF_NAME[case.dtype]
        torch.manual_seed(0)
        totals = [sum(side) for side in zip(*self.lengths, strict=True)]
        self.used = dict(zip(("o", "lse", "dq", "dk", "dv"), (totals[0],) * 3 + (totals[1],) * 2, strict=True))
        sides = {"q": (0, 0, 0), "k": (1, 1, 0), "v": (1, 1, 1), "do": (0, 0, 1)}
        self.inputs = {
            name: packed_rows(totals[side] + SPARE, case.heads[head], case.dims[dim], dtype, device)
            for name, (side, head, dim) in sides.items()
        }
        self.starts = [
            torch.tensor([0, *side]).cumsum(0).to(device, torch.int32) for side in zip(*self.lengths, strict=True)
        ]
        self.right, self.same = self._references()
        for name, (side, _, _) in sides.items():
            self.inputs[name][:, :, totals[side] :] = float("nan")

    def _references(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """By float64, and in the case's dtype, sequence after sequence; large ones by the portable kernels."""
        if self.packing in LARGE:
            rows = [self.inputs[name][0].transpose(0, 1).detach().requires_grad_() for name in "qkv"]
            settings = {"mask": self.mask, "softmax_scale": SCALE, "return_lse": True}
            o, lse = fa2tune.attention_varlen(*rows, *self.starts, **settings)  # type: ignore[call-overload]
            found = {"o": o.detach().transpose(0, 1)[None], "lse": lse.detach()[None]}
            if not self.case.forward:
                gradients = torch.autograd.grad(o, rows, self.inputs["do"][0].transpose(0, 1))
                found |= {f"d{n}": g.transpose(0, 1)[None] for n, g in zip("qkv", gradients, strict=True)}
            return found, found
        parts = []
        for of_q, of_k in spans(self.lengths):
            side = {"q": of_q, "k": of_k, "v": of_k, "do": of_q}
            one = reference.Inputs(**{name: tensor[:, :, side[name]] for name, tensor in self.inputs.items()})
            parts.append(
                reference.oracle_and_reference(
                    one, mask=self.mask, softmax_scale=SCALE, gradients=not self.case.forward
                )
            )
        oracle, same = ({name: torch.cat([part[n][name] for part in parts], 2) for name in parts[0][n]} for n in (0, 1))
        return oracle, same

    def run(self, stage: str) -> None:
        """AssertionError, ArithmeticError: what is wrong."""
        memory = Memory(stage, self.device)
        given = {name: memory.like(name, tensor) for name, tensor in self.inputs.items()}
        starts = [memory.like(f"cu_seqlens_{side}", tensor) for side, tensor in zip("qk", self.starts, strict=True)]
        run = self._forward if self.case.forward else self._backward
        found = run(given, starts, memory)
        for name, tensor in found.items():
            tail = tensor[:, :, self.used[name] :]
            if not (tail == (-torch.inf if name == "lse" else 0)).all():
                raise AssertionError(f"{name} behind the last sequence")
        found = {name: tensor[:, :, : self.used[name]] for name, tensor in found.items()}
        if self.packing in LARGE:
            for name, tensor in found.items():
                right = self.right[name][:, :, : self.used[name]].float()
                torch.testing.assert_close(
                    tensor.float(), right, atol=0.02 * max(1.0, float(right.abs().max())), rtol=0.02
                )
        else:
            verify.compare(found, self.right, self.same)
        memory.check()
        memory.close()

    def _described(self, given: dict[str, torch.Tensor], **gradient: torch.Tensor) -> Any:
        tensors = (given[name] for name in "qkv")
        return passes.describe(*tensors, self.mask, SCALE, extent=Extent(RAGGED, len(self.lengths)), **gradient)

    def _placed(self, memory: Memory, names: Sequence[str], fresh: passes.Fresh) -> list[torch.Tensor]:
        made = [
            memory.tensor(names[n] if n < len(names) else "the workspaces", *layout)
            for n, layout in enumerate(fresh.layouts)
        ]
        memory.ready()
        return made

    def _forward(self, given: Any, starts: Any, memory: Memory) -> dict[str, torch.Tensor]:
        problem = self._described(given)
        config = self.case.configs(problem.specialization)["fwd"]
        tensors = [given[name] for name in "qkv"]
        plan = passes.ForwardPlan(problem, *tensors, SCALE, config)
        o, lse, *block = self._placed(memory, ("o", "lse"), plan.fresh)
        plan.chain((*tensors, o, lse, *starts, *block))
        _synchronize(self.device)
        return {"o": passes.in_one_batch(o), "lse": lse}

    def _backward(self, given: Any, starts: Any, memory: Memory) -> dict[str, torch.Tensor]:
        dtype = DTYPE_OF_NAME[self.case.dtype]
        o = torch.zeros_like(given["do"])
        lse = torch.full(given["q"].shape[:3], -torch.inf, device=self.device)
        o[:, :, : self.used["o"]] = self.right["o"][:, :, : self.used["o"]].to(dtype)
        lse[:, :, : self.used["o"]] = self.right["lse"][:, :, : self.used["o"]].float()
        given = {**given, "o": memory.like("o", o), "lse": memory.like("lse", lse)}
        problem = self._described(given, o=given["o"], do=given["do"])
        configs = self.case.configs(problem.specialization)
        q, k, v, o, do = (given[name] for name in ("q", "k", "v", "o", "do"))
        plan = passes.BackwardPlan(problem, do, None, q, k, v, o, SCALE, self.case.strategy, configs)
        dq, dk, dv, *block = self._placed(memory, ("dq", "dk", "dv"), plan.fresh)
        found = {"dq": dq, "dk": dk, "dv": dv}
        plan.kernels((q, k, v, o, do, given["lse"], dq, dk, dv, *starts, *block))
        _synchronize(self.device)
        if self.case.strategy == SPLIT:
            once = {name: tensor.clone() for name, tensor in found.items()}
            plan.kernels((q, k, v, o, do, given["lse"], dq, dk, dv, *starts, *block))
            _synchronize(self.device)
            if other := [name for name, tensor in found.items() if not torch.equal(tensor, once[name])]:
                raise AssertionError(f"{', '.join(other)} differ from one run to the next")
        return found


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def child(case: Case, device: str = "cuda") -> str:
    """Runs a case; a line of what became of it. Prints each step before it, for a process that does not come back."""
    done = 0
    for packing in case.packings:
        for mask in case.masks:
            call = Call(case, mask, packing, device)
            for stage in STAGES:
                print(f"at {packing}, {mask}, {stage}", flush=True)
                try:
                    call.run(stage)
                except Stray as error:
                    return f"STRAY {error}"
                except (AssertionError, ArithmeticError) as error:
                    return f"WRONG {' '.join(str(error).split())[:200]}"
                except Exception as error:
                    said = " ".join(str(error).split())[:200]
                    kind = "FAULT" if re.search(r"illegal|misaligned|CUDA error|launch fail", said) else "ERROR"
                    return f"{kind} {type(error).__name__}: {said}"
                done += 1
    return f"PASS {done} runs"


def one(name: str, seconds: float, blocking: bool = False, command: Sequence[str] = ()) -> tuple[str, float]:
    """A case in a process of its own: (what became of it, and where; seconds)."""
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": str(int(blocking))}
    began = time.monotonic()
    asked = command or (sys.executable, __file__, "--child", name)
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        said, _ = process.communicate(timeout=seconds)
        results = [line for line in said.splitlines() if line.partition(" ")[0] in OUTCOMES]
        last = (said.strip().splitlines() or ["nothing said"])[-1]
        result = results[-1] if results else f"ERROR exit {process.returncode}: {last[:200]}"
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        result = f"HANG after {seconds:.0f} s"
    steps = [line[3:] for line in said.splitlines() if line.startswith("at ")]
    if not result.startswith("PASS") and steps:
        result += f" [{steps[-1]}]"
    return result, time.monotonic() - began


def report(name: str, seconds: float, run: Callable[..., tuple[str, float]] = one) -> bool:
    """Runs a case, once more where it faults, and prints what became of it; whether it passed."""
    result, took = run(name, seconds)
    if result.startswith("FAULT"):
        again, more = run(name, seconds, True)
        result, took = f"{result}; blocking: {again}", took + more
    click.echo(f"{result.partition(' ')[0]:5} {name}: {result.partition(' ')[2]}, {took:.1f} s")
    return result.startswith("PASS")


def compiled(asked: Binary) -> str:
    """Why a binary is not to be launched, "" for none."""
    name, spec, config = asked
    variant = registry.variant_named(name)
    try:
        binary = compiler.build(variant, spec, compiler.binary_config(variant, config), 90)
    except compiler.CompileError as error:
        return str(error)
    return "; ".join(map(str, operandcheck.check(binary)))


def of_rows() -> Iterator[Binary]:
    """Those of packed calls that shipped rows would serve."""
    gpu = gpus.named("h200")
    served = {"causal": ("causal", "window", "left", "chunked"), "full": ("full", "window")}
    for row in (row for name in ROWS for row in reader.read(CACHE / name)):
        if row.key.kernel not in ("fwd", "bwd_fused", "bwd_dq", "bwd_dkdv") or row.implementation != WARP_SPECIALIZED:
            continue
        variant, config = registry.fitting(row.key.kernel, row.implementation, row.config)
        for mask in served[row.key.mask]:
            dims = row.key.head_dim, row.key.head_dim_v
            asked = Problem(row.key.dtype, 1, 16, 4, 16384, 16384, *dims, MASKS[mask], extent=Extent(RAGGED, 16))
            spec, ours = asked.specialization, dict(variant.suited(asked, config))
            if limits.before_compile(variant, spec, ours, gpu) is None:
                yield variant.name, spec, compiler.binary_config(variant, ours)


def compile_all(found: Iterable[Binary]) -> None:
    """Into Triton's cache, where each case finds them."""
    asked = {repr(one): one for one in found}
    began = time.monotonic()
    with ProcessPoolExecutor(min(16, len(os.sched_getaffinity(0))), get_context("spawn")) as pool:
        for key, unsound in zip(asked, pool.map(compiled, asked.values()), strict=True):
            if unsound:
                click.echo(f"UNSOUND {key}: {unsound}")
    click.echo(f"{len(asked)} binaries in {time.monotonic() - began:.0f} s")


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--only", default="", help="Regular expression: cases whose name it is found in.")
@click.option("--jobs", default=4, show_default=True, help="Cases at once, behind the first.")
@click.option("--seconds", default=60.0, show_default=True, help="For one case.")
@click.option("--compile", "compiles", is_flag=True, help="Compile and check the binaries only.")
@click.option("--rows", is_flag=True, help="The same of what shipped rows serve packed calls by.")
@click.option("--child", "name", help="Run one case in this process.")
def main(
    only: str,
    jobs: int,
    seconds: float,
    compiles: bool,
    rows: bool,
    name: str | None,
) -> None:
    if name is not None:
        return click.echo(child(next(case for case in CASES if case.name == name)))
    cases = [case for case in CASES if re.search(only, case.name)]
    compile_all(of_rows() if rows else (one for case in cases for one in case.binaries()))
    if compiles or rows or not cases:
        return None
    passed = [report(cases[0].name, seconds)]
    with ThreadPoolExecutor(jobs) as pool:
        passed += pool.map(lambda case: report(case.name, seconds), cases[1:])
    click.echo(f"{sum(passed)} of {len(passed)} cases passed")
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
