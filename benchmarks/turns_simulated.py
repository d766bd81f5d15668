"""Simulates key tiles of a fused backward that add to dQ in turns: its speed over that of tiles without an order.

    python benchmarks/turns_simulated.py [--latency 1.2] [--busy 1.0] [--heads-per-wave 32]

Tiles of 128 keys go to 132 programs from a queue, those of a band's heads in turn. A tile takes two steps to start, and one for
each query block; in steps, --latency is the time from a tile's addition to a block until the tile below may add to it. A tile
is one block ahead of what it has added at most, and --busy steps from an addition on it begins none: the warp that adds waits
for its end before it asks for the next turn. Without an order: the longest tiles first, the best of bands of 1, 4 and 16
heads. 16k tokens, hidden size 2048; blocks of 64 queries at head dim 128 and of 128 at 64. No GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import click

PROGRAMS, TOKENS, HIDDEN, KEYS, START = 132, 16384, 2048, 128, 2.0
#: Head, query block, key tile.
Place = tuple[int, int, int]
Tile = Sequence[Place]


def tiles(length: int, rows: int, heads: int, band: int, causal: bool) -> Iterator[Tile]:
    """In the order of the queue, the last keys first; of each its blocks in the order in which it adds to them."""
    blocks = length // rows
    for first in range(0, heads, band):
        for tile in reversed(range(length // KEYS)):
            for head in range(first, min(heads, first + band)):
                yield [(head, block, tile) for block in range(tile * KEYS // rows if causal else 0, blocks)]


def steps(queue: Sequence[Tile], latency: float | None, busy: float = 0.0) -> float:
    """Until the last tile is done. latency: None for no order."""
    free = [0.0] * PROGRAMS
    added: dict[Place, float] = {}
    for tile in queue:
        now, before, able = free[0] + START, 0.0, 0.0
        for nth, (head, block, key) in enumerate(tile):
            now = max(now, before) + 1 if nth else now + 1
            turn = -1.0 if latency is None else added.get((head, block, key + 1), -1.0) + latency
            before = added[head, block, key] = max(now, turn, able)
            able = before + busy
        heapq.heapreplace(free, max(now, before))
    return max(free)


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--latency", type=float, default=1.2, show_default=True)
@click.option("--busy", type=float, default=1.0, show_default=True)
@click.option("--heads-per-wave", type=int, default=32, show_default=True)
def main(latency: float, busy: float, heads_per_wave: int) -> None:
    for dim, rows in ((64, 128), (128, 64)):
        for causal in (True, False):
            found = []
            for length in (512, 2048, 8192, 16384):
                heads = TOKENS // length * (HIDDEN // dim)
                free = min(steps(_longest_first(length, rows, heads, band, causal), None) for band in (1, 4, 16))
                queue = list(tiles(length, rows, heads, min(heads_per_wave, heads), causal))
                found.append(f"{length}: {free / steps(queue, latency, busy):.2f}")
            click.echo(f"head dim {dim}, {'causal' if causal else 'full'}: {', '.join(found)}")


def _longest_first(length: int, rows: int, heads: int, band: int, causal: bool) -> list[Tile]:
    """Of each band the first keys first."""
    queue = list(tiles(length, rows, heads, band, causal))
    size = band * (length // KEYS)
    return [tile for at in range(0, len(queue), size) for tile in reversed(queue[at : at + size])]


if __name__ == "__main__":
    main()
