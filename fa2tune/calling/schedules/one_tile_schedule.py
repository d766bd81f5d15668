"""Whether one kernel makes the whole backward of a call whose keys are one tile, and into how many parts its query blocks are
split: arithmetic on the host, no GPU.

A strategy's kernels are three launches or four, with sums of dQ or delta in memory between them. Of at most 128 keys
``launching/one_key_tile.py`` has one launch, two with parts. Its programs take turns, as many at once as multiprocessors hold;
all of them together are no faster than memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from fa2tune.calling.schedules import fused_schedule, split_backward_schedule
from fa2tune.calling.schedules.key_splits_schedule import MEASURED_ON
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import one_key_tile
from fa2tune.launching.overlapped import DKDV, DQ
from fa2tune.launching.passes import ACCUMULATES_DQ
from fa2tune.search_spaces.lib.hopper import block_dims
from fa2tune.spec.mask import FULL, queries_of
from fa2tune.spec.problem import ITEMSIZE, Config, Problem
from fa2tune.spec.variant import Variant

#: Whether any call takes it.
ONE_KEY_TILE = True


class OneTilePace(NamedTuple):
    """Microseconds of a program, where all of its columns are the head dims'."""

    block: float  #: of 64 queries with its keys
    ends: float  #: start and end of a tile, but for what waits for memory; of programs that take turns its end
    start: float = 0.0  #: of programs that take turns, once


#: By columns of a program, halves, and whether programs take turns. Fitted with what follows to 60 times of 16 calls on an
#: H200: 5 % off, root mean square (docs/experiments/one-key-tile.md).
PACES_OF_ONE: dict[tuple[int, int, bool], OneTilePace] = {
    (64, 1, False): OneTilePace(1.91, 2.3),
    (64, 1, True): OneTilePace(2.04, 0.76, 2.17),
    (128, 1, False): OneTilePace(3.22, 2.99),
    (64, 2, False): OneTilePace(2.74, 2.51),
    (128, 2, False): OneTilePace(4.06, 4.12),
}
#: Share of a block and of ends that does not shrink with the columns of Q or V alone.
FIXED_SHARE = 0.15
#: Of a call; of the launch that adds parts up, and of so many parts, which it loads at once.
LAUNCH_US, GATHER_US, GATHERED_US = 1.5, 1.16, 0.36
#: Share that programs wait of the time in which memory moves what all of them begin with.
WAITED = 0.57
#: Share of the memory's bandwidth that calls reach.
MEMORY_RATE = 0.8
#: It must be predicted to be faster than what serves otherwise by this share; than the fused kernel, of whose kernels started
#: early the estimate is as near as this one's, by the other.
MARGIN, FUSED_MARGIN = 0.1, 0.01
#: Parts are rounded before they are added up. With one query head a key head they must be predicted to be faster by this share
#: than one part: of 8 heads of 128 tokens dV was 0.024 off with two parts, 0.015 with one, where its own rounding is 0.014.
ROUNDED_TWICE = 0.15
#: Programs that there are, in turns of as many as there are multiprocessors.
TURNS = (0.5, 1, 2)
#: Causal calls of more queries than so many times their keys have blocks that see no key, which the kernel computes.
MOST_BLIND = 2


def _moved(problem: Problem, config: Config) -> float:
    """Bytes of q, o, do and dq, of k, v, dk and dv, each once, and of parts."""
    rows = problem.heads_q * problem.seqlen_q * (2 * problem.head_dim + 2 * problem.head_dim_v)
    keys = problem.heads_kv * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    keys *= 2 if config["PARTS"] == 1 else 2 * config["PARTS"] + 1
    return problem.batch * (rows + keys) * ITEMSIZE[problem.dtype]


def _blocks(problem: Problem, config: Config) -> int:
    """Query blocks of a key head, over all of its query heads."""
    return -(-problem.seqlen_q // config["BLOCK_M"]) * problem.group


def _begun_with(problem: Problem, config: Config) -> float:
    """Bytes that a program waits for before its first products: all start at a time, and share the memory."""
    columns = problem.head_dim + problem.head_dim_v
    rows = min(2 * config["BLOCK_M"], problem.seqlen_q * problem.group)
    return ITEMSIZE[problem.dtype] * (problem.seqlen_k * columns + rows * (columns + problem.head_dim_v))


def one_tile_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds of a whole backward, estimated."""
    halves, parts, in_turns = config["HALVES"], config["PARTS"], config["PERSISTENT"]
    dims = block_dims(problem.specialization)
    pace = PACES_OF_ONE[max(dims) // halves, halves, in_turns]
    share = FIXED_SHARE + (1 - FIXED_SHARE) * sum(dims) / (2 * max(dims))
    rate = gpu.hbm_gbs * 1e3 * MEMORY_RATE
    tiles, at_once = problem.batch * problem.heads_kv * parts, gpu.sm_count // halves
    turns = -(-tiles // at_once)
    waits = WAITED * min(tiles, at_once) * _begun_with(problem, config) / rate
    busy = turns * share * (pace.ends + -(-_blocks(problem, config) // parts) * pace.block)
    busy += pace.start + waits if in_turns else turns * waits
    gathered = GATHER_US + -(-parts // fused_schedule.GATHERED) * GATHERED_US if parts > 1 else 0.0
    return LAUNCH_US + gathered + max(busy, _moved(problem, config) / rate)


def candidates(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """In one part, also with programs that take turns, and in as many as TURNS asks for."""
    spec, space = problem.specialization, one_key_tile.space_of(problem, gpu.arch)
    heads, most = problem.batch * problem.heads_kv, one_key_tile.most_parts(problem, gpu.arch)
    for halves in space.halves_of(spec):
        counts = {int(turns * gpu.sm_count) // (heads * halves) for turns in TURNS}
        blocks = _blocks(problem, space.config_of(spec, 1, halves))
        for parts in sorted({1} | {min(count, blocks, most) for count in counts if count}):
            yield space.config_of(spec, parts, halves)
    if space.can_take_turns(spec) and heads > gpu.sm_count:
        yield space.config_of(spec, 1, turns=True)


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config]:
    """(estimated microseconds, config) of the fastest, the fewest programs where two are as fast."""
    found = [(one_tile_us(problem, config, gpu), config) for config in candidates(problem, gpu)]

    def fastest(some: list[tuple[float, Config]]) -> tuple[float, Config]:
        return min(some, key=lambda one: (one[0], one[1]["PARTS"] * one[1]["HALVES"]))

    whole, any_parts = fastest([one for one in found if one[1]["PARTS"] == 1]), fastest(found)
    rounded_once = problem.group == 1 and any_parts[0] > (1 - ROUNDED_TWICE) * whole[0]
    return whole if rounded_once else any_parts


def asked(problem: Problem, gpu: Gpu) -> bool:
    """Whether the kernel is asked for such a call at all."""
    if not ONE_KEY_TILE or gpu.arch not in MEASURED_ON or problem.is_empty or problem.extent.ragged:
        return False
    if not fused_schedule.recorded(problem.mask) or not one_key_tile.can(problem, gpu.arch):
        return False
    return problem.mask == FULL or queries_of(problem.mask, problem.seqlen_q) <= MOST_BLIND * problem.seqlen_k


def otherwise_us(
    problem: Problem, choices: Mapping[str, Choice], parts: Mapping[str, int], order: str, gpu: Gpu
) -> float | None:  # fmt: skip
    """Microseconds of what serves without it, estimated; None: of such kernels there is no estimate. ``parts``: by kernel;
    ``order``: of both kernels of a split backward."""
    if set(choices) == {ACCUMULATES_DQ} and fused_schedule.covers(choices[ACCUMULATES_DQ].variant, problem):
        return fused_schedule.predicted_us(problem, choices[ACCUMULATES_DQ].config, gpu, parts.get(ACCUMULATES_DQ, 1))
    if split_backward_schedule.covers(problem, choices):
        splits = parts.get(DQ, 1)
        return split_backward_schedule.predicted_us(problem, choices, parts.get(DKDV, 1), gpu, order, splits=splits)
    return None


def config_of(
    problem: Problem, choices: Mapping[str, Choice], parts: Mapping[str, int], order: str, gpu: Gpu
) -> Config | None:  # fmt: skip
    """Of the kernel that makes the whole backward in place of ``choices``; None: that is not expected to be faster. ``parts``,
    ``order``: as ``otherwise_us`` has them."""
    if not asked(problem, gpu) or (otherwise := otherwise_us(problem, choices, parts, order, gpu)) is None:
        return None
    time, config = best(problem, gpu)
    early = ACCUMULATES_DQ in choices and choices[ACCUMULATES_DQ].config.get("EARLY_START")
    return config if time < (1 - (FUSED_MARGIN if early else MARGIN)) * otherwise else None


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What may run in place of a backward's kernels, whatever a call's batch, heads and lengths are."""
    if not ONE_KEY_TILE or arch not in MEASURED_ON or not fused_schedule.recorded(problem.mask):
        return []
    if problem.extent.ragged or not one_key_tile.able(problem, arch):
        return []
    spec, space = problem.specialization, one_key_tile.space_of(problem, arch)
    counts = (1, 2) if one_key_tile.most_parts(problem, arch) > 1 else (1,)
    configs = [space.config_of(spec, parts, halves) for halves in space.halves_of(spec) for parts in counts]
    if space.can_take_turns(spec):
        configs.append(space.config_of(spec, 1, turns=True))
    return [one for config in configs for one in one_key_tile.kernels(problem, config, arch)]


def about(problem: Problem, config: Config, arch: int) -> str:
    """In one sentence, what runs in place of a backward's kernels."""
    parts, name = config["PARTS"], one_key_tile.kernels(problem, config, arch)[0][0].short_name
    said = f"bwd: few keys, so {name} makes dQ, dK and dV, which is expected to be faster and has no row"
    return (
        f"{said}." if parts == 1 else f"{said}: queries are split into {parts} parts, whose dK and dV are summed after."
    )
