"""Whether the keys of a packed call's forward are split among programs, and into how many parts: arithmetic on the host, which
does not know the lengths.

A program of the tuned kernel has a tile of queries of one head. Of few heads, and a sequence that is much longer than the
others, the call waits for that one's longest tile while most multiprocessors are idle. Here every tile is cut into as many
parts, each of its own keys, whatever the lengths turn out to be. What that is worth depends on the longest sequence: it is
asked for only where the caller says how long that is, or there is one sequence. Of the others nothing is known, so they are
taken to be alike. docs/experiments/varlen.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from fa2tune.calling.schedules import (
    key_splits_schedule,
    packed_grouped_schedule,
    packed_lengths,
    packed_schedule,
)
from fa2tune.calling.schedules.few_tiles import FULL_TILE
from fa2tune.calling.schedules.packed_lengths import LengthKinds
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import kernels, space_of
from fa2tune.rows.row import Row
from fa2tune.search_spaces.sm90 import fwd
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import FWD_SPLIT
from fa2tune.spec.variant import WARP_SPECIALIZED, Variant, implementation_of

#: Parts. More were no faster by the estimate in any recorded call, and all of them are written and read.
PARTS = (2, 3, 4)
#: Splitting must be predicted to be faster by this share: the eight raced calls that are take 0.6 to 0.9 of the time, and of
#: one that is predicted to take 0.86 of it the fastest takes 1.23 (packed_choices_7.json).
MARGIN = 0.15
#: Tiles of FULL_TILE rows a multiprocessor up to which it is asked for.
MOST_TILES = 2.0


def longest(problem: Problem) -> tuple[int, int] | None:
    """(likely, least) rows of the longest sequence; None: the host does not know."""
    if problem.extent.given == 1:
        return (max(problem.seqlen_q, problem.seqlen_k),) * 2
    known = packed_lengths.bounds(problem)
    return known and (round(problem.extent.longest / math.sqrt(2)), known[0])


def candidates(problem: Problem, arch: int) -> Iterator[Config]:
    spec = problem.specialization
    if (space := space_of(problem, arch, FWD_SPLIT)) is None:
        return
    for rows in space.tiles(spec, arch):
        for parts in PARTS:
            yield space.config_of(spec, rows, parts)


def split_us(problem: Problem, config: Config, gpu: Gpu, lengths: LengthKinds) -> float:
    """Microseconds by tiles in parts, estimated."""
    parts, form = config["SPLITS"], (config["BLOCK_M"], config["BLOCK_N"], config["maxnreg"])
    alike = fwd.of_tiles(problem.specialization, *form)
    us = packed_schedule.expected_us(problem, alike, gpu, lengths, parts)
    assert us is not None, f"tiles of {form} were measured"
    return us + key_splits_schedule.combine_us(problem, parts, key_splits_schedule.HOPPER_PACES[128], gpu)


def asked(problem: Problem, gpu: Gpu) -> bool:
    """Whether the kernel is asked for such a call at all."""
    return (
        gpu.arch in key_splits_schedule.MEASURED_ON
        and problem.extent.ragged
        and not problem.is_empty
        and longest(problem) is not None
        and packed_schedule.covers_mask(problem)
        and problem.heads_q * problem.seqlen_q <= MOST_TILES * FULL_TILE * gpu.sm_count
    )


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """(estimated microseconds, config) of the fastest parts; None: the kernel cannot compute this call."""
    known = longest(problem)
    lengths = packed_lengths.one_long(problem, known[0] if known else 0)
    found = ((split_us(problem, config, gpu, lengths), config) for config in candidates(problem, gpu.arch))
    return min(found, key=lambda one: one[0], default=None)


def config_of(problem: Problem, config: Config, gpu: Gpu, row: Row | None) -> Config | None:
    """How the keys of a packed forward are split that ``config``, by ``row``, would serve otherwise; None: that is not expected
    to be faster, or not where the longest sequence is as short as it can be."""
    if row is None or implementation_of(config) != WARP_SPECIALIZED or not asked(problem, gpu):
        return None
    return _instead_of(_rounded(problem), tuple(config.items()), gpu)


def _rounded(problem: Problem) -> Problem:
    """With as many rows as whole tiles: a batch of documents has other lengths in every step, and an estimate takes long."""
    return replace(
        problem, **{name: -(-getattr(problem, name) // FULL_TILE) * FULL_TILE for name in ("seqlen_q", "seqlen_k")}
    )


@lru_cache(maxsize=4096)
def _instead_of(problem: Problem, own: tuple[tuple[str, object], ...], gpu: Gpu) -> Config | None:
    known, found = longest(problem), best(problem, gpu)
    if known is None or found is None:
        return None
    for rows, share in zip(known, (1 - MARGIN, 1.0), strict=True):
        lengths = packed_lengths.one_long(problem, rows)
        otherwise = packed_schedule.expected_us(problem, dict(own), gpu, lengths)
        if otherwise is None or split_us(problem, found[1], gpu, lengths) >= share * otherwise:
            return None
    return found[1]


def instead_of(problem: Problem, config: Config, gpu: Gpu, row: Row | None = None) -> Config | None:
    """As ``grouped_schedule.instead_of``, for packed sequences."""
    several = packed_grouped_schedule.config_of(problem, config, gpu, row)
    return several or config_of(problem, config, gpu, row)


def all_kernels(problem: Problem, arch: int) -> Iterator[tuple[Variant, Config, Problem]]:
    """What ``key_splits.kernels`` gives, of every tile that a packed call may have."""
    for config in candidates(problem, arch):
        yield from kernels(problem, config, arch)
