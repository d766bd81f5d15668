"""Whether a backward of head dims above 128 goes through dS in memory, with which form of dQ's kernel, in how many parts of the
keys there, and in how many slices: arithmetic on the host, no GPU.

Both kernels of ``launching/stored_ds.py`` take five products where the split ones take seven, and write and read dS, one kernel
after the other. Tiles are given out as ``split_backward_schedule`` has it; to programs that take tile after tile as
``tile_order`` has it. Constants are fitted to times of an H200, those of dQ's kernel to fewer of them
(docs/experiments/split-backward.md)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fa2tune.calling.schedules import fused_schedule, split_backward_schedule
from fa2tune.calling.schedules.key_splits_schedule import MEASURED_ON
from fa2tune.calling.schedules.split_backward_schedule import BLOCK, BYTES_PER_US, Tiles
from fa2tune.calling.schedules.tile_order import in_bands
from fa2tune.compiling.choice import Choice
from fa2tune.compiling.registry import space_file
from fa2tune.gpus import Gpu
from fa2tune.launching import dq_parts, stored_ds
from fa2tune.launching.overlapped import DKDV, DQ
from fa2tune.search_spaces.lib.hopper import columns
from fa2tune.search_spaces.sm90 import bwd_dkdv
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import ITEMSIZE, Config, Problem
from fa2tune.spec.variant import Variant

#: Whether any call takes it.
STORED_DS = True


class MainPace(NamedTuple):
    """Microseconds of the kernel that writes dS, of 512 columns."""

    block: float  #: of 64 queries and 64 keys
    masked: float  #: how many times as long one takes under a mask
    ends: float  #: a tile's start and end
    program: float  #: a program's, besides


#: Of programs that take one tile, and tile after tile. Fitted with ``benchmarks/stored_tiles.py`` and
#: ``benchmarks/early_stored.py``, 7.8 % off, root mean square.
ONE_TILE, TILE_AFTER_TILE = MainPace(1.5, 1.08, 7.2, 0.0), MainPace(1.45, 1.18, 4.8, 2.8)
#: A block where the head dims of Q and V differ takes so many times what their columns say: five calls, 1.01 to 1.13 too high.
APART = 0.93
#: Bands of heads, a tile of each in turn, under a mask; and without one, where all tiles are as long.
BANDS, UNMASKED_BAND = (1, 2, 4, 8, 16, 64), 4
#: Of the kernel behind it: 64 keys of the 64 rows of a group, for each of COLUMNS columns; and a tile's start and end, of 512.
DQ_BLOCK_US, DQ_COLUMNS, DQ_ENDS_US = 0.158, 192, 5.8
#: Share of the memory's bandwidth at which that kernel reads dS, at most.
DS_RATE = 0.39
#: Programs that make dQ where keys are split into parts: so many times as many as multiprocessors.
DQ_TURNS = (1, 2)
#: Of both launches of one more slice; and of delta's launch at least. Kernels start early, so that launches add nothing else.
SLICE_US, DELTA_US = 3.8, 1.9
#: It must be predicted to be faster than what serves otherwise by this share. Of 210 raced calls, the choice is then 1 % slower
#: than the faster form in the geometric mean; 1.7 % with 0.06.
MARGIN = 0.1
#: Share of the GPU's memory that dS may take. Calls of more run in slices, whose kernels fill the GPU less: with half of it two
#: sliced calls took 6 and 9 % longer, with twice as much 2 % less.
MOST_MEMORY = 1 / 64


def _main_tiles(problem: Problem, config: Config) -> Tiles:
    block, ends = split_backward_schedule.shares(problem, config)
    pace = TILE_AFTER_TILE if config["PERSISTENT"] else ONE_TILE
    block *= pace.block * (1.0 if problem.mask == FULL else pace.masked)
    block *= APART if problem.head_dim != problem.head_dim_v else 1.0
    met = fused_schedule.blocks_met(problem.seqlen_q, problem.seqlen_k, problem.mask, BLOCK, BLOCK)
    costs = tuple([count * problem.group * block + ends * pace.ends for count in met])
    return Tiles(costs, problem.batch * problem.heads_kv, config["HEADS_PER_WAVE"])


@lru_cache(maxsize=256)
def _busiest_us(tiles: Tiles, programs: int) -> float:
    """Of the program with the most work, of those that take tile after tile."""
    if min(tiles.costs) == max(tiles.costs):
        return -(-tiles.number // programs) * tiles.costs[0]
    played = min(tiles.heads, max(1, fused_schedule.MOST_TILES // len(tiles.costs)))
    work = in_bands(np.array(tiles.costs[::-1]), played, min(tiles.band, played), programs)
    return float(work.max()) * tiles.heads / played


def _main_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Of the kernel that writes dS."""
    tiles = _main_tiles(problem, config)
    if not config["PERSISTENT"]:
        return split_backward_schedule.last(tiles, gpu.sm_count)
    _, ends = split_backward_schedule.shares(problem, config)
    return _busiest_us(tiles, gpu.sm_count) + ends * TILE_AFTER_TILE.program


def _dq_tiles(problem: Problem, config: Config) -> Tiles:
    _, ends = split_backward_schedule.shares(problem, config)
    groups, wide = config["DQ_GROUPS"], columns(problem.specialization, config)[0]
    block = DQ_BLOCK_US * groups * wide / DQ_COLUMNS
    seen = split_backward_schedule.keys_seen(problem.seqlen_q, problem.seqlen_k, BLOCK * groups, problem.mask)
    splits = config["DQ_SPLITS"]
    costs = tuple([math.ceil(-(-keys // BLOCK) / splits) * block + ends * DQ_ENDS_US for keys in seen])
    return Tiles(costs, problem.batch * problem.heads_q * splits, 1)


def _slice_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Of both kernels, one after the other; no faster than dS is read."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    read = rows * problem.keys_seen * ITEMSIZE[problem.dtype]
    dq = split_backward_schedule.last(_dq_tiles(problem, config), gpu.sm_count)
    made = _main_us(problem, config, gpu) + max(dq, read / (gpu.hbm_gbs * 1e3 * DS_RATE))
    if config["DQ_SPLITS"] == 1:
        return made
    sums = split_backward_schedule.sum_bytes(problem, config["DQ_SPLITS"])
    return made + split_backward_schedule.COMBINE_US + 2 * sums / (gpu.hbm_gbs * 1e3)


def stored_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds of a whole backward, estimated."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    delta = max(DELTA_US, 2 * rows * problem.head_dim_v * ITEMSIZE[problem.dtype] / BYTES_PER_US)
    each = Counter(one.of(problem) for one in stored_ds.slices(problem, config["SLICES"]))
    busy = sum(count * _slice_us(one, config, gpu) for one, count in each.items())
    return (sum(each.values()) - 1) * SLICE_US + delta + busy


def configs(problem: Problem, row: Config) -> list[Config]:
    """A tile a program, and tile after tile, each with either number of groups that make dQ, three first, which read K less
    often. ``row``: of dK/dV's kernel."""
    spec, arch = problem.specialization, MEASURED_ON[0]
    kernel = stored_ds.kernel(problem, arch)
    file = space_file(kernel.name)
    usual = file.of_row(problem, row)
    forms = [usual, *filter(None, [file.tile_after_tile(spec, usual)])]
    found = [{**one, "DQ_GROUPS": groups} for one in forms for groups in (3, 2)]
    return [one for one in found if kernel.space.broken(one, spec, arch) is None]


def _splits(problem: Problem, config: Config, gpu: Gpu) -> list[int]:
    """Parts of the keys that are worth an estimate."""
    programs = problem.query_tiles(BLOCK * config["DQ_GROUPS"]) * problem.heads_q
    most = stored_ds.most_splits(problem, config, gpu.arch)
    counts = {min(most, turns * gpu.sm_count // programs) for turns in DQ_TURNS}
    limit = split_backward_schedule.MOST_BYTES
    return sorted({1} | {one for one in counts if one > 1 and split_backward_schedule.sum_bytes(problem, one) <= limit})


def _in_best_band(part: Problem, config: Config, gpu: Gpu) -> Config:
    """In the band of heads in which the kernel that writes dS is expected to be the fastest, the narrowest of those. ``part``:
    the largest slice of the call."""
    if not config["PERSISTENT"]:
        return config
    heads = part.batch * part.heads_kv
    bands = {min(band, heads): band for band in reversed(BANDS)} if part.mask != FULL else {0: UNMASKED_BAND}
    return min(
        ({**config, "HEADS_PER_WAVE": bands[least]} for least in sorted(bands)),
        key=lambda one: _main_us(part, one, gpu),
    )


@lru_cache(maxsize=1024)
def _best(problem: Problem, row: tuple[tuple[str, object], ...], gpu: Gpu) -> tuple[float, Config] | None:
    """(Estimated microseconds, config) of the fastest; None: dS of a single key head takes too much memory, or the call too
    many slices, or several for a score term that reads which head or sequence it is."""
    count = stored_ds.fewest_slices(problem, int(gpu.hbm_bytes * MOST_MEMORY), gpu.arch)
    if not 1 <= count <= (1 if problem.score.numbered else stored_ds.most_slices(problem, gpu.arch)):
        return None
    part = stored_ds.slices(problem, count)[0].of(problem)
    many = part.key_tiles(BLOCK) * part.heads_kv > gpu.sm_count  # else no program has another tile
    banded = [
        _in_best_band(part, {**config, "SLICES": count}, gpu)
        for config in configs(problem, dict(row))
        if many or not config["PERSISTENT"]
    ]
    found = [{**one, "DQ_SPLITS": splits} for one in banded for splits in _splits(problem, one, gpu)]
    return min(((stored_us(problem, config, gpu), config) for config in found), key=lambda one: one[0], default=None)


def asked(problem: Problem, gpu: Gpu) -> bool:
    """Whether dS may go through memory in such a call at all."""
    if not STORED_DS or gpu.arch not in MEASURED_ON or problem.is_empty or problem.extent.ragged:
        return False
    return fused_schedule.recorded(problem.mask) and stored_ds.able(problem, gpu.arch)


def config_of(
    problem: Problem, choices: Mapping[str, Choice], parts: Mapping[str, int], order: str, gpu: Gpu
) -> Config | None:  # fmt: skip
    """Of the kernel that stores dS in place of ``choices``; None: that is not expected to be faster. ``parts``: by kernel;
    ``order``: of both kernels of a split backward."""
    if not split_backward_schedule.covers(problem, choices) or not asked(problem, gpu):
        return None
    if (found := _best(problem, tuple(choices[DKDV].of_row.config.items()), gpu)) is None:
        return None
    otherwise = split_backward_schedule.predicted_us(
        problem, choices, parts.get(DKDV, 1), gpu, order, splits=parts.get(DQ, 1)
    )
    time, config = found
    return config if time < (1 - MARGIN) * otherwise else None


def all_kernels(problem: Problem, choice: Choice, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What may run in place of a backward's kernels, whatever a call's batch, heads and lengths are. ``choice``: of dK/dV's."""
    if not STORED_DS or arch not in MEASURED_ON or choice.variant.space is not bwd_dkdv.SPACE:
        return []
    if not fused_schedule.recorded(problem.mask) or problem.extent.ragged or not stored_ds.able(problem, arch):
        return []
    row = choice.of_row.config
    found = configs(problem, row)
    if dq_parts.can_combine(problem, arch):
        found += [{**one, "DQ_SPLITS": 2} for one in found]
    return [one for config in found for one in stored_ds.kernels(problem, config, arch)]


def about(problem: Problem, config: Config, arch: int) -> str:
    """In one sentence, what runs in place of a backward's kernels."""
    name = stored_ds.kernel(problem, arch).short_name
    said = f"bwd: {name} writes dS, of which dQ is made, which is expected to be faster and has no row"
    if (count := config["SLICES"]) > 1:
        return f"{said}: batch and key heads in {count} slices, one after the other."
    return f"{said}." if config["DQ_SPLITS"] == 1 else f"{said}, in {config['DQ_SPLITS']} parts of the keys."
