"""Which row serves a tuning key, and why: the lookup ladder.

Windows and packed sequences have families of their own, whose rows come first (``of_family``); then dense ones, as here.
What no row may ever differ in: kernel, family, causal or not, float32 precision, compute capability, 16-bit or 32-bit element
type; and padded head dims, but for the last step of the problem. Among the rest the first difference decides, in this order:

1. **Problem**: exact key; same columns (head dims that are the same sum of powers of two, 88 and 96); same padded head dim;
   nearest bucket; other 16-bit dtype; wider head dims (of warp-specialised kernels, rows whose Q and V are both padded to the
   wider of the key's two, at least to ``NARROWEST``: of 64 for 32, of 128 for a V of 32 beside a Q of 128; of kernels that
   name themselves the same for a V apart, from ``NARROWEST`` on). Each step allows what those before it allow.
   Within a step the nearest bucket comes first (the longer of two as near), then the same columns, then rows of the padded
   head dims themselves (for 80 those of 128 before those of 96, whose tiles were chosen for other
   columns), then the nearest head dims.
2. **GPU and evidence**, ``STANDING`` below: exact GPU (name and SM count), then same silicon (an H100 for an H200, a
   MIG slice for the whole), then same architecture; on each measured, then measured on a sibling, then ported (measured on
   a GPU of another architecture that ran this one's code), then predicted. With one exception: what was measured on this
   silicon stands before what was ported to or predicted for the exact GPU, as it is what a row "measured on a sibling"
   holds, and what was ported to this silicon before what was predicted for the GPU. So a laptop's prediction never shadows
   a fleet's measurement of the same problem.
   Of two GPUs on one step the one with the nearest SM count comes first. An unlisted GPU matches its own name exactly
   or else the architecture step.
3. **Fresh** over stale: made with this kernel source and this Triton, or with another one whose machine code is here. Of
   stale rows first those of this kernel source, then those of the nearest minor release of Triton (another one cost rows up
   to half their speed), then those of this very Triton.
4. **Layer**: named over user over fleet over shipped; of the fleet's files the first. Shipped files have no order.
5. **Machine code**: of a layer's rows of several Tritons, otherwise equal so far, first those whose machine code is here: it
   is what was measured, and nothing is compiled.
6. **Driver**: then those timed under this driver. Another driver makes no row stale: ptxas comes with Triton, so the machine
   code is the same.
7. **Time**: of a key's rows (pointer and descriptor loads, warp-specialised; split and fused backward) the fastest, see
   ``Row.rank_us``.

The first row in this order that ``acceptable`` does not refuse is the answer; without one, the caller takes its
documented default config. Pure: no torch, no files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any

from fa2tune import gpus
from fa2tune.rows.reader import Layer, ShippedRows
from fa2tune.rows.row import MEASURED, PORTED, PREDICTED, SIBLING, Row
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import head_dim_parts, padded_head_dim

WIDER = "wider head dims"
PROBLEM_STEPS = ("exact", "same columns", "same padded head dim", "nearest bucket", "other 16-bit dtype", WIDER)
#: Padded head dim of the narrowest rows that are shipped for Hopper.
NARROWEST = 64
GPU_STEPS = EXACT, SILICON, ARCHITECTURE = ("exact", "same silicon", "same architecture")
SIXTEEN_BIT = ("bf16", "fp16")

#: (GPU step, evidence), best first.
STANDING = (
    (EXACT, MEASURED),
    (EXACT, SIBLING),
    (SILICON, MEASURED),
    (SILICON, SIBLING),
    (EXACT, PORTED),
    (SILICON, PORTED),
    (EXACT, PREDICTED),
    (SILICON, PREDICTED),
    (ARCHITECTURE, MEASURED),
    (ARCHITECTURE, SIBLING),
    (ARCHITECTURE, PORTED),
    (ARCHITECTURE, PREDICTED),
)
_PLACE = {standing: place for place, standing in enumerate(STANDING)}


def _not_here(row: Row) -> bool:
    return False


@dataclass(frozen=True)
class Toolchain:
    """What a row must have been made with to be fresh, and the driver. An empty or missing entry is not compared: a machine
    without a GPU has no driver."""

    triton: str = ""
    driver: str = ""  #: orders rows that are as fresh; makes none stale
    kernel_hashes: Mapping[str, str] = field(default_factory=dict)  #: fingerprint.kernel_hashes
    #: whether the machine code that a row was measured with is here, so that no Triton compiles it
    held: Callable[[Row], bool] = field(default=_not_here, compare=False)

    def _parts(self, row: Row) -> tuple[tuple[str, str, str], ...]:
        """(what, then, now) of all that decides the machine code."""
        compiler = self.triton if self.triton in ("", row.triton) or not self.held(row) else row.triton
        kernel_hash = self.kernel_hashes.get(row.source, "")
        return ("triton", row.triton, compiler), ("kernel source", row.kernel_hash, kernel_hash)

    def stale(self, row: Row) -> tuple[str, ...]:
        """What ``row`` was made with that is not so today; empty: fresh."""
        return self.compared(row)[1]

    def compared(self, row: Row) -> tuple[tuple[bool, float, bool], tuple[str, ...]]:
        """How far a row's toolchain is from today's, for sorting: (another kernel source, how many minor releases of Triton,
        another Triton). And ``stale``."""
        triton, source = parts = [
            (what, then, now) if now not in ("", then) else None for what, then, now in self._parts(row)
        ]
        stale = tuple(f"{what} {then or 'unknown'}, now {now}" for what, then, now in filter(None, parts))
        return (bool(source), _apart(row.triton, self.triton) if triton else 0.0, bool(triton)), stale

    def other_driver(self, row: Row) -> str:
        """That ``row`` was timed under another driver than today's, as half a sentence; "": it was not. A prediction involved
        no driver."""
        if row.obtained == PREDICTED or self.driver in ("", row.driver):
            return ""
        return f"timed under driver {row.driver or 'unknown'}, here {self.driver}"


def _apart(one: str, other: str) -> float:
    """How many minor releases of Triton lie between two versions, a major one counting as a thousand; unknown ones are the
    farthest."""
    mine, theirs = (re.match(r"(\d+)\.(\d+)", version) for version in (one, other))
    if not mine or not theirs:
        return math.inf
    return abs(1000 * (int(mine[1]) - int(theirs[1])) + int(mine[2]) - int(theirs[2]))


@dataclass(frozen=True)
class Candidate:
    """A row that could serve, and where it stands."""

    row: Row
    layer: Layer
    problem_step: str  #: one of PROBLEM_STEPS
    gpu_step: str  #: one of GPU_STEPS
    stale: tuple[str, ...]  #: what it was made with that is not so today; empty: fresh

    @property
    def step(self) -> str:
        """For counting and logging: "problem exact, GPU same silicon, measured, fresh, shipped layer"."""
        age = "stale" if self.stale else "fresh"
        return f"problem {self.problem_step}, GPU {self.gpu_step}, {self.row.obtained}, {age}, {self.layer.name} layer"


@dataclass(frozen=True)
class Refused:
    """A row that stood before the answer but cannot serve this problem on this GPU."""

    candidate: Candidate
    why: str


@dataclass(frozen=True)
class Answer(Candidate):
    """The row that serves."""

    refused: tuple[Refused, ...] = ()


Differences = Mapping[str, tuple[Any, Any]]


def differences(key: TuningKey, other: TuningKey) -> Differences:
    """Field -> (what ``key`` asks, what ``other`` has), where they differ."""
    pairs = {f.name: (getattr(key, f.name), getattr(other, f.name)) for f in fields(TuningKey)}
    return {name: (mine, theirs) for name, (mine, theirs) in pairs.items() if mine != theirs}


def _fixed(key: TuningKey) -> tuple[Any, ...]:
    """What no step crosses."""
    width = 16 if key.dtype in SIXTEEN_BIT else key.dtype
    padded = padded_head_dim(key.head_dim), padded_head_dim(key.head_dim_v)
    return key.arch, key.kernel, key.mask, key.family, width, key.precision, padded


@lru_cache(maxsize=64)
def _by_fixed(layer: Layer) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in layer.rows:
        found.setdefault(_fixed(row.key), []).append(row)
    return found


@lru_cache(maxsize=4096)
def _relatives(layer: Layer, fixed: tuple[Any, ...]) -> Sequence[Row]:
    """The rows of a layer that agree in what no step crosses."""
    if not isinstance(layer.rows, ShippedRows):
        return _by_fixed(layer).get(fixed, ())
    arch, kernel, mask, family, width, precision, (padded, padded_v) = fixed
    return layer.rows.of(
        arch, kernel, mask=(mask,), family=(family,), precision=(precision,),
        dtype=SIXTEEN_BIT if width == 16 else (width,), head_dim=_padded_to(padded), head_dim_v=_padded_to(padded_v),
    )  # fmt: skip


@cache
def _padded_to(padded: int) -> frozenset[int]:
    return frozenset(dim for dim in range(1, padded + 1) if padded_head_dim(dim) == padded)


@lru_cache(maxsize=4096)
def _of_key(layer: Layer, key: TuningKey) -> Sequence[Row]:
    """The relatives of a key that agree with it in all but the GPU: a row that is asked for is checked first, which takes 0.1
    ms, and these alone mostly serve."""
    if isinstance(layer.rows, ShippedRows):
        found: Sequence[Row] = layer.rows.of(
            key.arch, key.kernel, mask=(key.mask,), family=(key.family,), precision=(key.precision,),
            dtype=(key.dtype,), head_dim=(key.head_dim,), head_dim_v=(key.head_dim_v,), bucket=(key.bucket,),
        )  # fmt: skip
        return found
    return [row for row in _relatives(layer, _fixed(key)) if _problem(key, row.key)[0] == 0]


@cache
def _silicon(gpu: str, arch: int) -> str:
    """Silicon of a row's GPU; "" where it is not known."""
    try:
        known = gpus.named(gpu)
    except ValueError:
        return ""
    return known.silicon if (known.name, known.arch) == (gpu, arch) else ""


def same_columns(key: TuningKey, head_dim: int, head_dim_v: int) -> bool:
    """Whether a key's head dims are the same sums of powers of two as these."""
    return _columns(key) == (head_dim_parts(head_dim), head_dim_parts(head_dim_v))


def _columns(key: TuningKey) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the tiles of a kernel that lays a head dim out as a sum of powers of two."""
    return head_dim_parts(key.head_dim), head_dim_parts(key.head_dim_v)


def _problem(key: TuningKey, row: TuningKey) -> tuple[int, float, float, int, int]:
    """(problem step, distances in bucket, columns and head dims); smaller is better."""
    same_dims = (key.head_dim, key.head_dim_v) == (row.head_dim, row.head_dim_v)
    theirs = _columns(row)
    columns = 0 if same_dims or theirs == _columns(key) else 1 if theirs[0][1] == theirs[1][1] == 0 else 2
    step = 4 if key.dtype != row.dtype else 3 if key.bucket != row.bucket else 0 if same_dims else 2 if columns else 1
    buckets = math.log2(row.bucket / key.bucket)
    dims = abs(key.head_dim - row.head_dim) + abs(key.head_dim_v - row.head_dim_v)
    return step, abs(buckets), -buckets, columns, dims


def _same_gpu(key: TuningKey, row: TuningKey) -> bool:
    """Rows that were tuned before their GPU was in the catalogue are filed under its driver's name."""
    if key.sm_count != row.sm_count:
        return False
    return key.gpu == row.gpu or key.gpu == gpus.identify(row.gpu, row.arch, row.sm_count).name


def gpu_step(key: TuningKey, silicon: str, row: TuningKey) -> str:
    """One of GPU_STEPS, for a GPU (that of ``key``) and the GPU of a row, of the same architecture."""
    if _same_gpu(key, row):
        return EXACT
    # Of an unlisted GPU only the name is known: with another SM count it is a slice of the same silicon.
    return SILICON if key.gpu == row.gpu or silicon == _silicon(row.gpu, row.arch) else ARCHITECTURE


def candidates(key: TuningKey, gpu_silicon: str, layers: Sequence[Layer], toolchain: Toolchain) -> Iterator[Candidate]:
    """Every row that could serve ``key``, best first. ``gpu_silicon``: ``Gpu.silicon`` of the GPU that asks."""
    fixed = _fixed(key)
    yield from _sorted(key, gpu_silicon, [(layer, _of_key(layer, key)) for layer in layers], toolchain)
    rest = [(layer, [row for row in _relatives(layer, fixed) if _problem(key, row.key)[0]]) for layer in layers]
    yield from _sorted(key, gpu_silicon, rest, toolchain)
    if (wider := _widened(key)) is not None:
        fixed = _fixed(wider)
        narrow = max(padded_head_dim(key.head_dim), padded_head_dim(key.head_dim_v)) < NARROWEST
        rows = [
            (
                layer,
                [row for row in _relatives(layer, fixed) if row.warp_specialized or (row.names_itself and not narrow)],
            )
            for layer in layers
        ]
        found = _sorted(wider, gpu_silicon, rows, toolchain)
        yield from (replace(one, problem_step=WIDER) for one in found)


def of_family(
    key: TuningKey, gpu_silicon: str, layers: Sequence[Layer], toolchain: Toolchain
) -> Iterator[Candidate]:  # fmt: skip
    """Rows of a family of its own (windows, packed sequences), which stand before dense ones: of the very length and dtype,
    for head dims that are padded alike, measured on this silicon or ported to it, and fresh."""
    fixed, far = _fixed(key), PROBLEM_STEPS.index("nearest bucket")
    near = [(layer, [row for row in _relatives(layer, fixed) if _problem(key, row.key)[0] < far]) for layer in layers]
    for one in _sorted(key, gpu_silicon, near, toolchain):
        if one.gpu_step != ARCHITECTURE and one.row.obtained != PREDICTED and not one.stale:
            yield one


def _widened(key: TuningKey) -> TuningKey | None:
    """The key with both head dims as wide as the padded wider one, at least ``NARROWEST``; None: padded they are already."""
    padded = padded_head_dim(key.head_dim), padded_head_dim(key.head_dim_v)
    widest = max(*padded, NARROWEST)
    return None if padded == (widest, widest) else key.with_(head_dim=widest, head_dim_v=widest)


def _sorted(
    key: TuningKey, gpu_silicon: str, layers: Sequence[tuple[Layer, Sequence[Row]]], toolchain: Toolchain
) -> Iterator[Candidate]:
    """Those of ``layers``, best first."""
    found = []
    shipped = next((place for place, (layer, _) in enumerate(layers) if layer.name == "shipped"), 0)
    mixed = len({row.triton for _, rows in layers for row in rows}) > 1
    for place, (layer, rows) in enumerate(layers):
        place = shipped if layer.name == "shipped" else place  # their files have no order
        for row in rows:
            step, *distances = _problem(key, row.key)
            on = gpu_step(key, gpu_silicon, row.key)
            standing = _PLACE[on, row.obtained], abs(key.sm_count - row.key.sm_count), row.key.gpu
            driver = bool(toolchain.other_driver(row))
            age, stale = toolchain.compared(row)
            compiles = mixed and not toolchain.held(row)
            order = (step, *distances, *standing, age, place, compiles, driver, row.rank_us, row.filed_as)
            found.append((order, row, layer, step, on, stale))
    for _, row, layer, step, on, stale in sorted(found, key=itemgetter(0)):
        yield Candidate(row, layer, PROBLEM_STEPS[step], on, stale)


class Ladder(Iterable[Candidate]):
    """Candidates that may be gone through again and again, each worked out once, when it is first asked for. Mostly a first
    call asks for a few. Of one thread."""

    def __init__(self, candidates: Iterator[Candidate]) -> None:
        self._seen, self._rest = list[Candidate](), candidates

    def __iter__(self) -> Iterator[Candidate]:
        number = 0
        while True:
            if number == len(self._seen):
                found = next(self._rest, None)
                if found is None:
                    return
                self._seen.append(found)
            yield self._seen[number]
            number += 1

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None


def find(
    key: TuningKey,
    gpu_silicon: str,
    layers: Sequence[Layer],
    acceptable: Callable[[Row], str | None],
    toolchain: Toolchain,
) -> Answer | None:
    """The row that serves ``key``, or None: then the documented default config does.

    ``acceptable(row)``: None, or why the row cannot run this problem on this GPU (its limits, a tensor that a
    descriptor cannot address, a kernel that is not deterministic).
    """
    return choose(candidates(key, gpu_silicon, layers, toolchain), acceptable)[0]


def choose(
    found: Iterable[Candidate], acceptable: Callable[[Row], str | None]
) -> tuple[Answer | None, tuple[Refused, ...]]:
    """The first of ``found`` that is acceptable, and what was refused before it."""
    refused: tuple[Refused, ...] = ()
    for candidate in found:
        why = acceptable(candidate.row)
        if why is None:
            return Answer(**vars(candidate), refused=refused), refused
        refused = (*refused, Refused(candidate, why))
    return None, refused


def of_other_lengths(answer: Answer, toolchain: Toolchain) -> Iterator[Row]:
    """Rows of the answer's file that differ from its row in the length bucket alone, and are as fresh."""
    mine = answer.row
    yield from (
        row
        for row in _relatives(answer.layer, _fixed(mine.key))
        if (row.filed_as, row.obtained, row.key.with_(bucket=mine.key.bucket))
        == (mine.filed_as, mine.obtained, mine.key)
        and row.key.bucket != mine.key.bucket
        and bool(toolchain.stale(row)) == bool(answer.stale)
    )


def driver_decides(rows: Iterable[Row]) -> bool:
    """Whether the driver can decide which of a layer's ``rows`` serves a call: some that no earlier step of the ladder need
    tell apart were timed under different drivers."""
    drivers: dict[tuple[Any, ...], str] = {}
    for row in rows:
        alike = _fixed(row.key), row.key.dtype, row.key.bucket, row.key.gpu, row.obtained
        if row.obtained != PREDICTED and drivers.setdefault(alike, row.driver) != row.driver:
            return True
    return False


def near_misses(key: TuningKey, layers: Sequence[Layer]) -> list[tuple[Differences, Layer]]:
    """For a key that nothing can serve: the three kinds of rows that differ from it in the fewest fields, and in which."""
    found: dict[tuple[Any, ...], tuple[Differences, Layer]] = {}
    for layer in layers:
        for row in layer.rows:
            # Buckets and GPUs of the same architecture never stand in the way.
            aside = replace(row.key, bucket=key.bucket)
            if row.key.arch == key.arch:
                aside = replace(aside, gpu=key.gpu, sm_count=key.sm_count)
            difference = differences(key, aside)
            found.setdefault(tuple(difference.items()), (difference, layer))
    return sorted(found.values(), key=lambda pair: len(pair[0]))[:3]
