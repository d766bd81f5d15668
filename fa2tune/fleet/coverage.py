"""Which tuning keys a model needs on a GPU, which row would serve each, and what closes the gaps."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fa2tune.calling import dispatch
from fa2tune.fleet.modelconfig import Attention
from fa2tune.gpus import Gpu
from fa2tune.problem import BACKWARD, BUCKETS, ROADS, SPLIT, WORKLOAD_TOKENS, Problem, TuningKey, bucket_of
from fa2tune.rows import lookup
from fa2tune.rows.reader import Layer
from fa2tune.rows.row import Row

OWN = "own row"  #: for this very key, made with this toolchain
STALE = "stale row"  #: for this very key, made with another
NEAR = "other row"  #: of another key, which serves it
DEFAULT = "default config"  #: no row serves
STANDINGS = (OWN, STALE, NEAR, DEFAULT)


@dataclass(frozen=True)
class Need:
    """A tuning key that a model asks for, and how it would be served."""

    key: TuningKey
    answer: lookup.Answer | None

    @property
    def standing(self) -> str:
        """One of STANDINGS."""
        if self.answer is None:
            return DEFAULT
        if self.answer.row.key != self.key:
            return NEAR
        return STALE if self.answer.stale else OWN

    @property
    def rung(self) -> str:
        return self.answer.rung if self.answer else "no row serves"


def lengths(attention: Attention, asked: Iterable[int] = ()) -> list[int]:
    """The length buckets that a kind of attention needs: those of ``asked`` lengths, else all that it may reach."""
    asked = list(asked)
    if asked:
        return sorted({bucket_of(length, length) for length in asked if length <= attention.longest})
    if attention.longest < 1:
        return []
    last = bucket_of(attention.longest, attention.longest)
    return [bucket for bucket in BUCKETS if bucket <= last]


def _problem(attention: Attention, bucket: int, causal: bool) -> Problem:
    length = min(bucket, attention.longest)
    return Problem(
        attention.dtype, max(1, WORKLOAD_TOKENS // bucket), attention.heads_q, attention.heads_kv, length, length,
        attention.head_dim, attention.head_dim_v, causal,
    )  # fmt: skip


def needs(
    attention: Attention, gpu: Gpu, layers: Sequence[Layer], toolchain: lookup.Toolchain, *,
    buckets: Iterable[int], causal: bool = True, training: bool = True, deterministic: bool = False,
) -> list[Need]:  # fmt: skip
    """What one kind of attention needs at these lengths: the forward; for training the choice of the backward's road
    (where it is not settled by ``deterministic``) and the kernels of the road that would be taken."""
    found = []
    for bucket in buckets:
        problem = _problem(attention, bucket, causal)

        def served(kernel: str, why_not: Callable[[Row], str | None], problem: Problem = problem) -> Need:
            key = dispatch.key_of(problem, kernel, gpu)
            return Need(key, lookup.find(key, gpu.silicon, layers, why_not, toolchain))

        found.append(served("fwd", dispatch.kind_refusal(problem, gpu, None)))
        if training:
            road, kinds = SPLIT, {}
            if not deterministic:
                choice = served(BACKWARD, dispatch.road_refusal(problem, gpu, False, layers))
                if choice.answer:
                    road, kinds = choice.answer.row.road, dispatch.kinds_of(choice.answer.row)
                found.append(choice)
            for kernel in ROADS[road]:
                found.append(served(kernel, dispatch.kind_refusal(problem, gpu, kinds.get(kernel))))
    return found


def commands(found: Iterable[Need], cache: str | None = None) -> list[str]:
    """What to run so that every key has a row of its own, made with this toolchain."""
    gaps: dict[tuple[object, ...], tuple[set[str], set[int]]] = {}
    stale = False
    for need in found:
        key = need.key
        if need.standing in (NEAR, DEFAULT):
            about = (key.gpu, key.head_dim, key.head_dim_v, key.dtype, key.causal)
            kernels, buckets = gaps.setdefault(about, (set(), set()))
            kernels.add(key.kernel)
            buckets.add(key.bucket)
        stale |= need.standing == STALE
    into = f" --cache {shlex.quote(cache)}" if cache else ""
    lines = []
    for (gpu, dim, dim_v, dtype, causal), (kernels, buckets) in gaps.items():
        pass_ = "fwd" if kernels == {"fwd"} else "bwd" if "fwd" not in kernels else "both"
        line = f"fa2tune tune --gpu {shlex.quote(str(gpu))} --headdim {dim}"
        line += f" --headdim-v {dim_v}" if dim_v != dim else ""
        line += f" --dtype {dtype} {'--causal' if causal else '--full'} --pass {pass_}"
        if buckets != set(BUCKETS):
            line += "".join(f" --seqlen {bucket}" for bucket in sorted(buckets))
        lines.append(line + into)
    if stale:
        lines.append(f"fa2tune cache verify --stale --repair{into}")
    return lines
