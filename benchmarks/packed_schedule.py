"""Simulates in which order the Hopper kernels take the tiles of packed sequences: time over the least possible.

    python benchmarks/packed_schedule.py

Causal. A tile takes as long as the blocks that it multiplies, and OVERHEAD of them more; the next one goes to a free
program. The least is the mean of all programs, or the longest tile. Memory and caches are left out. Forward: tiles in the
order of kernels/portable/packed_order.py, by how many tiles take turns. Backward: key tiles in the order of cu_seqlens, by
HEADS_PER_WAVE; documents lie in no order, so the mean and the worst of 12 shuffles are shown, and the longest sequence first.
Split: dQ with 4 heads a wave, in the forward's order, by how many tiles take turns. Its dK and dV are as the backward's.

Then forwards of benchmarks/calls/random_packings_2.json, in the tiles of their rows, by how tiles are given out: every n-th to
a program, as dense calls have it; by the queue that packed calls had first, whose programs knew three tiles ahead; and by the
one they have. The mean of DRAWS, as programs take the numbers of tiles in no order. Needs no GPU.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from packed import PACKINGS, Packing

from fa2tune.search_spaces.portable.packed_order import ALL
from fa2tune.search_spaces.sm90.fwd import L2_BYTES

MULTIPROCESSORS = 132
OVERHEAD = {"forward": 1.0, "backward": 3.0, "dq": 2.0}  #: blocks, of 128 keys, of 64 or 128 queries, of 128 keys
SHUFFLES = 12
#: Blocks before the end of a tile at which a forward's program takes the next one (kernels/lib/hopper_queue.py), whose producer
#: is so many stages ahead.
AHEAD, STAGES = 3, 2
#: Drawn calls by their number: query rows and keys of a tile, bands of heads.
CALLS = {
    24: (192, 128, (8,)),
    20: (192, 128, (8,)),
    1: (128, 128, (1, 4, 8, 16, 32)),
    6: (128, 128, (4,)),
    19: (128, 128, (4,)),
}
DRAWN = Path(__file__).parent / "calls/random_packings_2.json"
DRAWS, UNEVEN = 6, 0.03  #: and how much slower or faster a multiprocessor may be


def over_least(costs: Sequence[float], programs: int, early: float = 0.0) -> float:
    """``early``: a program takes its next tile so much before it is through with one, at the start of that at the earliest."""
    taking = [(0.0, 0.0)] * programs  # when a program takes its next tile, and when it is through with the one before
    for cost in costs:
        _, start = heapq.heappop(taking)
        heapq.heappush(taking, (start + max(0.0, cost - early), start + cost))
    return max(end for _, end in taking) / max(sum(costs) / programs, max(costs))


def every_nth(costs: Sequence[float], programs: int, paces: Sequence[float]) -> float:
    """Every other round backwards."""
    rounds = [costs[first : first + programs] for first in range(0, len(costs), programs)]
    busy = [0.0] * programs
    for number, one in enumerate(rounds):
        for place, cost in enumerate(one):
            program = programs - 1 - place if number % 2 else place
            busy[program] += cost * paces[program]
    return max(busy) / (sum(costs) / programs)


def queued(costs: Sequence[float], programs: int, paces: Sequence[float], first: bool, draw: random.Random) -> float:
    """``first``: two tiles of each program are known from the start, in opposite order, and it takes the third there, in no
    order; then one whenever its producer has loaded a tile, three ahead. Else one a tile, as ``over_least`` has it."""
    known = 2 if first else 1
    own = [[program, 2 * programs - 1 - program][:known] for program in range(programs)]
    counter = itertools.count(known * programs)
    if first:
        for program in draw.sample(range(programs), programs):
            own[program].append(next(counter))
    busy, done = [0.0] * programs, [0] * programs
    events = [
        (draw.random() / 100, program, False) for program in range(programs)
    ]  # a tile begins; or the next is taken
    heapq.heapify(events)
    while events:
        now, program, takes = heapq.heappop(events)
        if takes:
            own[program].append(next(counter))
        elif own[program][done[program]] < len(costs):
            cost = costs[own[program][done[program]]] * paces[program]
            busy[program], done[program] = now + cost, done[program] + 1
            heapq.heappush(events, (now + max(0.0, cost - STAGES - (0 if first else AHEAD)), program, True))
            heapq.heappush(events, (now + cost, program, False))
    return max(busy) / (sum(costs) / programs)


def drawn() -> Iterable[str]:
    """Of each of CALLS, and band: time over the mean."""
    named = {int(name.split()[0]): (name, call) for name, call in json.loads(DRAWN.read_text("utf-8"))["calls"].items()}
    for number, (rows, keys, bands) in CALLS.items():
        name, call = named[number]
        sides = sorted(zip(call["of_k"], call["of_q"], strict=True), reverse=True)
        blocks = [
            -(-max(1, min(first + rows + of_k - of_q, of_k)) // keys)
            for of_k, of_q in sides for first in reversed(range(0, of_q, rows))
        ]  # fmt: skip
        for band in bands:
            heads = [min(band, call["heads_q"] - first) for first in range(0, call["heads_q"], band)]
            costs = [one + OVERHEAD["forward"] for width in heads for one in blocks for _ in range(width)]
            found: dict[str, list[float]] = {"every n-th": [], "first queue": [], "queue": []}
            for seed in range(DRAWS):
                draw = random.Random(seed)
                paces = [draw.uniform(1 - UNEVEN, 1 + UNEVEN) for _ in range(MULTIPROCESSORS)]
                found["every n-th"].append(every_nth(costs, MULTIPROCESSORS, paces))
                found["first queue"].append(queued(costs, MULTIPROCESSORS, paces, True, draw))
                found["queue"].append(queued(costs, MULTIPROCESSORS, paces, False, draw))
            said = ", ".join(f"{how} {statistics.fmean(times):.3f}" for how, times in found.items())
            yield f"{name}, bands of {band}: {said}"


def in_order(lengths: Sequence[int], block: int, in_turns: int) -> Iterable[tuple[int, int]]:
    """(keys, first row) of each tile, as packed_order_kernel has them."""
    alike = [(length, -(-length // block)) for length in lengths if length]
    for kind in sorted(set(alike), reverse=True):
        length, tiles = kind
        turns = min(alike.count(kind), -(-in_turns // tiles))
        for _ in range(alike.count(kind) - turns):
            yield from ((length, tile * block) for tile in reversed(range(tiles)))
        for tile in reversed(range(tiles)):
            yield from [(length, tile * block)] * turns


def forward(packing: Packing, in_turns: int) -> float:
    """128 query rows and 128 keys a tile; at head dim 64 tiles of 64 by 64, three programs a multiprocessor."""
    side, shared = (128, 1) if packing.dim == 128 else (64, 3)
    longest, group = max(packing.lengths), packing.heads_q // packing.heads_kv
    held = L2_BYTES // (4 * packing.dim) // (longest * packing.lengths.count(longest))
    band = min(group * max(1 << power for power in range(7) if power == 0 or held >= 1 << power), packing.heads_q)
    tiles = [-(-min(row + side, keys) // side) for keys, row in in_order(packing.lengths, side, in_turns)]
    heads = [min(band, packing.heads_q - first) for first in range(0, packing.heads_q, band)]
    costs = [blocks + OVERHEAD["forward"] for width in heads for blocks in tiles for _ in range(width)]
    return over_least(costs, MULTIPROCESSORS * shared, AHEAD + STAGES)


def backward(packing: Packing, lengths: Sequence[int], wave: int) -> float:
    """128 keys a tile, of which the first of a sequence are seen by most queries."""
    block, group = 64 if packing.dim == 128 else 128, packing.heads_q // packing.heads_kv
    tiles = [group * (-(-n // block) - key // block) for n in lengths for key in range(0, n, 128)]
    heads = [min(wave, packing.heads_kv - first) for first in range(0, packing.heads_kv, wave)]
    costs = [blocks + OVERHEAD["backward"] for width in heads for blocks in tiles for _ in range(width)]
    return over_least(costs, MULTIPROCESSORS)


def dq(packing: Packing, in_turns: int, wave: int = 4) -> float:
    """128 query rows a tile, blocks of 128 keys."""
    tiles = [-(-min(row + 128, keys) // 128) for keys, row in in_order(packing.lengths, 128, in_turns)]
    heads = [min(wave, packing.heads_q - first) for first in range(0, packing.heads_q, wave)]
    costs = [blocks + OVERHEAD["dq"] for width in heads for blocks in tiles for _ in range(width)]
    return over_least(costs, MULTIPROCESSORS)


@click.command(help=(__doc__ or "").splitlines()[0])
def main() -> None:
    for name, packing in PACKINGS.items():
        turns = {"none": 1, "32": 32, "64": 64, "all": ALL}
        found = ", ".join(f"{label} {forward(packing, count):.3f}" for label, count in turns.items())
        click.echo(f"{name}: forward, tiles in turns: {found}")
        found = ", ".join(f"{label} {dq(packing, count):.3f}" for label, count in turns.items())
        click.echo(f"  dQ, tiles in turns: {found}")
        for wave in (1, 4, 8, 16):
            draw, times = random.Random(0), []
            for _ in range(SHUFFLES):
                lengths = draw.sample(packing.lengths, len(packing.lengths))
                times.append(backward(packing, lengths, wave))
            first = backward(packing, sorted(packing.lengths, reverse=True), wave)
            mean = sum(times) / len(times)
            click.echo(f"  backward, {wave} heads: {mean:.3f}, at worst {max(times):.3f}, longest first {first:.3f}")
    for line in drawn():
        click.echo(line)


if __name__ == "__main__":
    main()
