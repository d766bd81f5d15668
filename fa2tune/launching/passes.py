"""The passes: which kernels run, in which order, on which workspaces. Configs come from outside; nothing is looked up here.

A plan is made once per (problem, strides, scale, configs) and called many times. Tensors are (batch, heads, seqlen, dim)
views of any strides with a contiguous last dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

import torch

from fa2tune.compiling.compiler import Launches, around, variant_named, variant_of
from fa2tune.launching.launch import TORCH_DTYPES, addressing, arch_of, bind, strides_of
from fa2tune.problem import ROADS, Config, Problem, Specialization

#: The kernel that sums dQ. Its portable variant adds to float32 zeros and reads delta, all of which is made around it here;
#: a variant that names kernels of its own for that leaves nothing to do.
SUMS_DQ = "bwd_fused"
#: Element types of workspaces; any other is the problem's.
_DTYPES = {"fp32": torch.float32, "i32": torch.int32}


def float32_precision() -> str:
    """How torch is set to multiply float32 matrices: "ieee" or "tf32"."""
    # not allow_tf32, which raises once the newer setting has been used; this one follows both
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    **gradient: torch.Tensor,
) -> Problem:
    """The Problem that these tensors pose; with ``o`` and ``do``, the backward's."""
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, head_dim_v = v.shape
    dtype = TORCH_DTYPES[q.dtype]
    read = {"q": q, "k": k, "v": v, **gradient}
    aligned, wide, tma = addressing(read, {name: strides_of(tensor) for name, tensor in read.items()})
    # what is written is dense: its batch stride passes 2^31 where a batch entry does
    widest = max(head_dim, head_dim_v)
    wide |= max(heads_q * seqlen_q, heads_kv * seqlen_k) * widest >= 1 << 31
    return Problem(
        dtype, batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal,
        precision=float32_precision() if dtype == "fp32" else "ieee",
        aligned=aligned, wide=wide, negate=not gradient and softmax_scale < 0, tma=tma,
    )  # fmt: skip


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """Of what a forward writes beside its output, float32: (batch, heads, seqlen) of lse; for float32 inputs two such planes,
    the second with what the rounding of the first left out."""
    return (2, *q.shape[:3]) if q.dtype is torch.float32 else tuple(q.shape[:3])


def lse_of(words: torch.Tensor) -> torch.Tensor:
    """(batch, heads, seqlen) lse, of the tensor that ``lse_shape`` describes."""
    return words[0] if words.dim() == 4 else words


def empty_ordered(like: torch.Tensor, dim: int) -> torch.Tensor:
    """Uninitialised (batch, heads, seqlen, dim), dense, in the memory order of ``like``: (b, h, s, d) or (b, s, h, d)."""
    batch, heads, rows, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty((batch, rows, heads, dim)).transpose(1, 2)
    return like.new_empty((batch, heads, rows, dim))


def runs(kernel: str, spec: Specialization, config: Config, arch: int) -> Launches:
    """Every kernel that runs for a config of a tuned one, in order, each with its own config."""
    variant = variant_of(kernel, config)
    before, after = around(variant, spec, config, arch)
    if kernel == SUMS_DQ and not variant.before:
        delta = variant_named("bwd_delta")
        before = [(delta, delta.space.default(spec, arch))]
    return [*before, (variant, config), *after]


def _template(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its memory: what ``torch.empty_like`` copies shape, strides, dtype and device from, faster than they
    can be named. A plan keeps no memory: made during a CUDA graph's warm-up, it would hold on to the graph's pool."""
    tensor.untyped_storage().resize_(0)
    return tensor


class Step:
    """One kernel of a road, and what its variant runs around it, bound to one problem.

    Called with the tensors by name; what it needs beside them it allocates."""

    def __init__(self, kernel: str, problem: Problem, config: Config, tensors: Mapping[str, torch.Tensor],
                 softmax_scale: float, device_index: int) -> None:  # fmt: skip
        """``tensors``: all there are, workspaces aside, of which shapes and strides count."""
        variant = variant_of(kernel, config)
        self.softmax_scale = softmax_scale
        #: it adds to float32 zeros, which are cast to dq afterwards
        self.casts = kernel == SUMS_DQ and not variant.before
        some = next(iter(tensors.values()))
        asked = variant.workspaces(problem, config)
        self.made = {
            name: _template(some.new_empty(what[0], dtype=_DTYPES.get(what[1], some.dtype)))
            for name, what in asked.items()
            if not isinstance(what, str)
        }
        self.shared = {name: what for name, what in asked.items() if isinstance(what, str)}
        workspaces = self.made | {name: self.made[other] for name, other in self.shared.items()}
        strides = {name: strides_of(tensor) for name, tensor in tensors.items() if tensor.dim() == 4 or name == "dlse"}
        arch = arch_of(device_index) if device_index >= 0 else 0
        scalars = variant.scalars(problem, config)
        self.launches = []
        for one, its_config in runs(kernel, problem.specialization, config, arch):
            names = tuple(name for name in one.tensors if name in tensors or name in workspaces)
            bound = bind(one, problem, its_config, strides, softmax_scale, names, device_index, workspaces, scalars)
            self.launches.append((bound, itemgetter(*names)))

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        given = tensors
        if self.made:
            given = {**tensors, **{name: torch.empty_like(each) for name, each in self.made.items()}}
            given.update({name: given[other] for name, other in self.shared.items()})
        if self.casts:
            dq = tensors["dq"]
            given = {**tensors, "dq": torch.zeros(dq.shape, dtype=torch.float32, device=dq.device)}
        for launch, tensors_of in self.launches:
            launch(*tensors_of(given))
        if self.casts:
            torch.mul(given["dq"], self.softmax_scale, out=dq)


class ForwardPlan:
    """q, k, v -> (o, lse). Needs Sk >= 1 and no empty dimension."""

    def __init__(self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float,
                 config: Config) -> None:  # fmt: skip
        self.causal, self.softmax_scale = problem.causal, softmax_scale
        self.o = _template(empty_ordered(q, problem.head_dim_v))
        self.lse = _template(q.new_empty(lse_shape(q), dtype=torch.float32))
        strides = {name: strides_of(tensor) for name, tensor in (("q", q), ("k", k), ("v", v), ("o", self.o))}
        names = ("q", "k", "v", "o", "lse")
        self.launch = bind(variant_of("fwd", config), problem, config, strides, softmax_scale, names, q.get_device())

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = torch.empty_like(self.o), torch.empty_like(self.lse)
        self.launch(q, k, v, o, lse)
        return o, lse


class BackwardPlan:
    """do, dlse, q, k, v, o, lse -> (dq, dk, dv), each in the memory order of its input."""

    def __init__(self, problem: Problem, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
                 v: torch.Tensor, o: torch.Tensor, softmax_scale: float, road: str,
                 configs: Mapping[str, Config]) -> None:  # fmt: skip
        self.road, self.softmax_scale = road, softmax_scale
        self.dq, self.dk, self.dv = (_template(empty_ordered(t, t.shape[3])) for t in (q, k, v))
        self.delta = _template(q.new_empty(q.shape[:3], dtype=torch.float32))
        tensors = {"q": q, "k": k, "v": v, "o": o, "do": do} | ({} if dlse is None else {"dlse": dlse})
        tensors |= {"dq": self.dq, "dk": self.dk, "dv": self.dv, "delta": self.delta, "lse": self.delta}
        self.steps = [
            Step(kernel, problem, configs[kernel], tensors, softmax_scale, q.get_device()) for kernel in ROADS[road]
        ]

    def __call__(
        self, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        dq, dk, dv = torch.empty_like(self.dq), torch.empty_like(self.dk), torch.empty_like(self.dv)
        tensors = {
            "q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "delta": torch.empty_like(self.delta), "dq": dq,
            "dk": dk, "dv": dv,
        }  # fmt: skip
        if dlse is not None:
            tensors["dlse"] = dlse
        for step in self.steps:
            step(tensors)
        return dq, dk, dv


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, softmax_scale: float, config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward with an explicit config. q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o, lse (of
    ``lse_shape``, as the backward wants it)."""
    problem = describe(q, k, v, causal, softmax_scale)
    return ForwardPlan(problem, q, k, v, softmax_scale, config)(q, k, v)


def backward(
    do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, *, causal: bool, softmax_scale: float, road: str, configs: Mapping[str, Config],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One backward with explicit configs. road: "split" (deterministic) or "fused" (atomic sums of dQ)."""
    problem = describe(q, k, v, causal, softmax_scale, o=o, do=do)
    plan = BackwardPlan(problem, do, dlse, q, k, v, o, softmax_scale, road, configs)
    return plan(do, dlse, q, k, v, o, lse)
