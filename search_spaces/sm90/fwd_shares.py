"""Tiles of kernels/sm90/fwd_shares.py: they follow from the head dims and the mask (search_spaces/lib/hopper_key_parts.py), and
nothing is searched."""

from functools import lru_cache

from fa2tune.search_spaces.lib.hopper_key_parts import tile, tiles
from fa2tune.search_spaces.lib.hopper_shares import BOTH, MOST_SHARES, TILE_ROWS
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.variant import SearchSpace

#: Key blocks of all tiles, times programs: a product of 32 bits.
BLOCKS_TIMES_PROGRAMS = 2**31 - 1


def fits(spec: Specialization, arch: int) -> bool:
    """Whether the kernel computes such calls, their lengths aside: dense ones without a score term, whose queries see all keys
    on their left."""
    return not (spec.ragged or spec.scored or spec.mask_hooks.left) and TILE_ROWS in tiles(spec, arch)


def config_of(spec: Specialization, shares: int, rounds: int) -> Config:
    """``shares``: programs; ``rounds``: whole tiles of each."""
    found = tile(spec, TILE_ROWS)
    assert found is not None  # where it fits
    return {**found, "EARLY": True, "SHARES": shares, "ROUNDS": rounds}


@lru_cache(maxsize=1024)
def _progression(problem: Problem, rows: int, keys: int) -> tuple[int, int, int] | None:
    blocks = problem.key_blocks(rows, keys)
    more = blocks[1] - blocks[0] if len(blocks) > 1 else 0
    even = [blocks[0] + more * tile for tile in range(len(blocks) - 1)]
    if more < 0 or blocks[:-1] != even or not 0 < blocks[-1] <= blocks[0] + more * (len(blocks) - 1):
        return None
    return sum(blocks), blocks[0], more


def progression(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Key blocks of a head's tiles, of its first one, and what each has more than the one before, but for the last one.
    ValueError: they do not grow so."""
    if (found := _progression(problem, config["BLOCK_M"], config["BLOCK_N"])) is None:
        raise ValueError(refused(problem, config))
    return found


def scalars(problem: Problem, config: Config) -> dict[str, int]:
    """By parameter."""
    return dict(zip(("blocks_of_head", "blocks_of_first", "blocks_more"), progression(problem, config), strict=True))


def left_over(problem: Problem, config: Config) -> int:
    """Key blocks of all tiles behind whole rounds."""
    of_head, of_first, _more = progression(problem, config)
    return of_head * problem.batch * problem.heads_q - config["ROUNDS"] * config["SHARES"] * of_first


def refused(problem: Problem, config: Config) -> str:
    """Why a config does not compute a call of these lengths; "": it does."""
    shares, rounds = config["SHARES"], config["ROUNDS"]
    for name in ("SHARES", "ROUNDS"):
        allowed = SPACE.dimensions[name]
        if config[name] not in allowed:
            return f"{name}: got {config[name]}, must be {min(allowed)} to {max(allowed)}"
    if (found := _progression(problem, config["BLOCK_M"], config["BLOCK_N"])) is None:
        lengths = f"{problem.seqlen_q} queries of {problem.seqlen_k} keys"
        return f"mask: got {problem.mask} of {lengths}, whose tiles must see evenly more keys for equal shares"
    of_head, of_first, _more = found
    tiles_of_head, heads = problem.query_tiles(config["BLOCK_M"]) // problem.batch, problem.batch * problem.heads_q
    left = of_head * heads - rounds * shares * of_first
    if rounds and of_head != of_first * tiles_of_head:
        return f"ROUNDS: got {rounds} of tiles that do not see as many keys each, must be 0"
    if left < 0:
        return f"ROUNDS: got {rounds} of {shares} tiles, must be no more tiles than there are"
    if 0 < left < shares:  # a program without a block would count as a part of a tile
        return f"SHARES: got {shares} for {left} key blocks, must be no more"
    if of_head * heads * shares > BLOCKS_TIMES_PROGRAMS:
        return f"config: got {of_head * heads} key blocks, must be at most {BLOCKS_TIMES_PROGRAMS // shares}"
    return ""


def default(spec: Specialization, arch: int) -> Config:
    return {**config_of(spec, MOST_SHARES, 0), "EARLY": False}


SPACE = SearchSpace(
    name="fwd_hopper_shares",
    dimensions={
        **BOTH,
        "STAGES": (2, 3),
        "PINGPONG": (False, True),
        "Q_IN_REGISTERS": (False, True),
        "NUMBERED": (False, True),
        "IN_PARTS": (False, True),  # head dims are computed as sums of two powers of two
        "num_warps": (4,),
        "maxnreg": (0,),
    },
    constraints=(),
    default=default,
)
