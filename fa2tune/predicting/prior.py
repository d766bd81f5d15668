"""The model's guess at a config that was never compiled: what its loop will hold, from the block sizes alone.

Instruction counts follow the kernels' own arithmetic: what a trip does with each score, each accumulator, each row. Registers
and shared memory follow what lives through the loop. Good enough to start a study and to call configs hopeless; a compiled
binary tells more (model.py, which makes a time of either). docs/model.md has the formulae.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fa2tune.catalogue import SCHEDULERS
from fa2tune.compiling import limits
from fa2tune.gpus import Gpu
from fa2tune.predicting import model
from fa2tune.predicting.model import MMA, Array, Candidates
from fa2tune.spec.problem import ITEMSIZE, Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.tuned import tuned
from fa2tune.spec.variant import DESCRIPTOR, WARP_GROUP, WARP_THREADS, Variant

MIN_REGISTERS, MAX_REGISTERS = 40, 255  #: of a thread
MIN_GROUP_ROWS = 64  #: rows of a product that a warp group of Hopper shares out
VECTOR_BYTES = 16  #: of one load or asynchronous copy a thread
COPY_INSTRUCTIONS = 4.0  #: of one load by pointer: the address, and the predicate that guards it
ROW_INSTRUCTIONS = 8.0  #: of one float32 of lse or delta, copied ahead of its trip
STRETCH = 12.0  #: instructions of a stretch between two products beside those that its numbers ask for
LOOP_REGISTERS = 25.0  #: of a thread, beside what a trip reckons with


@dataclass(frozen=True)
class _Registers:
    """What a thread needs, as a sum: a constant, and so much for each ..."""

    base: float
    accumulator: float
    score: float
    pointer: float = 0.0  #: if tiles are read by pointer
    copied: float = 0.0  #: load of 16 bytes by pointer in a trip
    pipelined: float = 0.0  #: if loads are asked for ahead
    row: float = 0.0  #: streamed row
    row_ahead: float = 0.0  #: the same, if loads are asked for ahead
    inside: float = 0.0  #: if the mask is behind a branch
    owned: float = 0.0  #: register's worth of the owned 16-bit tiles


# Robust linear regressions on the binaries of the tables in benchmarks/tables (a median error of 6 registers in the forward,
# of 18 to 29 in dK/dV); dQ and mma.sync of the forward follow 60 binaries.
FORWARD = _Registers(14, 1.3, 1.45, pointer=14, copied=4.2, inside=-6)
KEYS = _Registers(12, 1.55, -0.46, pointer=31, copied=1.5, pipelined=20, row=1.63, row_ahead=1.13, inside=-28)
KEYS_BY_HMMA = _Registers(85, 1.44, 0.34, copied=0.8, pipelined=37, row=0.6, inside=-45, owned=0.72)
QUERIES = _Registers(40, 1.0, 2.0, pointer=20)
QUERIES_BY_HMMA = _Registers(60, 1.0, 2.0, pointer=20, owned=1.0)
FORWARD_BY_HMMA = _Registers(60, 1.0, 1.0, pointer=20, owned=1.0)


def _arrays(configs: Sequence[Config]) -> dict[str, Array]:
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "maxnreg")
    found: dict[str, Array] = {name: np.array([[float(config[name])] for config in configs]) for name in names}
    found["heads_per_wave"] = np.array([float(config.get("HEADS_PER_WAVE", 1)) for config in configs])
    found["descriptor"] = np.array([[config.get("LOADS") == DESCRIPTOR] for config in configs])
    found["inside"] = np.array([[config.get("MASKED") == "inside"] for config in configs])
    return found


class Guess:
    """Candidates of one kernel and specialization, guessed at."""

    def __init__(self, variant: Variant, spec: Specialization, configs: Sequence[Config], gpu: Gpu) -> None:
        x = _arrays(configs)
        self.x, self.gpu, self.kernel = x, gpu, tuned()[variant.serves].loop
        self.size = ITEMSIZE[spec.dtype]
        self.d, self.dv = padded_head_dim(spec.head_dim), padded_head_dim(spec.head_dim_v)
        self.owns_queries = limits.owns_queries(variant, configs[0])
        own, stream = (x["BLOCK_M"], x["BLOCK_N"]) if self.owns_queries else (x["BLOCK_N"], x["BLOCK_M"])
        self.own, self.stream = own, stream
        self.warps = x["num_warps"]
        self.threads = self.warps * WARP_THREADS
        #: loads of a thread for a trip's tiles, if it reads them by pointer
        self.copied = stream * (self.d + self.dv) * self.size / (VECTOR_BYTES * self.threads)
        self.rows = 2.0 * np.maximum(1.0, own / (16.0 * self.warps))  #: of a tile's scores, rows a thread has a part of
        tensor_cores = spec.dtype != "fp32" or spec.precision == "tf32"
        group = tensor_cores & (gpu.arch == 90) & (own >= MIN_GROUP_ROWS) & (self.warps >= WARP_GROUP)
        self.group = np.asarray(group)
        single = (
            MMA["HMMA"]
            if tensor_cores and gpu.arch // 10 not in (10, 11)
            else MMA["UTCHMMA"]
            if tensor_cores
            else MMA[""]
        )
        self.mma = np.where(group, MMA["HGMMA"], single)
        # with fewer rows than warps can share out, several reckon the same scores
        repeat = np.where(group, 16.0 * self.warps / own, 256.0 * self.warps / (own * stream))
        self.repeat = np.clip(repeat, 1.0, 4.0)
        self.scores = self.repeat * own * stream / self.threads  #: a thread's
        columns = sum({"q": self.d, "v": self.dv}[one] for one in tuned()[self.kernel].accumulators)
        self.accumulators = own * columns / self.threads

    # ---- what a trip holds

    def product(self, columns: Array | float, depth: Array | float, scores: bool) -> dict[str, Array]:
        """One product of a trip, a warp's share: own rows x columns x depth. Scores come from two factors in shared memory,
        other products have one of them in registers."""
        own, size = self.own * (self.repeat if scores else 1.0), self.size
        flops = 2.0 * own * columns * depth / self.warps
        # a warp group reads B for its 64 rows, and A if that is not in registers; a warp of its own B for its 16
        groups = np.maximum(1.0, own / MIN_GROUP_ROWS)
        read = (groups * columns * depth + (own * depth if scores else 0.0)) * size
        deep = 32.0 / size  # one instruction's depth
        wide = np.minimum(256.0, columns)
        count = np.maximum(1.0, np.ceil(groups * columns / wide * depth / deep / np.maximum(1.0, self.warps / 4)))
        return {
            "tensor_flops": flops,
            "product_bytes": np.where(self.group, read / self.warps, 0.0),
            "products": np.where(self.group, count, flops / (2.0 * 16 * 8 * 16)),
            # mma.sync: each warp loads all of B, or its share of B's columns if there are not 16 rows for each warp
            "operand_bytes": np.where(
                self.group, 0.0, 1.5 * columns * depth * size * np.minimum(1.0, own / (16.0 * self.warps))
            ),
        }

    def stretches(self) -> list[dict[str, Any]]:
        """The trip as model and compiler have it: products, and what is done between them. Of the unmasked loop; "masked":
        instructions per score that a mask adds to one."""
        e, d, dv, stream = self.scores, self.d, self.dv, self.stream
        first = {"pending": -1.0, **self.product(stream, d, True), "issue": 15.0}
        if self.kernel == "fwd":
            soft = {
                "pending": 0.0, "mufu": e + self.rows, "fp32": 2.0 * e + self.accumulators + 5.0 * self.rows,
                "alu": 1.5 * e + 6.0 * self.rows, "shared_bytes": 4.0 * self.rows * 4 * WARP_THREADS, "masked": 4.0,
            }  # fmt: skip
            return [first, soft, {"pending": -1.0, **self.product(dv, stream, False), "alu": 5.0, "issue": 30.0}]
        exponent = {"pending": 0.0, "mufu": e, "fp32": e, "alu": 0.0 * e, "masked": 4.0}
        gradient = {"pending": 0.0, "fp32": 2.0 * e, "alu": 0.5 * e}
        second = {"pending": -1.0, **self.product(stream, dv, True), "issue": 15.0}
        last = {"pending": -1.0, **self.product(d, stream, False), "alu": 5.0, "issue": 30.0}
        if self.kernel == "bwd_dq":
            return [first, exponent, second, gradient, last]
        exponent["alu"] = 0.5 * e
        # lse and delta of every streamed row: each thread has a quarter of them, of both
        floats = np.where(self.group, stream / 2.0, np.maximum(2.0, stream / 16.0))
        ahead = self.x["num_stages"] > 1
        each = np.where(ahead, ROW_INSTRUCTIONS, 2.0)
        last = {
            **last, "fp32": np.where(self.group, 20.0, 15.0) + 0.2 * each * floats,
            "alu": np.where(self.group, 45.0, 22.0) + 0.6 * each * floats, "issue": 30.0 + 0.2 * each * floats,
            "copies": floats,
        }  # fmt: skip
        found = [
            first,
            exponent,
            {"pending": -1.0, **self.product(dv, stream, False), "issue": 20.0},
            second,
            gradient,
            last,
        ]
        if self.kernel == "bwd_fused":
            atomics = stream * self.d / self.threads
            extra = self.product(d, stream, True)
            found += [{"pending": -1.0, **extra}, {"pending": 0.0, "issue": atomics, "atomics": atomics}]
        return found

    def candidates(self) -> Candidates:
        """What the model reckons with."""
        x = self.x
        registers, spills = self.registers()
        fit = self.fit(registers, self.shared_bytes())
        stretches = self.stretches()
        by_pointer = np.where(x["descriptor"], 0.0, self.copied)
        loads = {
            "copies": by_pointer, "alu": by_pointer, "issue": COPY_INSTRUCTIONS * by_pointer,
            "shared_bytes": by_pointer * VECTOR_BYTES * WARP_THREADS,
        }  # fmt: skip
        spilled = self.spilled_words(spills) * 4 * WARP_THREADS
        tail = stretches[-1]
        for name, value in {**loads, "local_bytes": spilled}.items():
            tail[name] = tail.get(name, 0.0) + value
        single = x["num_stages"] == 1
        stretches.append({"pending": np.where(single, 0.0, -1.0), "issue": np.where(single, STRETCH, 0.0)})
        shape = (len(fit), 2)
        way = np.array([[0.0, 1.0]])
        phases = np.zeros((len(stretches), len(model.PHASE_FIELDS), *shape))
        counts = {name: np.zeros(shape) for name in model.COUNTS}
        for row, stretch in enumerate(stretches):
            values = {
                name: np.zeros(shape) + stretch.get(name, 0.0)
                for name in {*model.PHASE_FIELDS, *model.COUNTS, "operand_bytes"}
            }
            values["alu"] = values["alu"] + stretch.get("masked", 0.0) * self.scores * way
            numbers = values["mufu"] + values["fp32"] + values["alu"] + values["products"]
            values["issue"] = values["issue"] + numbers + np.where(self.group, STRETCH, STRETCH / 2.0)
            values["shared_bytes"] = values["shared_bytes"] + values["operand_bytes"]
            for column, name in enumerate(model.PHASE_FIELDS):
                phases[row, column] = values[name]
            for name, total in counts.items():
                total += values[name]
        counts["shared_bytes"] = counts["shared_bytes"] + counts["product_bytes"]
        counts["meetings"] += np.where(single, np.where(x["descriptor"], 10.0, 4.0), 3.0)
        return Candidates(
            x["BLOCK_M"], x["BLOCK_N"], self.warps, x["num_stages"], x["descriptor"], x["heads_per_wave"], fit,
            self.mma + np.zeros(shape), counts, phases, np.ones(len(fit)),
        )  # fmt: skip

    # ---- what a block takes

    def registers(self) -> tuple[Array, Array]:
        """(registers, spilled words) of a thread."""
        group, single = self._sums()
        needed = np.maximum(MIN_REGISTERS, np.where(self.group, self._needed(group), self._needed(single)))
        cap = self._cap()
        return np.minimum(needed, cap), np.maximum(0.0, needed - cap)

    def _sums(self) -> tuple[_Registers, _Registers]:
        """With warp groups, and without."""
        if self.kernel == "fwd":
            return FORWARD, FORWARD_BY_HMMA
        return (QUERIES, QUERIES_BY_HMMA) if self.owns_queries else (KEYS, KEYS_BY_HMMA)

    def _needed(self, per: _Registers) -> Array:
        x = self.x
        by_pointer, ahead = ~x["descriptor"], x["num_stages"] > 1
        columns = self.d if self.owns_queries else self.d + self.dv
        return (
            per.base
            + per.accumulator * self.accumulators
            + per.score * self.scores
            + by_pointer * (per.pointer + per.copied * self.copied)
            + ahead * per.pipelined
            + self.stream * (per.row + ahead * per.row_ahead)
            + x["inside"] * per.inside
            + per.owned * self.own * columns * self.size / 4.0 / self.threads
        )

    def _cap(self) -> Array:
        cap = np.minimum(MAX_REGISTERS, self.gpu.registers_per_sm / self.threads)
        return np.where(self.x["maxnreg"] > 0, np.minimum(cap, self.x["maxnreg"]), cap)

    def spilled_words(self, spills: Array) -> Array:
        """Read or written a trip by a thread. If a trip's own values do not fit, each spilled one goes out and comes back;
        otherwise the forward spills little that its loop does not touch, and the others spill pointers first."""
        scores = (1.5 if self.kernel == "fwd" else 2.0) * self.scores
        own = self.accumulators + scores + LOOP_REGISTERS > self._cap()
        return spills * np.where(own, 2.0 if self.owns_queries else 1.2, 0.8 if self.owns_queries else 0.15)

    def shared_bytes(self) -> Array:
        """Of a block."""
        stages = self.x["num_stages"]
        both = self.stream * (self.d + self.dv) * self.size
        wider = self.stream * max(self.d, self.dv) * self.size if self.kernel == "fwd" else both
        # a product of a warp group reads its tile in place, until the next trip: one copy more
        copies = np.where(self.group, stages, stages - 1.0)
        owned = self.own * (self.d if self.kernel == "fwd" else self.d + self.dv) * self.size
        # scores that become an operand of mma.sync change their layout on the way out of a branch, or if warps share rows
        through = ~self.group & (self.x["inside"] | (self.own < 16.0 * self.warps))
        return (
            owned
            + np.where(stages > 1, copies * both, wider)
            + np.where(through, self.own * self.stream * self.size, 0.0)
        )

    def fit(self, registers: Array, shared: Array) -> Array:
        """Blocks an SM holds; 1 where by this guess it would hold none: the compiler has the last word."""
        gpu = self.gpu
        unit = limits.REGISTER_UNIT
        per_warp = np.ceil(registers * WARP_THREADS / unit) * unit
        warps = gpu.registers_per_sm // SCHEDULERS // per_warp * SCHEDULERS
        found = np.minimum.reduce(
            [
                warps // self.warps,
                gpu.shared_per_sm // (shared + limits.SHARED_RESERVED),
                gpu.warps_per_sm // self.warps,
                np.full_like(self.warps, gpu.blocks_per_sm),
            ]
        )  # fmt: skip
        return np.maximum(1.0, found[:, 0])


def estimates(
    variant: Variant,
    spec: Specialization,
    configs: Sequence[Config],
    gpu: Gpu,
    problem: Problem,
    calibration: model.Calibration = model.CALIBRATION,
) -> list[float]:
    """Microseconds each config should take for ``problem`` on ``gpu``, by arithmetic alone."""
    if not configs:
        return []
    if not variant.modelled:  # all alike, and none of them hopeless
        return [problem.flops(variant.serves) / (gpu.peak(problem.dtype, problem.precision) * 1e12) * 1e6] * len(
            configs
        )
    guess = Guess(variant, spec, configs, gpu)
    found = model.times(guess.candidates(), variant.serves, guess.owns_queries, problem, gpu, calibration)
    return [float(seconds) * 1e6 for seconds in found.seconds]


@lru_cache(maxsize=128)
def _whole_space(variant: Variant, spec: Specialization, gpu: Gpu, problem: Problem) -> Mapping[tuple[Any, ...], float]:
    points = list(variant.space.points())
    times = estimates(variant, spec, points, gpu, problem)
    return {tuple(config.values()): time_us for config, time_us in zip(points, times, strict=True)}


def estimate(variant: Variant, spec: Specialization, config: Config, gpu: Gpu, problem: Problem) -> float:
    """``estimates`` of one config: microseconds. The first call reckons the whole space (some 10 ms), the others look it up."""
    known = _whole_space(variant, spec, gpu, problem)
    where = tuple(config.get(name) for name in variant.space.dimensions)
    if where in known:
        return known[where]
    return estimates(variant, spec, [config], gpu, problem)[0]
