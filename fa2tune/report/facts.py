"""What the page says of rows: which is the best of its key, its place on the roofline, how near the error bound,
averages, what was pruned. Pure: rows and the catalogue in, numbers out."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from fa2tune import gpus
from fa2tune.gpus import Gpu
from fa2tune.rows.describe import described_row
from fa2tune.rows.pruned import spaces
from fa2tune.rows.row import PORTED, Row, over_portable, precedence, winner
from fa2tune.spec.key import DENSE_FAMILY, TuningKey
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BACKWARD, DTYPES, ITEMSIZE, KERNELS, Problem
from fa2tune.spec.tuned import moved, tuned
from fa2tune.spec.variant import PORTABLE_FOLDER

#: The two passes first, then the kernels of the backward.
KERNEL_ORDER = ("fwd", BACKWARD, *(kernel for kernel in KERNELS if kernel != "fwd"))
KERNEL_TITLES = {BACKWARD: "backward, whole", **{name: one.title for name, one in tuned().items()}}
#: When a point of the space was dropped, by its reason. A reason in neither group is a failure: a crash, say.
AFTER_COMPILE = ("shared_memory", "registers", "spills")
BY_ARITHMETIC, BY_LIMITS, BY_FAILURE = "arithmetic, before the compile", "limits, after the compile", "failures"


@dataclass(frozen=True)
class Standing:
    """A row, and what follows from it."""

    row: Row
    best: bool  #: the winner of its key: what a call gets, other loads and strategies aside
    share: float | None  #: of the GPU's peak; None for a GPU that is not in the catalogue
    intensity: float  #: FLOP per byte of device memory at the least, see ``least_bytes``
    nearness: float | None  #: largest error over its bound, of all tensors; None where none was recorded
    keeps_default: bool  #: it did not beat the portable default beyond the interval
    lead: float | None = None  #: of a warp-specialised row over the portable winner of its key

    @property
    def undecided(self) -> bool:
        """Whether the interval of its gain holds 1."""
        low, high = self.row.gain_low, self.row.gain_high
        return low is not None and high is not None and low <= 1.0 <= high


def place(names: Sequence[str], name: str) -> int:
    """For sorting: known names in their order, others after them."""
    return names.index(name) if name in names else len(names)


def order(key: TuningKey) -> tuple[object, ...]:
    """For sorting keys as the page has them."""
    return (
        key.gpu, key.sm_count, key.head_dim, key.head_dim_v, place(KERNEL_ORDER, key.kernel), key.kernel,
        place(DTYPES, key.dtype), key.dtype, key.precision, place(ROW_MASKS, key.mask), key.family, key.bucket,
    )  # fmt: skip


@cache
def listed_gpu(name: str, arch: int) -> Gpu | None:
    """The catalogue's entry for a key's GPU."""
    try:
        known = gpus.named(name)
    except ValueError:
        return None
    return known if known.arch == arch else None


def peak(key: TuningKey) -> float | None:
    """TFLOP/s of a key's GPU in its dtype."""
    gpu = listed_gpu(key.gpu, key.arch)
    if gpu is None or key.dtype not in ITEMSIZE:
        return None
    return gpu.peak(key.dtype, key.precision)


def workload(row: Row) -> Problem:
    """What a row was timed on; as its key says where the row does not."""
    problem = row.key.workload()
    if not row.heads_q or not row.heads_kv or not row.batch or row.key.family != DENSE_FAMILY:
        return problem
    key = row.key
    return Problem(
        key.dtype, row.batch, row.heads_q, row.heads_kv, key.bucket, key.bucket, key.head_dim, key.head_dim_v,
        problem.mask, key.precision,
    )  # fmt: skip


def least_bytes(problem: Problem, kernel: str) -> float:
    """Bytes a kernel must move: each tensor it reads or writes once. lse and delta are a float32 a row; the fused kernel adds
    to float32 sums of dQ, which is a read and a write. ValueError: there is no such kernel."""
    p, size = problem, ITEMSIZE.get(problem.dtype, 4)
    rows_q, rows_k = p.batch * p.heads_q * p.seqlen_q, p.batch * p.heads_kv * p.seqlen_k
    of_q, of_v = p.head_dim * size, p.head_dim_v * size
    each = {
        "q": rows_q * of_q, "dq": rows_q * of_q, "o": rows_q * of_v, "do": rows_q * of_v, "k": rows_k * of_q,
        "dk": rows_k * of_q, "v": rows_k * of_v, "dv": rows_k * of_v, "lse": rows_q * 4, "delta": rows_q * 4,
        "dq_sums": 2 * rows_q * p.head_dim * 4,
    }  # fmt: skip
    return float(sum(each[name] for name in moved(kernel)))


def nearness(row: Row) -> float | None:
    """The largest error as a share of its bound."""
    shares = [
        figures[name] / figures[f"{name}_allowed"]
        for figures in row.errors.values()
        for name in ("max", "rms")
        if isinstance(figures.get(name), (int, float)) and figures.get(f"{name}_allowed")
    ]
    return max(shares, default=None)


def standings(rows: Iterable[Row]) -> list[Standing]:
    """Every row in the page's order, the best of each key first."""
    by_key: dict[TuningKey, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    found = []
    for key in sorted(by_key, key=order):
        top = peak(key)
        ranked = sorted(by_key[key], key=precedence)
        best = winner(ranked)
        for row in ranked:
            problem = workload(row)
            work = problem.flops(key.kernel) if key.family == DENSE_FAMILY else key.flops()
            flops = work if key.kernel in KERNEL_TITLES else 0.0
            elsewhere = row.obtained == PORTED  # its time is of a GPU with another peak
            share = None if top is None or row.tflops is None or elsewhere else row.tflops / top
            keeps = row.gain_low is not None and row.gain_low <= 1.0
            found.append(
                Standing(
                    row,
                    row is best,
                    share,
                    flops / least_bytes(problem, key.kernel),
                    nearness(row),
                    keeps,
                    over_portable(row, ranked),
                )
            )
    return found


def mean_gain(some: Iterable[Standing]) -> float | None:
    """Geometric mean of the best rows' gains."""
    gains = [s.row.gain for s in some if s.best and s.row.gain]
    return statistics.geometric_mean(gains) if gains else None


def figure(value: float | None, digits: int = 3) -> str:
    """``digits`` significant ones, without exponents."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def gain_text(row: Row) -> str:
    """Its gain over the portable default config, with the interval where it was measured."""
    if row.gain is None:
        return ""
    if row.gain_low is None or row.gain_high is None:
        return f"{row.gain:.3f}"
    return f"{row.gain:.3f} [{row.gain_low:.3f}, {row.gain_high:.3f}]"


def config_text(row: Row) -> str:
    """Its config on half a line, heads-per-wave as hpw; the strategy of a whole backward, and the implementations in it."""
    return described_row(row).replace("heads-per-wave=", "hpw")


# ---- predicted against measured


@dataclass(frozen=True)
class TimedPrediction:
    """One candidate's time by the model and by measurement."""

    key: TuningKey
    config: str
    predicted_us: float
    measured_us: float


def rank_correlation(pairs: Sequence[TimedPrediction]) -> float | None:
    """Spearman's, equal values ranked alike; None where one side does not vary."""
    sides = [_ranks([p.predicted_us for p in pairs]), _ranks([p.measured_us for p in pairs])]
    try:
        return statistics.correlation(*sides)
    except statistics.StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered)))}
    last = {value: place for place, value in enumerate(ordered)}
    return [(first[value] + last[value]) / 2 for value in values]


def rank_correlations(pairs: Iterable[TimedPrediction]) -> dict[tuple[str, int], float]:
    """(kernel, head dim) -> the median over its keys of their rank correlations."""
    by_key: dict[TuningKey, list[TimedPrediction]] = {}
    for pair in pairs:
        by_key.setdefault(pair.key, []).append(pair)
    groups: dict[tuple[str, int], list[float]] = {}
    for key, mine in by_key.items():
        if (found := rank_correlation(mine)) is not None:
            groups.setdefault((key.kernel, key.head_dim), []).append(found)
    return {group: statistics.median(values) for group, values in groups.items()}


# ---- what was pruned


def stage(reason: str) -> str:
    """When a candidate with this status was dropped."""
    if reason in AFTER_COMPILE:
        return BY_LIMITS
    named = any(reason in rules for rules in reasons().values())
    return BY_ARITHMETIC if named or reason in _LIMITS else BY_FAILURE


#: Refusals of limits.before_compile, in words (their own name a config's numbers), and the search's own.
_LIMITS = {
    "architecture": "the kernel needs a higher compute capability",
    "call": "the kernel computes no call of this dtype, these head dims or this kind",
    "mask": "the kernel does not compute this mask",
    "score": "the kernel does not compute this score term",
    "scale": "the kernel does not compute a negative scale",
    "extent": "the kernel does not compute packed sequences",
    "threads_per_block": "more threads than a block may have",
    "interpreter": "the kernel is written in Gluon, which has no interpreter",
    "mma_shape": "a side smaller than a tensor core's product",
    "shared_memory_of_tiles": "the streamed tiles alone take more shared memory than a block may have",
    "hopeless": "by the model's estimate more than twice as slow as its best, at every length",
    "instruction_cache": "float32 products unroll past the instruction cache: minutes to compile, and slow",
}
_AFTER = {
    "shared_memory": "the binary needs more shared memory than the GPU gives a block",
    "registers": "registers of all warps exceed those of an SM",
    "spills": "more values spilled than kept in registers",
}


@cache
def reasons() -> Mapping[tuple[str, bool], Mapping[str, str]]:
    """(kernel, whether it is a specialised one) -> rule -> its reason."""
    found: dict[tuple[str, bool], dict[str, str]] = {}
    for path, space in spaces().items():
        folder, _, kernel = path.partition("/")
        rules = found.setdefault((kernel, folder != PORTABLE_FOLDER), {})
        rules |= {rule.name: rule.why for rule in space.constraints}
    return found


def rule_in_words(reason: str, kernel: str, specialized: bool = False) -> str:
    """A rule's reason in words, as that kernel's search space has it; where it has no such rule, of all that do. "" for a
    failure, which has a text of its own."""
    own = reasons().get((kernel, specialized), {}).get(reason)
    others = dict.fromkeys(rules[reason] for rules in reasons().values() if reason in rules)
    return own or " / ".join(others) or _LIMITS.get(reason) or _AFTER.get(reason, "")


@dataclass(frozen=True)
class Pruned:
    """How many points of each kernel and head dim one reason removed."""

    reason: str
    why: str  #: in words; kernels may have rules of one name for different reasons
    stage: str
    counts: Mapping[tuple[str, int], int]  #: (kernel, head dim) -> points, over dtypes and masks


def pruned(rows: Iterable[Row]) -> list[Pruned]:
    """By reason and its words, most first within a stage. Lengths and loads of one kernel and key share candidates: the
    largest number counts."""
    groups: dict[tuple[object, ...], Counter[str]] = {}
    for row in rows:
        key = row.key
        mine = groups.setdefault((key.kernel, key.head_dim, key.gpu, key.head_dim_v, key.dtype, key.precision, key.kind,
                                  row.warp_specialized), Counter())  # fmt: skip
        for reason, count in row.pruned.items():
            mine[reason] = max(mine[reason], count)
    counts: dict[tuple[str, str], Counter[tuple[str, int]]] = {}
    for (kernel, head_dim, *_, specialized), mine in groups.items():
        for reason, count in mine.items():
            said = reason, rule_in_words(reason, str(kernel), bool(specialized))
            counts.setdefault(said, Counter())[str(kernel), int(str(head_dim))] += count
    stages = (BY_ARITHMETIC, BY_LIMITS, BY_FAILURE)
    found = [Pruned(*said, stage(said[0]), cells) for said, cells in counts.items()]
    return sorted(found, key=lambda p: (stages.index(p.stage), -sum(p.counts.values()), p.reason))


# ---- where rows come from


@dataclass(frozen=True)
class Origin:
    """Rows obtained the same way with the same toolchain."""

    what: Mapping[str, str]  #: column -> value, "" where unknown
    rows: int
    clocks: tuple[int, int] | None  #: MHz, lowest and highest while measuring
    throttled: int | None  #: launches rejected because the GPU was throttled; None: clocks were not monitored
    created: tuple[str, str]  #: first and last
    hashes: Mapping[str, Sequence[str]]  #: kernel -> hashes of its source


def origins(rows: Iterable[Row]) -> list[Origin]:
    """One entry per GPU, way of obtaining and toolchain, most rows first."""
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        what = {
            "GPU": row.key.gpu, "SMs": str(row.key.sm_count), "obtained": row.obtained, "on": row.obtained_on,
            "numerics proved on": row.proof, "driver": row.driver, "Triton": row.triton, "torch": row.torch,
            "power limit, W": "" if row.power_limit_w is None else str(row.power_limit_w),
        }  # fmt: skip
        groups.setdefault(tuple(what.items()), []).append(row)
    found = []
    for named, members in groups.items():
        clocks = [row.clock_mhz for row in members if row.clock_mhz]
        throttled = [row.throttled for row in members if row.throttled is not None]
        dates = sorted(row.created for row in members if row.created) or [""]
        hashes: dict[str, set[str]] = {}
        for row in members:
            hashes.setdefault(row.key.kernel, set()).add(row.kernel_hash)
        found.append(
            Origin(
                dict(named),
                len(members),
                (min(clocks), max(clocks)) if clocks else None,
                sum(throttled) if throttled else None,
                (dates[0], dates[-1]),
                {kernel: sorted(hashes[kernel]) for kernel in sorted(hashes, key=lambda k: place(KERNEL_ORDER, k))},
            )
        )
    return sorted(found, key=lambda origin: -origin.rows)
