"""What runs in place of the tuned forward of a dense call: keys split among programs, tiles of several query heads, tiles with
all keys of a key head, warps that load for themselves, blocks of 80 keys, or equal shares of all key blocks. Arithmetic on the
host, no GPU.

Each is estimated by its own file, beside what serves otherwise: that is the tuned kernel, then whichever of the others was
taken before."""

from __future__ import annotations

from typing import NamedTuple

from fa2tune.calling.schedules import (
    few_keys_schedule,
    few_tiles,
    grouped_schedule,
    key_splits_schedule,
    longer_blocks_schedule,
    multistage_schedule,
    shares_schedule,
)
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import (
    has_longer_blocks,
    is_grouped,
    is_in_shares,
    is_multistage,
    is_one_tile,
    keys_of_block,
    role_in_place,
    splitting,
)
from fa2tune.rows.row import Row
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.roles import FWD_80_KEYS, FWD_GROUPED, FWD_MULTISTAGE, FWD_ONE_TILE, FWD_SHARES
from fa2tune.spec.variant import Variant


class Words(NamedTuple):
    """Of what runs in place of the tuned forward."""

    what: str
    expected: str  #: the beginning of a sentence that says what is expected to be faster
    otherwise: str  #: of the tuned forward


#: By ``key_splits.role_in_place``.
_WORDS = {
    None: Words("keys split among programs", "to split keys among programs is", "keys are not split"),
    FWD_GROUPED: Words("tiles of several query heads", "tiles of several query heads are", "tiles of one head each"),
    FWD_ONE_TILE: Words("all keys in one tile", "tiles with all keys of a key head are", "keys in blocks"),
    FWD_MULTISTAGE: Words(
        "warps that load for themselves", "warps that load for themselves are", "a warp loads for the others"
    ),
    FWD_80_KEYS: Words("blocks of 80 keys", "blocks of 80 keys are", "blocks of a power of two"),
    FWD_SHARES: Words("equal shares of key blocks", "equal shares of key blocks are", "tiles are whole"),
}


def words(found: Config) -> Words:
    return _WORDS[role_in_place(found)]


def instead_of(problem: Problem, config: Config, gpu: Gpu, row: Row | None = None) -> Config | None:
    """A config of what runs in place of the kernel that ``config``, by ``row``, is of; None: nothing does."""
    found = key_splits_schedule.config_of(problem, config, gpu, row)
    found = grouped_schedule.config_of(problem, config, gpu, row, found) or found
    found = found or longer_blocks_schedule.config_of(problem, gpu)
    if (one_tile := few_keys_schedule.best(problem, gpu)) is not None:
        time, tiles = one_tile
        if time < (1 - few_keys_schedule.MARGIN) * served_us(problem, config, gpu, row, found):
            found = tiles
    if (multistage := multistage_schedule.best(problem, gpu)) is not None:
        time, tiles = multistage
        if time < (1 - multistage_schedule.MARGIN) * served_us(problem, config, gpu, row, found):
            found = tiles
    if (in_shares := shares_schedule.best(problem, gpu)) is not None:
        time, shares = in_shares
        known = found is None or shares_schedule.in_uneven_parts(problem, found, gpu)
        whole = few_tiles.expected_us(problem, config, gpu.sm_count) if known else None
        if time < (1 - shares_schedule.MARGIN) * (whole or served_us(problem, config, gpu, row, found)):
            found = shares  # by the constants of whole tiles, so next to those where they are known
    return found


def served_us(problem: Problem, config: Config, gpu: Gpu, row: Row | None, found: Config | None) -> float:
    """Microseconds of a forward by ``found``, in place of what ``config``, by ``row``, is of; None: by that, estimated."""
    if found is None:
        return key_splits_schedule.ordinary_us(problem, config, gpu, row)
    if is_one_tile(found):
        return few_keys_schedule.one_tile_us(problem, found, gpu)
    if is_multistage(found):
        return multistage_schedule.multistage_us(problem, found, gpu)
    if is_in_shares(found):
        return shares_schedule.expected_us(problem, found, gpu)
    if has_longer_blocks(found):  # as near as the share is, which is one of tiles with maxima, whatever the row has
        usual = key_splits_schedule.ordinary_us(problem, config, gpu, row)
        return usual * longer_blocks_schedule.share(problem, found, gpu)
    estimated = grouped_schedule.grouped_us if is_grouped(found) else key_splits_schedule.split_us
    return estimated(problem, found, gpu)


def all_kernels(problem: Problem, arch: int) -> list[tuple[Variant, Config, Problem]]:
    """What ``key_splits.kernels`` gives, of every tile of several heads, or with all keys, or whose warps load for themselves,
    or in blocks of 80 keys, or in equal shares, that a call of any heads and lengths may have."""
    schedules = grouped_schedule, few_keys_schedule, multistage_schedule, longer_blocks_schedule, shares_schedule
    return [one for schedule in schedules for one in schedule.all_kernels(problem, arch)]


def about(problem: Problem, found: Config) -> str:
    """In one sentence, what runs in place of a forward's row."""
    if is_one_tile(found):
        return (
            f"fwd: few keys, so {splitting(found).short_name} runs instead, which is expected to be faster and has no row: "
            f"tiles of {found['BLOCK_M']} queries have all keys."
        )
    if is_multistage(found):
        return (
            f"fwd: a short call, so {splitting(found).short_name} runs instead, which is expected to be faster and has no row: "
            f"tiles of {found['BLOCK_M']} queries, and {found['STAGES']} blocks of {found['STAGE_KEYS']} keys at once."
        )
    if has_longer_blocks(found):
        return (
            f"fwd: {splitting(found).short_name} runs instead, in blocks of {keys_of_block(found)} keys, which is expected to "
            "be faster and has no row."
        )
    if is_in_shares(found):
        rounds = found["ROUNDS"]
        share = (
            f"{rounds} whole tile{'s' * (rounds > 1)}, then an equal share of what is left"
            if rounds
            else "equally many"
        )
        return (
            f"fwd: {splitting(found).short_name} runs instead, which is expected to be faster and has no row. Key blocks of "
            f"each of its {found['SHARES']} programs: {share}."
        )
    return grouped_schedule.about(problem, found) if is_grouped(found) else key_splits_schedule.about(problem, found)
