"""The passes: which kernels run, in which order, on which workspaces. Configs come from outside; nothing is looked up here.

A plan is made once per (problem, strides, scale, configs) and called many times. Tensors are (batch, heads, seqlen, dim)
views of any strides with a contiguous last dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from fa2tune.compiling.choice import Choice, Chosen, choice_of
from fa2tune.compiling.compiler import KernelSequence, around
from fa2tune.compiling.support import companion
from fa2tune.launching import dq_parts, group_parts, merged_heads, overlapped
from fa2tune.launching.cuda import Chain
from fa2tune.launching.launch import (
    TORCH_DTYPES,
    InterpretedChain,
    TensorPlace,
    Within,
    Workspace,
    addressing,
    arch_of,
    bind,
    chain,
    form,
    starts_early,
    strides_of,
)
from fa2tune.search_spaces.portable import packed_order
from fa2tune.spec.extent import OFFSETS, QUEUE, RAGGED, WHOLE, Extent
from fa2tune.spec.mask import Mask
from fa2tune.spec.problem import STRATEGIES, Config, Problem, Specialization
from fa2tune.spec.roles import BWD_DELTA, PACKED_ORDER
from fa2tune.spec.score import NONE, Score
from fa2tune.spec.variant import Workspaces

#: The kernel that sums dQ. Its portable variant adds to float32 zeros and reads delta, all of which is made around it here;
#: a variant that names kernels of its own for that leaves nothing to do.
ACCUMULATES_DQ = "bwd_fused"
#: What the kernel makes that orders the tiles of packed sequences.
ORDER = overlapped.ORDER
#: Element types of workspaces; any other is the problem's.
_DTYPES = {"fp32": torch.float32, "i32": torch.int32, "bf16": torch.bfloat16}
#: Bytes: what the caching allocator gives the start of a tensor, and more than any load or descriptor asks.
ALIGNMENT = 512


def float32_precision() -> str:
    """How torch is set to multiply float32 matrices: "ieee" or "tf32"."""
    # not allow_tf32, which raises once the newer setting has been used; this one follows both
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float,
    score: Score = NONE,
    extent: Extent = WHOLE,
    **gradient: torch.Tensor,
) -> Problem:
    """The Problem that these tensors pose; with ``o`` and ``do``, the backward's. Of a ragged ``extent`` the tensors are of one
    batch entry."""
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, head_dim_v = v.shape
    dtype = TORCH_DTYPES[q.dtype]
    read = {"q": q, "k": k, "v": v, **gradient}
    aligned, wide, tma = addressing(read, {name: strides_of(tensor) for name, tensor in read.items()})
    # what is written is dense: its batch stride passes 2^31 where a batch entry does
    widest = max(head_dim, head_dim_v)
    wide |= max(heads_q * seqlen_q, heads_kv * seqlen_k) * widest >= 1 << 31
    return Problem(
        dtype, batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v,
        mask.fitted(seqlen_q, seqlen_k),
        precision=float32_precision() if dtype == "fp32" else "ieee",
        aligned=aligned, wide=wide, negate=not gradient and softmax_scale < 0,
        score=score, tma=tma, extent=extent,
        stacked="" if extent.ragged else merged_heads.stacked([q, *gradient.values()], heads_kv),
    )  # fmt: skip


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """Of what a forward writes beside its output, float32: (batch, heads, seqlen) of lse; for float32 inputs two such planes,
    the second with what the rounding of the first left out."""
    return (2, *q.shape[:3]) if q.dtype is torch.float32 else tuple(q.shape[:3])


def lse_of(words: torch.Tensor) -> torch.Tensor:
    """(batch, heads, seqlen) lse, of the tensor that ``lse_shape`` describes."""
    return words[0] if words.dim() == 4 else words


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same sizes and strides ("meta"). ``tensor.to("meta")`` has dense strides for what is expanded."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def in_one_batch(packed: torch.Tensor) -> torch.Tensor:
    """(total, heads, dim) as (1, heads, total, dim), as kernels see packed sequences."""
    return packed.transpose(0, 1).unsqueeze(0)


def without_batch(view: torch.Tensor) -> torch.Tensor:
    """(1, heads, total, dim) as (total, heads, dim)."""
    return view.squeeze(0).transpose(0, 1)


def empty_ordered(like: torch.Tensor, dim: int, lead: int = 0) -> torch.Tensor:
    """Uninitialised (batch, heads, lead + seqlen, dim), dense, in the memory order of ``like``, which is (batch, heads, seqlen,
    ...): (b, h, s, d) or (b, s, h, d)."""
    batch, heads, rows, _ = like.shape
    rows += lead
    if like.stride(1) < like.stride(2):
        return like.new_empty((batch, rows, heads, dim)).transpose(1, 2)
    return like.new_empty((batch, heads, rows, dim))


def empty_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lead: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), uninitialised, each in the memory order of its input; dq has ``lead`` rows more in front of each head."""
    return empty_ordered(q, q.shape[3], lead), empty_ordered(k, k.shape[3]), empty_ordered(v, v.shape[3])


def runs(kernel: str, spec: Specialization, given: Config | Choice, arch: int) -> KernelSequence:
    """Every kernel that runs for a config of a tuned one, in order, each with its own config."""
    choice = choice_of(kernel, given)
    variant, config = choice.variant, choice.config
    before, after = around(variant, spec, config, arch)
    if kernel == ACCUMULATES_DQ and not variant.before:
        delta = companion(BWD_DELTA, spec, arch)
        before = [(delta, delta.space.default(spec, arch))]
    return [*before, (variant, config), *after]


#: What torch's compiler has its code allocate by, on the current device: two thirds of empty_like's time, and no other
#: difference. A torch that no longer has it takes the public way.
ALLOCATE: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class Fresh:
    """Allocates uninitialised tensors: shaped, strided and typed, each, as one that it was made with, on a device."""

    def __init__(self, device: torch.device, *like: torch.Tensor) -> None:
        """``like``: without memory ("meta"): a plan made during a CUDA graph's warm-up would hold on to the graph's pool."""
        self.layouts = list[tuple[Any, ...]]()
        self.gives(*like)
        self.device, self.index = device, -1 if device.type == "cpu" else device.index

    def gives(self, *like: torch.Tensor) -> None:
        """The first tensors shaped and strided as these from now on, which take the same memory."""
        self.layouts[: len(like)] = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in like]

    def __call__(self) -> list[torch.Tensor]:
        filled = torch.are_deterministic_algorithms_enabled()  # what is uninitialised, if torch is asked to
        if filled or ALLOCATE is None or self.index < 0 or self.index != torch._C._cuda_getDevice():
            return [torch.empty_strided(*sizes, dtype=dtype, device=self.device) for *sizes, dtype in self.layouts]
        return [ALLOCATE(*layout) for layout in self.layouts]


def placed(
    asked: Workspaces, dtype: torch.dtype, start: int, brought: Collection[str] = ()
) -> tuple[dict[str, Workspace], int]:
    """Workspaces in a block of memory from ``start`` on, a multiple of ALIGNMENT, and where the next one may begin; ``dtype``:
    the problem's; ``brought``: those that a call has, which take no memory."""
    found: dict[str, Workspace] = {}
    asked = {name: what for name, what in asked.items() if name not in brought}
    for name, what in asked.items():
        if not isinstance(what, str):
            found[name] = made = Workspace(what[0], _DTYPES.get(what[1], dtype), start)
            start = -(-made.end // ALIGNMENT) * ALIGNMENT
    return found | {name: found[other] for name, other in asked.items() if isinstance(other, str)}, start


R = TypeVar("R", bound=tuple[Any, ...])


def ordered_before(
    problem: Problem, kernels: Sequence[R], given: Mapping[str, int]
) -> tuple[list[R], dict[str, TensorPlace]]:
    """(What is left to run, where in a call's tensors the order of tiles and their counter lie) where the call brings the order
    that the first of ``kernels`` would make; else all of them, and nothing. ``kernels``: each with its config behind it;
    ``given``: a call's tensors."""
    found = [*kernels]
    for one in kernels:
        variant, config = one[:2]
        if variant.role == PACKED_ORDER and problem.extent.scheduled:
            at = packed_order.table_at(problem, config["BLOCK_Q"], config["IN_TURNS"])
            if at is not None:
                found.remove(one)
                places: dict[str, TensorPlace] = {name: given[name] for name in QUEUE if name in given}
                return found, places | {ORDER: Within(given[ORDER], at)}
    return found, {}


class Kernels:
    """Tuned kernels one after the other, and what their variants run around them, bound to one problem.

    Called with all tensors in the order in which it was made with them, and ``size`` bytes for workspaces."""

    def __init__(self, configs: Chosen, problem: Problem, tensors: Mapping[str, torch.Tensor],
                 softmax_scale: float, device_index: int, shared: Workspaces = MappingProxyType({}),
                 parts: Mapping[str, int] = MappingProxyType({}), order: str = "") -> None:  # fmt: skip
        """``configs``: by kernel, in order; ``tensors``: all there are, workspaces aside, of which shapes and strides count;
        ``shared``: workspaces that any of the kernels may use; ``parts``: by kernel, into how many each query group, or a
        key tile's query blocks (QUERY_PARTS), are split, of dQ's kernel its keys; ``order``: of ``overlapped.ORDERS``, for dQ's
        kernel and dK/dV's at a time. ValueError: no such split (``group_parts.checked``, ``dq_parts.checked``) or order."""
        self.softmax_scale = softmax_scale
        #: which tensor is dq, if the kernel adds to float32 zeros, which are cast to dq afterwards
        self.casts: int | None = None
        some = next(iter(tensors.values()))
        strides = {name: strides_of(tensor) for name, tensor in tensors.items() if tensor.dim() == 4 or name == "dlse"}
        given = {name: index for index, name in enumerate(tensors)}
        common, size = placed(shared, some.dtype, 0)
        arch = arch_of(device_index) if device_index >= 0 else 0
        if order:
            overlapped.check_order(
                order, problem, {name: choice_of(name, one).variant for name, one in configs.items()}
            )
        made: dict[str, list[Any]] = {}  # by kernel, its launches
        for kernel, given_config in configs.items():
            choice = choice_of(kernel, given_config)
            tuned, config = choice.variant, choice.config
            if kernel == ACCUMULATES_DQ and not tuned.before:
                self.casts = given["dq"]
            keys = dq_parts.checked(problem, tuned, parts.get(kernel, 1), arch) if kernel == overlapped.DQ else 1
            count = group_parts.checked(problem, kernel, 1 if keys > 1 else parts.get(kernel, 1), config, arch)
            posed = group_parts.split(problem, count)
            all_kernels = runs(kernel, problem.specialization, choice, arch)
            kernels, queue = ordered_before(problem, all_kernels, given)
            at_a_time = bool(order) and kernel == overlapped.DQ
            if at_a_time:
                queue = {overlapped.ORDER_AGAIN: queue[ORDER]} if queue else {}
            asked = {**tuned.workspaces(posed, config), **group_parts.workspaces(problem, count, config)}
            if at_a_time:
                asked |= overlapped.workspaces(problem, asked)
            asked |= dq_parts.workspaces(problem, keys)
            own, size = placed(asked, some.dtype, size, queue)
            early = device_index >= 0 and starts_early(tuned, posed, config, device_index)
            workspaces = common | own
            places: dict[str, TensorPlace] = {
                **workspaces,
                **{n: at for n, at in given.items() if n not in QUEUE},
                **queue,
            }
            scalars = {**tuned.scalars(posed, config, early), "heads_kv": problem.heads_kv, "parts": count}
            bounds = [(kernel, one) for one in group_parts.launches(problem, count, kernels, strides, arch)]
            if keys > 1:
                bounds = [(kernel, one) for one in dq_parts.launches(problem, keys, strides, arch)]
            if at_a_time:
                bounds = [(of, overlapped.dq_alone(one)) for of, one in bounds]
                whole = group_parts.launches(problem, count, all_kernels, strides, arch)
                bounds = [*((overlapped.DELTA, overlapped.delta_alone(one)) for one in whole), *bounds]
            for name_of, one in bounds:
                memory = form(one.variant, one.problem.specialization, one.config).passed
                wanted = {name: one.renamed.get(tensor, tensor) for name, tensor in memory.items()}
                names = tuple(name for name, tensor in wanted.items() if tensor in places)
                renamed = {name: new for name, new in one.renamed.items() if name not in one.strides}
                shaped = {name: workspaces[new] for name, new in renamed.items() if new in workspaces}
                bound = bind(
                    one.variant, one.problem, one.config, one.strides, softmax_scale, names, device_index,
                    {**workspaces, **shaped}, {**scalars, **one.scalars}, choice.triton,
                )  # fmt: skip
                made.setdefault(name_of, []).append((bound, [places[wanted[name]] for name in names]))
        launches = [one for of_kernel in made.values() for one in of_kernel]
        self.chain = overlapped.chain(order, made, device_index) if order else chain(launches, device_index)
        self.size = size

    def block(self) -> list[torch.Tensor]:
        """Like the memory that a call wants for workspaces, without memory; none, if it wants none."""
        return [torch.empty(self.size, dtype=torch.uint8, device="meta")] if self.size else []

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if self.casts is None:
            return self.chain(tensors)
        dq = tensors[self.casts]
        sums = torch.zeros(dq.shape, dtype=torch.float32, device=dq.device)
        self.chain((*tensors[: self.casts], sums, *tensors[self.casts + 1 :]))
        torch.mul(sums, self.softmax_scale, out=dq)
        return None


class Step:
    """One kernel of a strategy by itself. Called with the tensors by name."""

    def __init__(self, kernel: str, problem: Problem, config: Config, tensors: Mapping[str, torch.Tensor],
                 softmax_scale: float, device_index: int) -> None:  # fmt: skip
        """``tensors``: as ``Kernels`` has them."""
        self.names = tuple(tensors)
        self.kernels = Kernels({kernel: config}, problem, tensors, softmax_scale, device_index)
        self.fresh = Fresh(next(iter(tensors.values())).device, *self.kernels.block())

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.kernels((*(tensors[name] for name in self.names), *self.fresh()))


def meta_offsets(extent: Extent, queue: tuple[str, ...] = QUEUE) -> dict[str, torch.Tensor]:
    """Like the tensors that a ragged call has after all others, without memory. ``queue``: of the order of tiles, where it
    comes with the call; of that only names count."""
    names = (*OFFSETS, *queue) if extent.scheduled else OFFSETS
    sizes = (extent.sequences + 1,)
    return {name: torch.empty(sizes, dtype=torch.int32, device="meta") for name in names} if extent.ragged else {}


class ForwardPlan:
    """q, k, v -> (o, lse). Needs Sk >= 1 and no empty dimension. A ragged problem's calls add cu_seqlens_q and cu_seqlens_k,
    a scheduled one's the order of tiles and their counter, and o is then (total, heads, dim)."""

    by_address = True  #: of a call's tensors the addresses alone count: any view of them will do

    def __init__(self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float,
                 config: Any, lead: int = 0) -> None:  # fmt: skip
        """``config``: as ``bound`` has it; ``lead``: o has so many rows more in each head, in front of those of q. Kernels do
        not write them. Dense calls only."""
        self.problem, self.softmax_scale, self.config, self.lead = problem, softmax_scale, config, lead
        o = empty_ordered(without_memory(q), problem.head_dim_v, lead)
        lse = torch.empty(lse_shape(q), dtype=torch.float32, device="meta")
        tensors = {"q": q, "k": k, "v": v, "o": o[:, :, lead:], "lse": lse, **meta_offsets(problem.extent)}
        self.chain, block = self.bound(problem, tensors, softmax_scale, config, q.get_device())
        given = without_batch(o) if problem.extent.ragged else o
        self.fresh = Fresh(q.device, given, lse, *block)

    @staticmethod
    def bound(
        problem: Problem, tensors: Mapping[str, torch.Tensor], softmax_scale: float, config: Any, device_index: int
    ) -> tuple[Chain | InterpretedChain, list[torch.Tensor]]:
        """(What runs, called with the tensors and then with memory for workspaces, like that memory, none if there are none).
        ``tensors``: by name, of which shapes and strides count; ``config``: of the tuned kernel, or its Choice."""
        kernels = Kernels({"fwd": config}, problem, tensors, softmax_scale, device_index)
        return kernels.chain, kernels.block()

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse, *block = self.fresh()
        self.chain((q, k, v, o[:, :, self.lead :] if self.lead else o, lse, *offsets, *block))
        return o, lse


class BackwardPlan:
    """do, dlse, q, k, v, o, lse -> (dq, dk, dv), each in the memory order of its input. A ragged problem's calls add
    cu_seqlens_q and cu_seqlens_k, a scheduled one's the order of tiles."""

    def __init__(self, problem: Problem, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
                 v: torch.Tensor, o: torch.Tensor, softmax_scale: float, strategy: str,
                 configs: Chosen,
                 parts: Mapping[str, int] = MappingProxyType({}), order: str = "", lead: int = 0) -> None:  # fmt: skip
        """``configs``, ``parts``, ``order``: as ``Kernels`` has them; ``lead``: of dq, as ``ForwardPlan`` has it of o."""
        self.order, self.lead = order, lead
        dq, dk, dv = empty_gradients(*map(without_memory, (q, k, v)), lead=lead)
        rows = tuple(q.shape[:3])
        tensors = {
            "q": q,
            "k": k,
            "v": v,
            "o": o,
            "do": do,
            "lse": torch.empty(rows, device="meta"),
            "dq": dq[:, :, lead:],
            "dk": dk,
            "dv": dv,
        }
        tensors |= ({} if dlse is None else {"dlse": dlse}) | meta_offsets(problem.extent, (ORDER,))
        ordered = {kernel: configs[kernel] for kernel in STRATEGIES[strategy]}
        shared: Workspaces = {"delta": (rows, "fp32")}
        self.kernels = Kernels(ordered, problem, tensors, softmax_scale, q.get_device(), shared, parts, order)
        self.fresh = Fresh(q.device, dq, dk, dv, *self.kernels.block())

    def __call__(
        self, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor, *offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        dq, dk, dv, *block = self.fresh()
        tensors = (q, k, v, o, do, lse, dq[:, :, self.lead :] if self.lead else dq, dk, dv)
        self.kernels((*tensors, *offsets, *block) if dlse is None else (*tensors, dlse, *offsets, *block))
        return dq, dk, dv


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask, softmax_scale: float, config: Config,
    score: Score = NONE, offsets: tuple[torch.Tensor, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One forward with an explicit config. q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o, lse (of
    ``lse_shape``, as the backward wants it). ``offsets``: cu_seqlens of queries and keys of packed sequences, where B is 1."""
    problem = describe(q, k, v, mask, softmax_scale, score, extent_of(offsets))
    o, lse = ForwardPlan(problem, q, k, v, softmax_scale, config)(q, k, v, *offsets)
    return in_one_batch(o) if offsets else o, lse


def extent_of(offsets: tuple[torch.Tensor, ...]) -> Extent:
    """Of the sequences between these, if there are any."""
    return Extent(RAGGED, len(offsets[0]) - 1) if offsets else WHOLE


def backward(
    do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, *, mask: Mask, softmax_scale: float, strategy: str, configs: Mapping[str, Config],
    score: Score = NONE, parts: Mapping[str, int] = MappingProxyType({}), order: str = "",
    offsets: tuple[torch.Tensor, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One backward with explicit configs. strategy: "split" (deterministic) or "fused" (atomic sums of dQ); parts: by kernel,
    into how many each query group is split, a divisor of its size, or of the Hopper "bwd_dq" its keys (default 1); order: one
    of ``overlapped.ORDERS``, for both Hopper kernels of a split backward at a time (default: one after the other);
    ``offsets``: as ``forward`` has them."""
    problem = describe(q, k, v, mask, softmax_scale, score, extent_of(offsets), o=o, do=do)
    plan = BackwardPlan(problem, do, dlse, q, k, v, o, softmax_scale, strategy, configs, parts, order)
    return plan(do, dlse, q, k, v, o, lse, *offsets)
