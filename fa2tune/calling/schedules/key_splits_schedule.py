"""Whether a forward's keys are split among programs, into how many parts, and with which tiles: arithmetic on the host, by the
call's own batch, heads and lengths.

The tuned kernels have a program for each tile of queries of each query head. A call of few queries has few such tiles: most
multiprocessors are idle, each tile has more rows than queries, and the query heads of a group read the same keys one by one.
``launching/key_splits.py`` has a program for each part of the keys, and either the queries of a whole group as rows of its tile
(portable), or those of one head (warp-specialised: for calls of few tiles, each of which is full). All are estimated here in
the same way, with constants fitted to records in benchmarks/calls/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from fa2tune.calling.schedules import few_tiles, forward_schedule, tile_order
from fa2tune.calling.schedules.few_tiles import FULL_TILE
from fa2tune.compiling.registry import variant_of
from fa2tune.compiling.support import companion_space
from fa2tune.gpus import Gpu
from fa2tune.launching.key_splits import most_parts, role_of, space_of, splitting
from fa2tune.rows.row import Row
from fa2tune.search_spaces.lib.hopper import columns as hopper_columns
from fa2tune.search_spaces.sm90 import fwd
from fa2tune.spec import visits
from fa2tune.spec.mask import FULL
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.roles import FWD_SPLIT, FWD_SPLIT_GROUPED
from fa2tune.spec.variant import WARP_SPECIALIZED

#: Share of the bandwidth of memory that all multiprocessors together reach, L2 included.
MEMORY_RATE = 1.0
#: Microseconds of a launch.
LAUNCH_US = 1.9


@dataclass(frozen=True)
class Pace:
    """Of a kernel with tiles of one kind. Microseconds of an H200, a block being one of 64 keys at head dim 128."""

    rate: float  #: share of the peak rate that is reached inside a key block
    loaded: float  #: bytes a microsecond that one multiprocessor loads
    block_us: float  #: that a block takes at the least, since its steps wait for one another
    start_us: float  #: start and end of a program
    uneven: float  #: of a turn, where there are several: programs do not end together, and the last ones are alone
    held: int = 1  #: programs of a multiprocessor that registers leave room for
    combine_us: float = 0.0  #: the launch that puts parts together


#: The portable kernel that splits keys, by the rows of a tile. 16: fitted to few_queries.json. More: to few_queries_tiles.json,
#: few_queries_hopper.json, and the calls of seed 53c19ef in random_calls.json.gz it served.
PORTABLE_PACES = {
    16: Pace(0.5, 46e3, 0.94, 1.6, 0.1, 4, 1.6),
    32: Pace(0.35, 48e3, 1.05, 2.7, 0.15, 3, 4.6),
    64: Pace(0.45, 48e3, 1.36, 2.7, 0.15, 3, 4.6),
    128: Pace(0.45, 48e3, 1.1, 2.7, 0.15, 1, 4.6),
}
#: Of 32 rows with keys in one part: fitted to 13 races of dense_forwards*.json.gz, of 64 to 551 keys.
WHOLE_32 = Pace(0.2, 48e3, 0.65, 2.7, 0.15, 3)
#: The warp-specialised one, by the wider padded head dim: shares fitted to every second call of few_queries_hopper.json.
HOPPER_RATES = {64: 0.77, 128: 0.81, 256: 0.78}
HOPPER_PACES = {wide: Pace(rate, 70e3, 0.57, 3.2, 0.1, combine_us=4.6) for wide, rate in HOPPER_RATES.items()}
#: Up to so many columns of K and V together exponentials are most of a block, and kernels reach that share of their rates:
#: fitted to the same calls.
NARROW, NARROW_RATE = 128, 0.64
#: The tuned kernels, where there is no row's time: warp-specialised, portable.
TUNED_PACES = Pace(0.73, 70e3, 0.57, 3.2, 0.1), Pace(0.5, 46e3, 0.57, 3.2, 0.1)
#: Splitting must be predicted to be faster by this share, as the other configs were measured. Of predictions this near to the
#: least the one of the fewest parts is taken.
MARGIN, AS_NEAR = 0.15, 0.01
#: The same of the warp-specialised kernel that splits keys, against whatever would serve otherwise: its four measured calls are
#: estimated within 4 %.
HOPPER_MARGIN = 0.08
#: Calls of so few queries and keys, and of head dims above so many, fill a sixth of a Hopper tile's products or less. They are
#: estimated next to what few_tiles says of the tuned kernel, which is near enough for a smaller margin: all nine raced calls.
SHORT, SHORT_DIM, SHORT_MARGIN = 96, 128, 0.1
#: The portable kernel with tiles of so many rows and keys in one part, where each program has a multiprocessor of its own: so
#: many microseconds less, as O leaves once and nothing else loads. The excess was 0.9 to 1.4 in three drawn calls of
#: random_calls.json.gz, and is 0.9 in the one of dense_forwards.json.gz.
ALONE_ROWS, ALONE_US = 16, 1.0
#: Compute capabilities that the kernels and the constants were measured on.
MEASURED_ON = (90,)
#: Only calls of so few rows a key head, or of so few tiles of FULL_TILE rows a multiprocessor, are split: of others the tuned
#: kernel's tiles fill the GPU, whose own rows say more of it than the estimate here.
FEW_ROWS, IDLE_SHARE = 256, 0.5
#: The least tile takes up to so many rows a key head: with more of them it was not measured, and each tile reads all keys.
LEAST_TILE_ROWS = 128
#: The warp-specialised kernel: up to so many such tiles a multiprocessor, since of more the last turn counts for little, and
#: from so many queries on, since fewer leave most of a tile empty. And tiles have to be alike, as the estimate counts turns of
#: equal ones: under no mask, in a window, or with so many times as many keys as queries. Of other causal calls there is one
#: turn at most, whose longest tile decides: the tuned kernel is then estimated by that one, too (few_tiles). The raced
#: calls that take it by that estimate need 0.78 and 0.87 of the time; of head dims 136 to 160 splits without turns took 0.94
#: to 1.66, so none does. Nor does any above 128 columns of more than HOPPER_LONGEST keys: the two have 811 and 1114, and one of
#: 7169 took 1.36 of the time. A third, of 3243 keys, takes it by the other estimate, at 1.00.
HOPPER_TURNS, HOPPER_QUERIES, HOPPER_KEYS, HOPPER_LONGEST = 2.0, 32, 4, 2048


@dataclass(frozen=True)
class TileWork:
    """Programs of one kind."""

    programs: int
    blocks: int  #: of keys, in one program
    rows: int  #: of a tile
    keys: int  #: of a block
    held: int  #: programs that a multiprocessor holds at once
    sharing: int  #: programs that read the same keys at the same time
    columns: int  #: of K and V, as they are computed
    pace: Pace


def keys_of_tile(problem: Problem, queries: int, longest: bool = False) -> int:
    """Keys that a tile of so many queries visits: on average, or the tile of the most."""
    if longest and visits.longest_last(problem.mask):
        return visits.most_keys(problem.mask, problem.seqlen_q, problem.seqlen_k)
    return min(problem.seqlen_k, int(problem.keys_seen) + queries)


def _padded(problem: Problem) -> int:
    return padded_head_dim(problem.head_dim) + padded_head_dim(problem.head_dim_v)


def _busy_us(problem: Problem, work: TileWork, gpu: Gpu) -> float:
    """Programs take turns, as many at once as all multiprocessors hold. A block takes what is longest: the wait of its steps
    for one another, what the busiest multiprocessor computes or loads, or what all of them take from memory."""
    loaded = work.keys * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]  # bytes a block
    pace = work.pace
    slower = 1 / NARROW_RATE if work.columns <= NARROW and work.rows > ALONE_ROWS else 1.0
    peak = (
        gpu.peak(problem.dtype, problem.precision) * 1e6 * pace.rate / slower / gpu.sm_count
    )  # operations a microsecond
    computed = 2 * work.rows * work.keys * work.columns / peak
    least = pace.block_us * slower * work.keys * work.columns / (64 * 256)
    shared = loaded / work.sharing / (gpu.hbm_gbs * 1e3 * MEMORY_RATE)

    def turn(programs: int) -> float:
        most = -(-programs // gpu.sm_count)  # of one multiprocessor
        block = max(least, most * computed, most * loaded / pace.loaded, programs * shared)
        return pace.start_us + work.blocks * block

    whole, rest = divmod(work.programs, gpu.sm_count * work.held)
    full = turn(gpu.sm_count * work.held) if whole else 0.0
    late = pace.uneven * full if work.programs > gpu.sm_count * work.held else 0.0
    return whole * full + (turn(rest) if rest else 0.0) + late


def ordinary_us(problem: Problem, config: Config, gpu: Gpu, row: Row | None = None) -> float:
    """Microseconds of a tuned forward, estimated. ``row``: the config is its, or of the schedule model in its place; what that
    model says by the row's measured time counts where it is less, so the kernel that was measured serves unless both say
    otherwise."""
    variant, spec = variant_of("fwd", config), problem.specialization
    hopper = WARP_SPECIALIZED in variant.implementations
    rows, keys = config["BLOCK_M"], config["BLOCK_N"]
    work = TileWork(
        problem.query_tiles(rows) * problem.heads_q, -(-keys_of_tile(problem, rows) // keys), rows, keys,
        fwd.programs(config) if hopper else 1, -(-problem.seqlen_q // rows) * problem.group,
        tile_order.columns_of_parts(spec, fwd.SPACE.completed(config)["IN_PARTS"]) if hopper else _padded(problem),
        TUNED_PACES[not hopper],
    )  # fmt: skip
    time = LAUNCH_US + _busy_us(problem, work, gpu)
    if _short(problem) and (near := few_tiles.expected_us(problem, config, gpu.sm_count)) is not None:
        return near
    if row is None or not forward_schedule.covers(variant):
        return time
    known = forward_schedule.expected_us(problem, row, config, gpu.sm_count)
    return time if known is None else min(time, known)


def split_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds with keys split as a config of a kernel for that says, estimated."""
    rows, keys, splits = config["BLOCK_M"], config["BLOCK_N"], config["SPLITS"]
    if _is_hopper(config):
        pace, held = HOPPER_PACES[tile_order.widest(problem)], fwd.programs(config)
        # rows that begin inside a sector: three calls of 16060 to 24912 keys took 1.37 to 1.69 of an estimate without
        cost = few_tiles.sector_cost(problem, config)
        pace = replace(pace, rate=pace.rate / cost, loaded=pace.loaded / cost, block_us=pace.block_us * cost)
        columns = sum(hopper_columns(problem.specialization, config))
        programs = problem.query_tiles(rows) * problem.heads_q * splits
        sharing = -(-problem.seqlen_q // rows) * problem.group
        rows_of_group = rows * problem.group
    else:
        pace = WHOLE_32 if (rows, splits) == (32, 1) else PORTABLE_PACES[rows]
        held, columns = _held(problem.specialization, rows, gpu), _padded(problem)
        sharing = -(-problem.seqlen_q * problem.group // rows)
        programs = sharing * problem.heads_kv * problem.batch * splits
        rows_of_group = rows
    # of one turn the longest program decides
    blocks = -(-_blocks(problem, rows_of_group, keys, programs <= gpu.sm_count * held) // splits)
    time = LAUNCH_US + _busy_us(problem, TileWork(programs, blocks, rows, keys, held, sharing, columns, pace), gpu)
    if splits == 1:
        return time - ALONE_US if rows == ALONE_ROWS and programs <= gpu.sm_count and not _is_hopper(config) else time
    return time + combine_us(problem, splits, pace, gpu)


def combine_us(problem: Problem, splits: int, pace: Pace, gpu: Gpu) -> float:
    """Of putting parts together, which are written and read."""
    summed = 4 * splits * problem.batch * problem.heads_q * problem.seqlen_q * (problem.head_dim_v + 2)
    return pace.combine_us + 2 * summed / (gpu.hbm_gbs * 1e3)


def _is_hopper(config: Config) -> bool:
    return role_of(config) == FWD_SPLIT


@lru_cache(maxsize=1024)
def _held(spec: Specialization, rows: int, gpu: Gpu) -> int:
    """Programs of so many rows a tile that a multiprocessor holds at once; the system takes 1 KiB of shared memory for each."""
    space = companion_space(FWD_SPLIT_GROUPED, spec, gpu.arch)
    assert space is not None  # of whose configs one is estimated
    config = space.config_of(spec, gpu.arch, spec.aligned, rows, 1)
    return max(1, min(PORTABLE_PACES[rows].held, gpu.shared_per_sm // (space.shared_bytes(spec, config) + 1024)))


@lru_cache(maxsize=1024)
def _blocks(problem: Problem, rows: int, keys: int, longest: bool = False) -> int:
    """Key blocks that a tile visits."""
    return max(1, -(-keys_of_tile(problem, -(-rows // problem.group), longest) // keys))


def candidates(problem: Problem, arch: int) -> Iterator[Config]:
    """Configs of the portable kernel that are worth an estimate: no tile of twice the rows that there are, and the least one
    up to LEAST_TILE_ROWS."""
    spec, all_rows = problem.specialization, problem.seqlen_q * problem.group
    if (space := space_of(problem, arch, FWD_SPLIT_GROUPED)) is None:
        return
    tiles, most = space.tiles(spec, arch), most_parts(problem, space, arch)
    for rows in tiles:
        if all_rows <= LEAST_TILE_ROWS if rows == min(tiles) else rows < 2 * all_rows:
            yield from _splits(problem, rows, (1, most), partial(space.config_of, spec, arch, problem.tma, rows))


def hopper_candidates(problem: Problem, arch: int) -> Iterator[Config]:
    """The same of the warp-specialised one."""
    spec = problem.specialization
    if forward_schedule.portable_is_faster("fwd", problem) or (space := space_of(problem, arch, FWD_SPLIT)) is None:
        return
    most = most_parts(problem, space, arch)
    for rows in space.tiles(spec, arch):
        yield from _splits(problem, rows * problem.group, (2, most), partial(space.config_of, spec, rows))


def _splits(
    problem: Problem, rows: int, between: tuple[int, int], config: Callable[[int], Config]
) -> Iterator[Config]:  # fmt: skip
    """Of the numbers of parts that leave the longest part as long the least. ``rows``: of a tile, those of a group counted;
    ``between``: the fewest parts, and the most."""
    fewest, most = between
    blocks, longest = _blocks(problem, rows, config(fewest)["BLOCK_N"]), 0
    of_several = config(2)
    for splits in range(fewest, min(blocks, most) + 1):
        if -(-blocks // splits) != longest:
            longest = -(-blocks // splits)
            yield config(splits) if splits == 1 else {**of_several, "SPLITS": splits}


@lru_cache(maxsize=1024)
def best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """(estimated microseconds, config) of the fastest split by the portable kernel; fewer parts where two are as fast; None:
    none computes this call."""
    found = list(candidates(problem, gpu.arch))
    return _fastest(problem, gpu, found) if found else None


@lru_cache(maxsize=1024)
def hopper_best(problem: Problem, gpu: Gpu) -> tuple[float, Config] | None:
    """The same by the warp-specialised kernel; None: it cannot compute this call, or there are not two key blocks."""
    found = list(hopper_candidates(problem, gpu.arch))
    return _fastest(problem, gpu, found) if found else None


def _fastest(problem: Problem, gpu: Gpu, configs: Iterable[Config]) -> tuple[float, Config]:
    found = [(split_us(problem, config, gpu), config) for config in configs]
    least = min(time for time, _ in found)
    near = (one for one in found if one[0] <= (1 + AS_NEAR) * least)
    return min(near, key=lambda one: (one[1]["SPLITS"], one[0]))


def _short(problem: Problem) -> bool:
    return max(problem.seqlen_q, problem.seqlen_k) <= SHORT and problem.head_dim > SHORT_DIM and problem.group == 1


def _few(problem: Problem, gpu: Gpu) -> bool:
    tiles = problem.query_tiles(FULL_TILE) * problem.heads_q
    return problem.seqlen_q * problem.group <= FEW_ROWS or tiles <= IDLE_SHARE * gpu.sm_count


def _alike(problem: Problem) -> bool:
    """Whether tiles visit about as many keys each."""
    return problem.mask == FULL or problem.mask.window is not None or problem.seqlen_k >= HOPPER_KEYS * problem.seqlen_q


def _hopper_asked(problem: Problem, gpu: Gpu) -> bool:
    """Whether the warp-specialised kernel is asked: HOPPER_TURNS."""
    tiles = problem.query_tiles(FULL_TILE) * problem.heads_q
    turns = HOPPER_TURNS if _alike(problem) else 1.0 if visits.longest_last(problem.mask) else 0.0
    return problem.seqlen_q >= HOPPER_QUERIES and tiles <= turns * gpu.sm_count


def _by_longest_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Microseconds of a tuned causal forward in one turn; 0: not known, or of keys or head dims whose splits gained nothing."""
    if not visits.longest_last(problem.mask) or _alike(problem) or few_tiles.has_narrow_part(problem):
        return 0.0
    if max(problem.head_dim, problem.head_dim_v) > 128 and problem.seqlen_k > HOPPER_LONGEST:
        return 0.0
    return few_tiles.expected_us(problem, config, gpu.sm_count) or 0.0


def config_of(problem: Problem, config: Config, gpu: Gpu, row: Row | None = None) -> Config | None:
    """How the keys of a forward are split that ``config``, by ``row``, would serve otherwise; None: they are not. Of tensors
    that are not aligned nothing was measured."""
    if gpu.arch not in MEASURED_ON or not problem.aligned or problem.is_empty or problem.extent.ragged:
        return None
    few, hopper_asked = _few(problem, gpu), _hopper_asked(problem, gpu)
    if not few and not hopper_asked:
        return None
    otherwise, split = ordinary_us(problem, config, gpu, row), None
    share = 1 - (SHORT_MARGIN if _short(problem) else MARGIN)
    if few and (found := best(problem, gpu)) and found[0] < share * otherwise:
        otherwise, split = found
    if hopper_asked and (other := hopper_best(problem, gpu)):
        by_longest = 0.0 if split else _by_longest_us(problem, config, gpu)
        if other[0] < max((1 - HOPPER_MARGIN) * otherwise, (1 - MARGIN) * by_longest):
            split = other[1]
    return split


def about(problem: Problem, split: Config) -> str:
    """In one sentence, what runs in place of a forward's row."""
    heads = f"the {problem.group} query heads of a key head" if problem.group > 1 else "a query head"
    name, why = splitting(split).short_name, "a long sequence in few tiles" if problem.extent.ragged else "few tiles"
    said = f"fwd: {why}, so {name} runs instead, which is expected to be faster and has no row"
    said += "" if _is_hopper(split) else f": tiles have {heads} as rows"
    if split["SPLITS"] == 1:
        return f"{said}."
    joint = ":" if _is_hopper(split) else ", and"
    return f"{said}{joint} keys are split into {split['SPLITS']} parts, which are put together after."
