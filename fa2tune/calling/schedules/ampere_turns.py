"""The fused backward by mma.sync whose key tiles add to dQ in turns (IN_ORDER of kernels/sm80/bwd_fused.py): at which share of
the speed that they have in any order, and in which bands of heads. Arithmetic on the host.

Each tile goes through the queries of a head from the last block to the first and adds to a block behind the tile before it. So
of tiles of one head that start together each is a LAG behind the one before, once: they end one after the other, and so do the
tiles that take their places start. Where tiles get shorter by about as much as they start later (causal, as many keys as
queries in a block), all end at a time instead, and the next ones wait again. Where several query heads read a key head, a tile
that is shorter than the one before it waits for it at each of them but the last. Wider bands have fewer tiles of a head at a
time. benchmarks/sm80_turns_simulated.py plays tiles through one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fa2tune.compiling import limits
from fa2tune.compiling.compiler import Binary
from fa2tune.gpus import Gpu
from fa2tune.search_spaces.sm80 import bwd_fused
from fa2tune.spec.problem import Config, Specialization

#: Registers of a thread where a config has no cap.
REGISTERS = 255
#: Blocks that a tile is behind the one before it. A turn is passed on in the middle of the next block, and seen after that.
LAG = 1.5
#: Blocks that a tile waits for the one before it at least, on average, as not all end in the order in which they began.
LEAST_AGAIN = 0.4
#: Start and end of a tile, in blocks.
START = 1.5
#: Heads of a band: the fewest of these that are expected to be this near to the fastest of them. Wider ones find less in L2.
BANDS = (16, 32, 64)
AS_NEAR = 0.03


def programs_at_once(config: Config, spec: Specialization, gpu: Gpu) -> int:
    """Programs that a multiprocessor holds at once, if threads have as many registers as they may."""
    binary = Binary(
        "bwd_fused", spec, config, gpu.arch, bwd_fused.shared_bytes(config, spec), config["num_warps"],
        config["maxnreg"] or REGISTERS, 0, "",
    )  # fmt: skip
    return max(1, limits.blocks_per_sm(binary, gpu))


@lru_cache(maxsize=4096)
def speed(rows: tuple[int, ...], heads: int, group: int, block: int, programs: int, band: int) -> float:
    """Share of the speed in any order. ``rows``: query rows of one head that each key tile meets; ``heads``: key heads of the
    whole batch, ``band`` of which are given out together; ``group``: query heads of each; ``block``: query rows at once;
    ``programs``: that the GPU runs at once."""
    together = min(len(rows), programs / min(band, heads))
    if together <= 1:
        return 1.0
    blocks = sum(rows) / len(rows) / block
    shorter = max(0.0, rows[0] - rows[-1]) / (len(rows) - 1) / block
    if len(rows) * heads <= programs:  # none takes the place of another
        longest = group * rows[0] / block + START
        return longest / (longest + (len(rows) - 1) * max(0.0, LAG - shorter))
    again = max(LEAST_AGAIN, LAG - abs(shorter - LAG)) + (group - 1) * shorter  # blocks, of each behind the one before
    rounds = len(rows) * heads / programs
    waits = (together - 1) / 2 * (again + LAG / rounds)
    return 1 / (1 + waits / (group * blocks + START))


def band_of(rows: Sequence[int], heads: int, group: int, block: int, programs: int) -> tuple[int, float]:
    """(key heads of a band, ``speed``)."""
    found = {band: speed(tuple(rows), heads, group, block, programs, band) for band in BANDS}
    wanted = max(found.values()) - AS_NEAR
    band = next(band for band in BANDS if found[band] >= wanted)
    return band, found[band]
