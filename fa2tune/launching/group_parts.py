"""A backward whose query groups are split into parts, each of which the kernels that make dK and dV take for a key head of its
own: more programs where there are few key heads. Of ungrouped heads the fused Hopper kernel has another form for the same
(QUERY_PARTS), whose parts are of a key tile's query blocks, and read its own K and V.

K and V are written once per part before (role bwd_spread), unless there is one key head. The parts' dK and dV, in the call's
dtype, are summed in float32 in a fixed order after (role bwd_gather). The kernels themselves see a
call with more key heads, so their machine code is that of any call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fa2tune.compiling.compiler import KernelSequence
from fa2tune.compiling.support import companion, companion_path
from fa2tune.launching.launch import Strides
from fa2tune.spec.extent import WHOLE
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import BWD_GATHER, BWD_SPREAD
from fa2tune.spec.score import NONE
from fa2tune.spec.variant import Variant, Workspaces

#: Kernels that make dK and dV, all query heads of a key head in one program.
MAKE_DK_DV = ("bwd_dkdv", "bwd_fused")
#: Numbers of parts of query blocks; up to the second of packed sequences, and of calls of less than so many times as many
#: queries as keys, which were raced with no more.
QUERY_COUNTS, MOST_RACED, MANY_QUERIES = (2, 3, 4, 6, 8, 12, 16, 24, 32), 8, 8
#: Their tensors that are workspaces where groups are split, by the names of these.
PARTS_OF = {name: f"{name}_parts" for name in ("k", "v", "dk", "dv")}


@dataclass(frozen=True)
class Bound:
    """One launch: a kernel with what it is bound to."""

    variant: Variant
    config: Config
    problem: Problem
    strides: Strides
    renamed: Mapping[str, str]  #: tensor of the kernel -> tensor or workspace that it gets, where the names differ
    scalars: Mapping[str, int] = field(default_factory=dict)  #: arguments that are not the problem's


def allowed(problem: Problem) -> tuple[int, ...]:
    """Numbers of parts that a group can be split into: its divisors, as long as no kernel needs other strides for it."""
    group = problem.group
    return tuple(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or _addressed(problem, n)))


def _addressed(problem: Problem, parts: int) -> bool:
    """Whether the kernels' offsets reach all parts of a head dim's rows."""
    widest = max(problem.head_dim, problem.head_dim_v)
    return problem.wide or problem.heads_kv * parts * problem.seqlen_k * widest < 1 << 31


@lru_cache(maxsize=1024)
def counts(problem: Problem, arch: int) -> tuple[int, ...]:
    """Those of ``allowed`` that kernels are there for."""
    found = allowed(problem)
    return found if len(found) == 1 or can(problem, arch) else (1,)


def checked(problem: Problem, kernel: str, parts: int, config: Config, arch: int) -> int:
    """ValueError: a group, or query blocks, cannot be split like that."""
    fitting = allowed(problem) if kernel in MAKE_DK_DV else (1,)
    if of_queries(config):
        fitting = query_counts(problem, arch)
    if parts not in fitting:
        raise ValueError(f"parts: got {parts} for {kernel}, allowed are {', '.join(map(str, fitting)) or 'none'}")
    return parts


def of_queries(config: Config) -> bool:
    """Whether a kernel's parts are of query blocks, not of groups."""
    return bool(config.get("QUERY_PARTS"))


def query_counts(problem: Problem, arch: int) -> tuple[int, ...]:
    """Numbers of parts that query blocks can be split into: none, of grouped heads or where no kernel adds parts up."""
    if problem.group != 1 or not can(problem, arch, (BWD_GATHER,)):
        return ()
    many = not problem.extent.ragged and problem.seqlen_q >= MANY_QUERIES * problem.seqlen_k
    return tuple(n for n in QUERY_COUNTS if (many or n <= MOST_RACED) and _addressed(problem, n))


def split(problem: Problem, parts: int) -> Problem:
    """As the kernels see it."""
    return problem if parts == 1 else replace(problem, heads_kv=problem.heads_kv * parts)


def sizes_of(problem: Problem, name: str) -> tuple[int, ...]:
    """Of k, v, dk or dv of a problem that is split."""
    dim = problem.head_dim_v if name in ("v", "dv") else problem.head_dim
    return problem.batch, problem.heads_kv, problem.seqlen_k, dim


def dense_strides(problem: Problem, name: str) -> tuple[int, int, int]:
    """Of batch, heads and rows of the same, whose parts lie one after the other."""
    sizes = sizes_of(problem, name)
    return math.prod(sizes[1:]), math.prod(sizes[2:]), sizes[3]


def copies(problem: Problem, queries: bool = False) -> bool:
    """Whether K and V are written once per part: not where all parts are of the one key head, which a head stride of 0 finds,
    by pointer and by TMA. (With more key heads no stride does.) ``queries``: nor where parts are of query blocks, whose kernel
    knows the key head."""
    return problem.heads_kv > 1 and not queries


def workspaces(problem: Problem, parts: int, config: Config) -> Workspaces:
    """Memory for the parts."""
    if parts == 1:
        return {}
    names = PARTS_OF if copies(problem, of_queries(config)) else ("dk", "dv")
    return {PARTS_OF[name]: (sizes_of(split(problem, parts), name), "") for name in names}


def _strides(problem: Problem, given: Strides, copied: bool, queries: bool) -> Strides:
    """Under the names of the tensors in whose place the parts are; ``problem``: split; ``queries``: all parts of a key head
    read its own K and V."""
    found = dict(given)
    for name in PARTS_OF:
        if copied or name in ("dk", "dv"):
            found[name] = dense_strides(problem, name)
        elif not queries:
            found[name] = given[name][0], 0, given[name][2]
    return found


def _posed(problem: Problem) -> dict[str, Problem]:
    """Role -> a problem whose specialization its kernel is compiled for."""
    plain = replace(problem, mask=FULL, score=NONE, negate=False, precision="ieee", extent=WHOLE)
    return {BWD_SPREAD: plain, BWD_GATHER: replace(plain, aligned=True)}


def can(problem: Problem, arch: int, roles: Iterable[str] = (BWD_SPREAD, BWD_GATHER)) -> bool:
    """Whether there are kernels for what runs before and after."""
    posed = _posed(problem)
    return all(companion_path(role, posed[role].specialization, arch) for role in roles)


def gather(problem: Problem, arch: int) -> tuple[Variant, Config, Problem]:
    """What runs after, as in ``helpers``."""
    return _helper(BWD_GATHER, problem, arch)


def _helper(role: str, problem: Problem, arch: int) -> tuple[Variant, Config, Problem]:
    posed = _posed(problem)[role]
    variant = companion(role, posed.specialization, arch)
    return variant, variant.space.default(posed.specialization, arch), posed


def helpers(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What runs before, and what runs after, each with its config and a problem whose specialization it is compiled for: one
    binary serves all masks and score terms, and packed sequences, whose rows are those of one. What runs after reads the parts
    and writes dK and dV, which are aligned whatever K and V are: loads of less than 4 bytes would wait for one another."""
    return [_helper(role, problem, arch) for role in (BWD_SPREAD, BWD_GATHER)]


def needed(problem: Problem, config: Config, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """Those of ``helpers`` that run where a kernel's groups, or query blocks, are split."""
    return helpers(problem, arch)[0 if copies(problem, of_queries(config)) else 1 :]


def launches(problem: Problem, parts: int, kernels: KernelSequence, given: Strides, arch: int) -> Iterator[Bound]:
    """Everything that runs for a kernel, in order. ``kernels``: its own and those around it; ``given``: strides of the call's
    tensors."""
    if parts == 1:
        for variant, config in kernels:
            yield Bound(variant, config, problem, given, {})
        return
    queries = any(of_queries(config) for _, config in kernels)
    ours, copied = split(problem, parts), copies(problem, queries)
    # of so many key heads the kernel's blocks of K and V are those of the first ones alone
    scalars = {"group": parts} if queries else {}
    if copied:
        spread, its_config, plain = _helper(BWD_SPREAD, problem, arch)
        yield Bound(spread, its_config, split(plain, parts), given, {})
    renamed = {name: own for name, own in PARTS_OF.items() if copied or name in ("dk", "dv")}
    for variant, config in kernels:
        yield Bound(variant, config, ours, _strides(ours, given, copied, queries), renamed, scalars)
    yield Bound(*gather(problem, arch), given, {})
