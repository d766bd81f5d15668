"""The numerics gate: no config is selected unless its results, gradients included, keep the error rule.

Error rule: for each tensor, the maximum and the RMS error against float64 are at most twice those of the same computation
written out in the input dtype (``reference.py``), plus 2 ulp of the tensor's dtype at that magnitude. A NaN or an infinity
that the oracle does not have fails. Of float32 ("ieee") dq and dk, what is rounded off dP - delta
(``reference.rounded_off``) is taken off each element's error before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from fa2tune.compiling.registry import portable_config, refused_scale, variant_of
from fa2tune.launching import passes
from fa2tune.measuring import reference, worker
from fa2tune.spec.key import WINDOW_SHARE
from fa2tune.spec.mask import BAND, band, row_mask_named
from fa2tune.spec.problem import STRATEGIES, Config, Problem, Specialization

#: tensor -> {"max": .., "max_allowed": .., "rms": .., "rms_allowed": ..}: the form of Row.errors
Errors = dict[str, dict[str, float]]

TIMES_REFERENCE, ULPS = 2.0, 2.0
FEW_QUERIES, MANY_KEYS = 5, 1001  #: as a decoder asks
#: For the GPU to end what has been launched, and for the comparison; a kernel without end takes longer.
LAUNCHED_SECONDS = 15.0


class WrongResult(ArithmeticError):
    """A kernel broke the error rule. The message names tensor, error and bound."""


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of ``dtype`` at ``magnitude``."""
    info = torch.finfo(dtype)
    magnitude = max(magnitude, info.smallest_normal)
    return info.eps * 2.0 ** math.floor(math.log2(magnitude))


def _max_rms(values: torch.Tensor) -> tuple[float, float]:
    if values.numel() == 0:
        return 0.0, 0.0
    return values.abs().max().item(), values.square().mean().sqrt().item()


def compare_tensor(
    name: str,
    got: torch.Tensor,
    oracle: torch.Tensor,
    same_dtype: torch.Tensor,
    rounded_off: torch.Tensor | None = None,
) -> dict[str, float]:
    """Errors of one tensor and what the rule allows; ``rounded_off`` is taken off the errors. Raises WrongResult."""
    if got.shape != oracle.shape:
        raise WrongResult(f"{name}: shape {tuple(got.shape)} instead of {tuple(oracle.shape)}")
    wide = got.to(torch.float64)
    finite = torch.isfinite(oracle)
    if not torch.equal(torch.isfinite(wide), finite):
        wrong = torch.isfinite(wide) != finite
        what = "NaN" if torch.isnan(wide[wrong]).any() else "non-finite or falsely finite values"
        raise WrongResult(f"{name}: {what} in {int(wrong.sum())} of {wrong.numel()} elements")
    if not torch.equal(wide[~finite].nan_to_num(nan=0.0), oracle[~finite].nan_to_num(nan=0.0)):
        raise WrongResult(f"{name}: infinity or NaN of another kind than in the reference")
    truth = oracle[finite]
    error = (wide[finite] - truth).abs()
    if rounded_off is not None:
        error = (error - rounded_off[finite]).clamp(min=0.0)
    error_max, error_rms = _max_rms(error)
    usable = finite & torch.isfinite(same_dtype)  # where the reference overflows it allows nothing
    reference_max, reference_rms = _max_rms(same_dtype.to(torch.float64)[usable] - oracle[usable])
    magnitude_max, magnitude_rms = _max_rms(truth)
    errors = {
        "max": error_max,
        "max_allowed": TIMES_REFERENCE * reference_max + ULPS * ulp(magnitude_max, got.dtype),
        "rms": error_rms,
        "rms_allowed": TIMES_REFERENCE * reference_rms + ULPS * ulp(magnitude_rms, got.dtype),
    }
    for kind in ("max", "rms"):
        if not errors[kind] <= errors[f"{kind}_allowed"]:
            raise WrongResult(f"{name}: {kind} error {errors[kind]:.3g}, allowed {errors[f'{kind}_allowed']:.3g}")
    return errors


def compare(
    got: Mapping[str, torch.Tensor], oracle: Mapping[str, torch.Tensor], same_dtype: Mapping[str, torch.Tensor],
    rounded_off: Mapping[str, torch.Tensor] | None = None,
) -> Errors:  # fmt: skip
    """The error rule over every tensor of ``got`` (o, lse, dq, dk, dv). Raises WrongResult."""
    less = rounded_off or {}
    return {
        name: compare_tensor(name, tensor, oracle[name], same_dtype[name], less.get(name))
        for name, tensor in got.items()
    }


def worst(errors: Sequence[Errors]) -> Errors:
    """Per tensor, the case that came closest to its bound."""
    found: Errors = {}
    for case in errors:
        for name, entry in case.items():
            if name not in found or _nearness(entry) > _nearness(found[name]):
                found[name] = entry
    return found


def _nearness(entry: Mapping[str, float]) -> float:
    return max(entry["max"] / entry["max_allowed"], entry["rms"] / entry["rms_allowed"])


@dataclass(frozen=True)
class Case:
    """One set of inputs that a config must get right."""

    problem: Problem
    scale: float = 1.0
    outlier: bool = False
    sign: int = 1  #: of softmax_scale
    #: (queries, keys) of packed sequences, which the problem's are together
    sequences: tuple[tuple[int, int], ...] = ()

    @property
    def softmax_scale(self) -> float:
        return float(self.sign * self.problem.head_dim**-0.5)

    def offsets(self, device: str) -> tuple[torch.Tensor, ...]:
        """Of queries and keys, where sequences are packed."""
        sides = zip(*self.sequences, strict=True)
        return tuple(torch.tensor([0, *side], device=device).cumsum(0).to(torch.int32) for side in sides)


def cases(spec: Specialization, *, small: bool) -> tuple[Case, ...]:
    """Odd lengths either way round (with a causal mask: rows that see no key), grouped heads, the error rule's three kinds
    of input; windows and packed sequences as the specialization has them. ``small``: little enough for the interpreter."""

    def problem(batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_k: int) -> Problem:
        mask = band(seqlen_k // WINDOW_SHARE, 0) if spec.mask == BAND else row_mask_named(spec.mask)
        return Problem(
            spec.dtype, batch, heads_q, heads_kv, seqlen_q, seqlen_k, spec.head_dim, spec.head_dim_v, mask,
            precision=spec.precision,
        )  # fmt: skip

    def packed(case: Case) -> Case:
        """The same heads and inputs, of sequences of other lengths, some without a query or a key."""
        one = case.problem
        lengths = ((one.seqlen_q, one.seqlen_k), (7, 0), (0, 9), (1, one.seqlen_k // 2), (one.seqlen_q // 3, 5))
        return replace(
            case, sequences=lengths,
            problem=replace(one, batch=1, seqlen_q=sum(q for q, _ in lengths), seqlen_k=sum(k for _, k in lengths)),
        )  # fmt: skip

    if small:  # no outliers: over so few elements the reference may have the luck to be nearly exact
        found = [Case(problem(1, 2, 1, 70, 90)), Case(problem(1, 1, 1, 90, 70), scale=10.0)]
    else:
        found = [
            Case(problem(2, 4, 2, 113, 203)),
            Case(problem(2, 4, 4, 203, 113), scale=10.0),
            Case(problem(1, 4, 1, 577, 1001), outlier=True),
            Case(problem(1, 8, 8, 1024, 1024)),
        ]
    return tuple(map(packed, found)) if spec.ragged else tuple(found)


@lru_cache(maxsize=32)
def _answers(
    case: Case, device: str, gradients: bool
) -> tuple[reference.Inputs, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    inputs = reference.make_inputs(case.problem, device, scale=case.scale, outlier=case.outlier)
    options: dict[str, Any] = {"mask": case.problem.mask, "softmax_scale": case.softmax_scale, "gradients": gradients}
    if not case.sequences:
        return inputs, *reference.oracle_and_reference(inputs, **options)
    each = [reference.oracle_and_reference(one, **options) for one in _apart(case, inputs)]
    oracle, same = (
        {name: torch.cat([one[name] for one in side], 2) for name in side[0]} for side in zip(*each, strict=True)
    )
    return inputs, oracle, same


def _apart(case: Case, inputs: reference.Inputs) -> Iterator[reference.Inputs]:
    """The inputs of each packed sequence."""
    first_q = first_k = 0
    for rows, keys in case.sequences:
        of_q, of_k = slice(first_q, first_q + rows), slice(first_k, first_k + keys)
        first_q, first_k = of_q.stop, of_k.stop
        yield reference.Inputs(
            inputs.q[:, :, of_q], inputs.k[:, :, of_k], inputs.v[:, :, of_k], inputs.do[:, :, of_q], None
        )


@lru_cache(maxsize=32)
def _rounded_off(case: Case, device: str) -> Mapping[str, torch.Tensor] | None:
    """Of float32 products in full precision; others round more off than that, and the reference does as well."""
    if case.problem.dtype != "fp32" or case.problem.precision != "ieee":
        return None
    inputs, oracle, _ = _answers(case, device, True)
    return reference.rounded_off(inputs, oracle, mask=case.problem.mask, softmax_scale=case.softmax_scale)


@contextmanager
def _strict(precision: str) -> Iterator[None]:
    """Uninitialised memory holds NaN, and float32 products have the precision that the kernel has."""
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    matmul = torch.backends.cuda.matmul
    products = matmul.fp32_precision  # not allow_tf32, which raises once this newer setting has been used
    torch.use_deterministic_algorithms(True, warn_only=True)  # what makes torch.empty fill with NaN
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        matmul.fp32_precision = products


#: (kernel, specialization, device) whose negative scale was right: it takes a binary of its own, which not every config is
#: compiled again for.
_NEGATED = set[tuple[str, Specialization, str]]()


def check_forward(config: Config, spec: Specialization, device: str, small: bool = False) -> Errors:
    """Run the forward with ``config`` on every case, and with what it becomes for a few queries where that is another. Errors
    of o and lse, each of its worst case. A kernel that computes a negative softmax_scale is run with one, too, until a config
    of it is right. Raises WrongResult, CompileError, and whatever the launch raises.

    device: "cuda" or "cuda:1"; "cpu" needs a process under TRITON_INTERPRET=1."""
    variant, each = variant_of("fwd", config), cases(spec, small=small)
    runs = [(case, config) for case in each]
    decoding = replace(each[0].problem, seqlen_q=FEW_QUERIES, seqlen_k=MANY_KEYS)
    suited = variant.suited(decoding, config)
    if suited != config and not spec.ragged:
        runs.append((Case(decoding), suited))
    found = [_run_forward(case, its_config, spec, device) for case, its_config in runs]
    negated = variant.name, spec, device
    if refused_scale(variant, replace(spec, negate=True)) is None and negated not in _NEGATED:
        try:
            _run_forward(replace(each[0], sign=-1), config, spec, device)
        except WrongResult as wrong:
            raise WrongResult(f"with a negative softmax_scale, {wrong}") from None
        _NEGATED.add(negated)
    return worst(found)


def _run_forward(case: Case, config: Config, spec: Specialization, device: str) -> Errors:
    """Errors of o and lse of one case."""
    with _strict(spec.precision):
        inputs, oracle, same = _answers(case, device, False)
        worker.report("launch")
        q, k, v, mask = inputs.q, inputs.k, inputs.v, case.problem.mask
        options: dict[str, Any] = {"mask": mask, "softmax_scale": case.softmax_scale, "offsets": case.offsets(device)}
        o, planes = passes.forward(q, k, v, **options, config=config)
        worker.report("launched", LAUNCHED_SECONDS)
    lse = passes.lse_of(planes)
    found = compare({"o": o, "lse": lse}, oracle, same)
    if lse is not planes:  # float32: what the backward takes, of which callers get the first plane alone
        both = planes.double().sum(0).float()
        compare_tensor("lse, both planes", both, oracle["lse"], same["lse"])
    return found


def check_backward(
    configs: Mapping[str, Config], spec: Specialization, strategy: str, device: str, small: bool = False
) -> Errors:
    """Run forward and whole backward ("split" or "fused"); ``configs`` by kernel name, the forward's included. Errors of
    dq, dk and dv, each of its worst case. Raises as ``check_forward``."""
    found = []
    for case in cases(spec, small=small):
        options: dict[str, Any] = {
            "mask": case.problem.mask,
            "softmax_scale": case.softmax_scale,
            "offsets": case.offsets(device),
        }
        with _strict(spec.precision):
            inputs, oracle, same = _answers(case, device, True)
            q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
            worker.report("launch")
            o, lse = passes.forward(q, k, v, **options, config=configs["fwd"])
            gradients = passes.backward(do, None, q, k, v, o, lse, **options, strategy=strategy, configs=configs)
            worker.report("launched", LAUNCHED_SECONDS)
        found.append(
            compare(dict(zip(("dq", "dk", "dv"), gradients, strict=True)), oracle, same, _rounded_off(case, device))
        )
    return worst(found)


def check(kernel: str, config: Config, spec: Specialization, arch: int, device: str, small: bool = False) -> Errors:
    """The gate of one tuned kernel: for a backward kernel the whole backward with this config, and defaults for the
    others. Raises as ``check_forward``."""
    if kernel == "fwd":
        return check_forward(config, spec, device, small)
    strategy = next(strategy for strategy, kernels in STRATEGIES.items() if kernel in kernels)
    defaults = {name: portable_config(name, spec, arch) for name in ("fwd", *STRATEGIES[strategy])}
    return check_backward(defaults | {kernel: config}, spec, strategy, device, small)
