"""Whether the split Hopper kernels, both at a time, serve a short dense call of head dims up to 128 in place of the fused one:
arithmetic on the host, no GPU.

Of few tiles the fused kernel takes as long as the key tile that meets most query blocks, at five products a block. Of the split
ones dK/dV's has four and dQ's three. Where all tiles of both fit the GPU at once, they take as long as the longest of either
(``launching/overlapped.py``: dQ's kernel with delta, then dK/dV's). Head dims up to 64 have no such kernel for dQ of short
lengths.
"""

from __future__ import annotations

from collections.abc import Mapping

from fa2tune.calling.schedules import fused_schedule, split_backward_schedule
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching.overlapped import DKDV, DQ
from fa2tune.launching.passes import ACCUMULATES_DQ
from fa2tune.search_spaces.lib.hopper import block_dims, columns
from fa2tune.search_spaces.sm90 import bwd_dkdv, bwd_dq
from fa2tune.spec.problem import Problem

#: Microseconds of a block (64 keys of 128 queries, 64 queries of 128 keys) by kernel: what tuned rows of 128 columns grow by
#: from 1k to 4k tokens. How much of the share of columns that are not computed a block saves is as at more than 128.
BLOCK_US, COLUMNS = {DQ: 1.06, DKDV: 1.45}, 256
#: What a call takes besides the blocks of its longest tile: launches, delta, start and end of a tile. Fitted to twelve calls of
#: benchmarks/calls/few_backwards.json and short_backwards.json: 6 % off, root mean square.
AROUND_US = {DQ: 9.1, DKDV: 11.9}
#: Query rows of dQ's tiles and keys of dK/dV's, at most.
MOST_ROWS = bwd_dq.ROWS * max(bwd_dq.SPACE.dimensions["GROUPS"])
MOST_KEYS = max(bwd_dkdv.SPACE.dimensions["BLOCK_N"])
#: They must be predicted to be faster than the fused kernel by this share, and by as many microseconds as split kernels at a
#: time must gain over the same, one after the other.
MARGIN = 0.07
#: In one sentence's part, what runs in place of the fused kernel.
FORM = "few tiles, so by split kernels"


def covers(problem: Problem, fused: Mapping[str, Choice]) -> bool:
    """Whether a call is like those that were raced, of more keys than one tile."""
    if set(fused) != {ACCUMULATES_DQ} or problem.is_empty:
        return False
    if not fused_schedule.covers(fused[ACCUMULATES_DQ].variant, problem):
        return False
    return problem.group == 1 and max(block_dims(problem.specialization)) == 128 and problem.seqlen_k > MOST_KEYS


def chosen(choices: Mapping[str, Choice]) -> bool:
    """Whether a backward's choices are split kernels in place of the fused one."""
    return any(choice.order for choice in choices.values())


def may_fit(problem: Problem, gpu: Gpu) -> bool:
    """No if the GPU has no room for all tiles, however large they are."""
    dq = -(-problem.seqlen_q // MOST_ROWS)
    return problem.batch * problem.heads_q * (dq + max(dq, -(-problem.seqlen_k // MOST_KEYS))) <= gpu.sm_count


def at_once(problem: Problem, split: Mapping[str, Choice], gpu: Gpu) -> bool:
    """Whether split kernels are those of Hopper, and the GPU has room for all tiles of both, and for delta beside dQ's."""
    if not split_backward_schedule.of_hopper(problem, split):
        return False
    dq, dkdv = _longest(problem, split)
    heads = problem.batch * problem.heads_q
    return heads * (len(dq) + max(len(dq), len(dkdv))) <= gpu.sm_count


def _longest(problem: Problem, split: Mapping[str, Choice]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks of each tile of a head, of dQ's kernel and of dK/dV's."""
    rows, keys = bwd_dq.rows(split[DQ].config), split[DKDV].config["BLOCK_N"]
    seen = split_backward_schedule.keys_seen(problem.seqlen_q, problem.seqlen_k, rows, problem.mask)
    step = split[DQ].config["BLOCK_N"]
    dq = tuple([-(-one // step) * step // split_backward_schedule.BLOCK for one in seen])
    return dq, split_backward_schedule.blocks_met(problem.seqlen_q, problem.seqlen_k, keys, problem.mask)


def predicted_us(problem: Problem, split: Mapping[str, Choice]) -> float:
    """Microseconds of a whole backward of few tiles, both kernels at a time."""
    dq, dkdv = (max(tiles) for tiles in _longest(problem, split))

    def took(kernel: str, blocks: int) -> float:
        saved = 1 - sum(columns(problem.specialization, split[kernel].config)) / COLUMNS
        block = BLOCK_US[kernel] * (1 - split_backward_schedule.BLOCKS_SAVE * saved)
        return AROUND_US[kernel] + blocks * block

    return max(took(DQ, dq), took(DKDV, dkdv))


def pays(problem: Problem, fused: Mapping[str, Choice], split: Mapping[str, Choice], gpu: Gpu) -> bool:
    """Whether ``split`` is expected to be faster than ``fused``, at a time, of a call that ``covers`` says yes to."""
    if not at_once(problem, split, gpu):
        return False
    now = fused_schedule.least_us(problem, fused[ACCUMULATES_DQ].config, gpu)
    return predicted_us(problem, split) < min((1 - MARGIN) * now, now - split_backward_schedule.LEAST_US)
