"""Which cache row serves a call, and why: what ``fa2tune.explain``, ``fa2tune.is_supported`` and ``fa2tune explain`` answer.

The answer comes from the code that a call itself uses (:mod:`fa2tune.calling.choosing`); nothing is compiled or launched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from fa2tune.calling import (
    arguments,
    backward_plans,
    choosing,
    copies,
    dispatch,
    forward_plans,
    merging,
    ops,
    unseen,
    varlen,
)
from fa2tune.calling.arguments import MISSING
from fa2tune.calling.backward_plans import Whole
from fa2tune.calling.choosing import Chooser, choose_backward
from fa2tune.calling.explanation import Explanation, Served
from fa2tune.calling.kinds import Kind
from fa2tune.calling.schedules import (
    fused_schedule,
    group_parts_schedule,
    split_backward_schedule,
)
from fa2tune.compiling import compiler, fingerprint
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import dq_parts, group_parts, key_splits, overlapped, passes, precompiled
from fa2tune.rows import lookup, reader
from fa2tune.spec.extent import WHOLE, Extent
from fa2tune.spec.key import TuningKey, unmeasured
from fa2tune.spec.mask import Mask, Window, mask_of
from fa2tune.spec.problem import BACKWARD, FUSED, SPLIT, STRATEGIES, Config, Problem
from fa2tune.spec.score import Score, score_of
from fa2tune.spec.variant import Variant, implementation_of

#: What ``attention_varlen`` has and ``attention`` has not.
PACKING = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")


def explain_problem(
    problem: Problem, gpu: Gpu, which: Iterable[str] = ("fwd", BACKWARD), deterministic: bool = False,
    among: Sequence[reader.Layer] | None = None, present: bool = True, strided: Sequence[str] = ("q", "k", "v"),
) -> Explanation:  # fmt: skip
    """How a problem is served on a GPU. ``which``: "fwd", "bwd" or both; ``among``: None for the layers of this process;
    ``strided``: the tensors that TMA cannot address, where ``problem.tma`` says that there are any."""
    kernels: list[Served] = []
    whole = Chooser(problem, gpu, among)
    for pass_ in ("fwd", BACKWARD):
        if pass_ in which:
            rows = unseen.filled_in(problem, gpu, pass_)
            plain = whole.of(unseen.behind(problem, rows))
            ours = dispatch.with_copies(plain, strided, pass_, deterministic)
            chooser, copied = ours or plain, tuple(strided) if ours else ()
            found = _served_pass(chooser, pass_, deterministic)
            kernels += [replace(one, copied=copied, filled_in=rows, mask=problem.mask) for one in found]
    return Explanation(problem, gpu, whole.node.triton, tuple(kernels), present)


def _served_pass(chooser: Chooser, pass_: str, deterministic: bool) -> list[Served]:
    """The kernels of a pass; where those of one head a key head are not to be had, of heads one by one, as a call does."""

    def served(chooser: Chooser) -> list[Served]:
        return [_served(chooser, "fwd")] if pass_ == "fwd" else _served_backward(chooser, deterministic)

    if (one_head := merging.merging(chooser, pass_, deterministic)) is not None:
        found = served(one_head)
        if not any(one.lacking for one in found):
            return [replace(one, merged=chooser.problem.group) for one in found]
    return served(chooser)


def _key(chooser: Chooser, kernel: str, answer: lookup.Answer | None) -> TuningKey:
    """Of the row that would fit exactly, of the family of the one that serves."""
    dense = choosing.key_of(chooser.problem, kernel, chooser.gpu)
    return dense if answer is None else dense.with_(family=answer.row.key.family)


def _served_backward(chooser: Chooser, deterministic: bool, first: bool = True) -> list[Served]:
    """The whole backward, and the kernels of its strategy. ``first``: ``choose_backward``'s first choice, else what a call
    takes where that cannot be had."""
    strategy, choices = choose_backward(chooser, deterministic, first)
    split = deterministic and strategy == SPLIT  # a fused one in a fixed order has the row of any call
    (answer, refused), problem = chooser.find_backward(split), chooser.problem
    key = _key(chooser, BACKWARD, answer)
    whole = Served(
        key, answer.row.config if answer else {}, answer, refused,
        nearest=_nearest(chooser, BACKWARD), mask=problem.mask, unmeasured=unmeasured(problem, key.family),
    )  # fmt: skip
    _, kinds = chooser.strategy(split)
    divided = backward_plans.division(problem, choices, chooser.gpu)
    for one, refused_one in backward_plans.wholes(problem, choices, divided, chooser.gpu):
        tried = _with_whole(whole, problem, one, refused_one, chooser.gpu)
        if tried.runs is not None:
            return [tried]
        whole = whole if whole.unsplit else tried  # the first choice is named
    found = [_served(chooser, kernel, kinds.get(kernel), choices[kernel]) for kernel in STRATEGIES[strategy]]
    if deterministic and strategy == FUSED and any(one.lacking for one in found):
        return _served_backward(chooser, deterministic, first=False)  # as a call does
    if any(one.form == fused_schedule.IN_ORDER_FORM for one in found):
        whole = replace(whole, form=fused_schedule.IN_ORDER_FORM)
    order = divided.order
    if divided.keys > 1:
        in_parts = _Runs(dq_parts.kernels(problem, divided.keys, chooser.gpu.arch), chooser.gpu)
        if in_parts.lacking and not divided.refused:
            order = split_backward_schedule.order_of(problem, choices, divided.groups, chooser.gpu)
        why = divided.refused or in_parts.lacking
        found = [_with_keys_split(one, in_parts, why, order) if one.kernel == overlapped.DQ else one for one in found]
    return [replace(whole, order=order), *found]


def _with_whole(whole: Served, problem: Problem, one: Whole, refused: str, gpu: Gpu) -> Served:
    """A backward all of which kernels of its own make; ``refused``: they do not, although that is expected to be faster."""
    found = _Runs(one.kernels(problem, gpu.arch), gpu)
    if why := refused or found.lacking:
        return replace(whole, unsplit=why, unsplit_whole=one)
    return replace(
        whole, config=one.config, otherwise=whole.config, runs=found.configs, binaries=found.binaries, whole=one
    )


def _with_keys_split(one: Served, in_parts: _Runs, why: str, order: str) -> Served:
    """dQ's kernel, whose keys are split; ``why``: they are not, although that is expected to be faster. At a time with dK/dV's
    kernel its own one makes delta."""
    if why:
        return replace(one, unsplit=why)
    runs, binaries = (one.runs or {}, one.binaries or {}) if order else ({}, {})
    split = next(iter(in_parts.configs.values()))
    return replace(
        one, config=split, split=split, otherwise=one.config, runs={**runs, **in_parts.configs},
        binaries={**binaries, **in_parts.binaries},
    )  # fmt: skip


def _nearest(chooser: Chooser, kernel: str) -> tuple[tuple[lookup.Differences, str], ...]:
    """``Served.nearest``."""
    if chooser.ladder(kernel):
        return ()
    key = choosing.key_of(chooser.problem, kernel, chooser.gpu)
    return tuple((what, layer.name) for what, layer in lookup.near_misses(key, chooser.layers))


def _served(chooser: Chooser, kernel: str, kind: Kind | None = None, choice: Choice | None = None) -> Served:
    """As the dispatcher finds it. ``kind``: as ``Chooser.choose`` has it; ``choice``: what serves in place of that."""
    (answer, refused), problem, gpu = chooser.find_preferring(kernel, kind), chooser.problem, chooser.gpu
    choice = choice or (chooser.suited(answer) if answer else chooser.default(kernel))
    in_row = choice.variant.space.completed(answer.row.config) if answer else choice.config
    changed = {name: (in_row[name], value) for name, value in choice.config.items() if value != in_row[name]}
    scheduled = choice.row if answer and choice.row is not answer.row else None
    parts = group_parts_schedule.parts_of(problem, kernel, choice, gpu)
    needed = [(*one, problem) for one in passes.runs(kernel, problem.specialization, choice, gpu.arch)]
    if parts > 1:
        needed += group_parts.needed(problem, choice.config, gpu.arch)
    found, unsplit, refused_tiles = _Runs(needed, gpu, choice.triton), "", None
    split, otherwise = None, in_row if choice.estimated else None
    if kernel == "fwd":
        split, unsplit = forward_plans.split_of(problem, choice, gpu)
        if split is not None:
            parted = _Runs(key_splits.kernels(problem, split, gpu.arch), gpu)
            unsplit = unsplit or parted.lacking
            refused_tiles = split if unsplit else None
            split, found, otherwise = (None, found, otherwise) if unsplit else (split, parted, choice.config)
    if found.lacking and split is None and choice.otherwise is not None:
        return _served(chooser, kernel, kind, choice.of_row)
    key = _key(chooser, kernel, answer)
    return Served(
        key, split or choice.config, answer, refused, changed, found.binaries,
        _nearest(chooser, kernel), scheduled, problem.mask, unmeasured(problem, key.family), parts, split=split,
        unsplit=unsplit, unsplit_of=refused_tiles,
        few_tiles=choice.few_tiles, otherwise=otherwise, runs=found.configs, lacking=found.lacking,
        form=fused_schedule.about(choice),
    )  # fmt: skip


class _Runs:
    """Kernels that run one after the other, and where a first call takes each from."""

    def __init__(self, needed: Iterable[tuple[Variant, Config, Problem]], gpu: Gpu, measured: str = "") -> None:
        """``measured``: as ``precompiled.find`` has it."""
        self.configs, self.binaries = dict[str, Config](), dict[str, str]()
        self.lacking = ""  #: why the first kernel is not to be had that no file brings, where no Triton is installed
        for variant, config, posed in needed:
            binary, name = compiler.binary_config(variant, config), variant.short_name
            image, where = precompiled.find(variant, posed.specialization, binary, gpu.arch, measured)
            self.configs[name] = config
            if image is not None:
                self.binaries[name] = f"precompiled, {where}"
            elif fingerprint.triton_version():
                self.binaries[name] = f"compiled at the first call: {where}"
            else:
                self.binaries[name] = f"not to be had, since no Triton is installed to compile it: {where}"
                self.lacking = self.lacking or f"{name}: {where}, and no Triton is installed to compile it"


def explain(
    q: torch.Tensor = MISSING,
    k: torch.Tensor = MISSING,
    v: torch.Tensor = MISSING,
    *extra: Any,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    window: Window | None = None,
    mask: str | Mask | None = None,
    softcap: float | None = None,
    score: str | Score | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    backward: bool | None = None,
    **unknown: Any,
) -> Explanation:
    """Which rows serve ``attention`` of these tensors, or ``attention_varlen`` where cu_seqlens_q is given, with which
    evidence, and what would improve on it.

    Reads the cache files; compiles and launches nothing. ``print()`` shows the verdict, a line for each kernel and the next
    command; ``.status``, ``.kernels`` and ``.as_dict()`` are for programs.

    Args:
        q, k, v, causal, softmax_scale, layout, return_lse, deterministic, window, mask, softcap, score: as ``attention`` takes
            them.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: as ``attention_varlen`` does, whose q, k
            and v come with them.
        backward: whether the backward is explained, too. None: if q, k or v requires a gradient.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: where ``attention`` does.
    """
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    _check_names(q, k, v, layout, extra, {**unknown, **_foreign(q, packing)})
    gradients = any(isinstance(t, torch.Tensor) and t.requires_grad for t in (q, k, v))
    q, k, v, extent = _checked(
        q, k, v, packing, causal, softmax_scale, layout, deterministic, window, mask, softcap, score
    )
    exact = torch.are_deterministic_algorithms_enabled() if deterministic is None else bool(deterministic)
    if backward is None:
        backward = gradients
    problem = passes.describe(
        q, k, v, mask_of(bool(causal), window, mask), ops.scale_of(q, softmax_scale), score_of(softcap, score), extent
    )
    which = ("fwd", BACKWARD) if backward else ("fwd",)
    index, strided = q.get_device(), copies.unaddressable({"q": q, "k": k, "v": v})
    return explain_problem(problem, dispatch.gpu_of(index), which, exact, present=index >= 0, strided=strided)


def _foreign(q: Any, packing: tuple[Any, ...]) -> dict[str, Any]:
    """What a call of ``attention``, whose q has 4 dimensions, has not."""
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        return {}
    return {name: value for name, value in zip(PACKING, packing, strict=True) if value is not None}


def _checked(
    q: Any, k: Any, v: Any, packing: tuple[Any, Any, Any, Any, Any, Any], causal: Any, softmax_scale: Any, layout: Any,
    deterministic: Any, window: Any, mask: Any, softcap: Any, score: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Extent]:  # fmt: skip
    """As ``ops.checked`` or, where ``packing`` begins with cu_seqlens_q, ``varlen.checked``."""
    if all(each is None for each in packing):
        return *ops.checked(q, k, v, causal, softmax_scale, layout, deterministic, window, mask, softcap, score), WHOLE
    return varlen.checked(q, k, v, *packing, causal, softmax_scale, deterministic, window, mask, softcap, score)


def _check_names(q: Any, k: Any, v: Any, layout: Any, extra: tuple[Any, ...], unknown: Mapping[str, Any]) -> None:
    """The TypeError of ``attention`` for arguments that it does not have, positional ones after v, and a missing q, k or v."""
    if extra or unknown or any(t is MISSING for t in (q, k, v)):
        arguments.refuse(unknown, extra, q, k, v, layout)


def is_supported(
    q: Any = MISSING,
    k: Any = MISSING,
    v: Any = MISSING,
    *extra: Any,
    causal: Any = False,
    softmax_scale: Any = None,
    layout: Any = "bhsd",
    return_lse: Any = False,
    deterministic: Any = None,
    window: Any = None,
    mask: Any = None,
    softcap: Any = None,
    score: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    **unknown: Any,
) -> bool:
    """Whether ``attention`` of the same arguments (``attention_varlen``, with cu_seqlens_q) takes this call here: dtypes,
    shapes, strides, device, GPU and every argument's value. False, and no error, for values that it does not take. Compiles
    and launches nothing.

    Raises:
        TypeError: q, k or v is missing, a positional argument after v, or an argument that ``attention`` does not have (a
            misspelt one, or another library's): its own error.
    """
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    _check_names(q, k, v, layout, extra, {**unknown, **_foreign(q, packing)})
    try:
        q, k, v, _ = _checked(
            q, k, v, packing, causal, softmax_scale, layout, deterministic, window, mask, softcap, score
        )
        dispatch.gpu_of(q.get_device())
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        return False
    return q.get_device() < 0 or torch.version.hip is None  # below 0: Triton's interpreter


def served_by(problem: Problem, gpu: Gpu, backward: bool) -> dict[str, str]:
    """Kernel -> its implementation for this problem, and how far a warp-specialised one is ahead of the portable winner; of a
    forward whose keys are split among programs, or whose tiles have several heads, and of a backward by kernels of its own,
    what runs in their place."""
    problem = unseen.behind(problem, unseen.filled_in(problem, gpu, BACKWARD if backward else "fwd"))
    chooser = Chooser(problem, gpu)
    if (one_head := merging.merging(chooser, BACKWARD if backward else "fwd")) is not None:
        chooser = one_head
        problem = chooser.problem
    chosen = choose_backward(chooser, False)[1] if backward else {"fwd": chooser.choose("fwd")}
    if backward:
        divided = backward_plans.division(problem, chosen, gpu)
        one, refused = backward_plans.whole(problem, chosen, divided, gpu)
        if one is not None and not refused:
            runs = one.kernels(problem, gpu.arch)
            return {BACKWARD: " + ".join(variant.short_name for variant, _, _ in runs)}
    found = {
        kernel: implementation_of(choice.config) + ("" if choice.lead is None else f" ({choice.lead:.2f} x portable)")
        for kernel, choice in chosen.items()
    }
    if not backward:
        split, refused = forward_plans.split_of(problem, chosen["fwd"], gpu)
        if split is not None and not refused:
            found["fwd"] = " + ".join(
                variant.short_name for variant, _, _ in key_splits.kernels(problem, split, gpu.arch)
            )
    return found
