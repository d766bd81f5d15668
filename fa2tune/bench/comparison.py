"""``fa2tune bench`` without its command line: which cells, whether each peer is right, how fast, and the results file.

A cell is one (problem, pass) timed in one way for every peer in one run, or, for memory, its peak. The file is written after
each cell.
Importable without torch.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fa2tune.bench.oracle import reference, tile_error
from fa2tune.bench.packed import PackedProblem, posed
from fa2tune.bench.peers import SUBJECT, Peer
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import (
    BUCKETS,
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    WORKLOAD_HIDDEN,
    WORKLOAD_TOKENS,
    Problem,
)
from fa2tune.spec.score import NONE, Score

if TYPE_CHECKING:
    import torch

    Call = Callable[[], tuple[torch.Tensor, ...]]

BENCHED = ("fwd", "bwd", "both")
#: How a cell is timed -> its kind: every launch behind another peer's and out of a cold L2; or each peer for turns alone
TIMINGS = {"interleaved": "time", "sustained": "sustained"}
PACKED_TIMINGS = {"interleaved": "packed", "sustained": "packed-sustained"}  #: the same of packed sequences
BENCH_DTYPES = ("bf16", "fp16")
HEAD_DIMS = (64, 128, 256)
MEMORY_SEQLENS = (*BUCKETS, 32768, 65536, 131072)
SCHEMA = 1
MAX_FILE = 64 << 20  #: bytes of a results file; one of a whole grid has 0.2 MiB

#: What each pass returns, in order.
_RESULTS = {"fwd": ("o",), "bwd": ("dq", "dk", "dv"), "both": ("dq", "dk", "dv")}
#: Largest error let pass, relative, by tile (see tile_error). Loose: this asks "the right computation?", not "how exact?"
MOST_ERROR = {"bf16": 0.05, "fp16": 0.01}


class BenchError(RuntimeError):
    """The benchmark cannot go on. The message says what to do."""


class Rig(Protocol):
    """What bench needs of a GPU: see fa2tune.bench.gpu.BenchGpu."""

    device: str

    def environment(self) -> dict[str, Any]: ...
    def healthy(self) -> bool: ...
    def free_bytes(self) -> int: ...
    def release(self) -> None: ...
    def peak_bytes(self, call: Callable[[], object]) -> int: ...
    def time(self, calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]: ...
    def sustain(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]: ...


# ---- what is measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    kind: str  #: "memory", or one of TIMINGS' or PACKED_TIMINGS' values
    problem: Problem
    pass_: str  #: one of BENCHED

    @property
    def identity(self) -> dict[str, Any]:
        """The fields a cell is recognised by in a results file."""
        p = self.problem
        named = p.mask.measured or p.mask.window is not None  # by the fields "causal" and "window"
        return {
            "kind": self.kind, "dtype": p.dtype, "head_dim": p.head_dim, "causal": p.mask.row_mask == "causal",
            "window": p.mask.window and list(p.mask.window), "mask": None if named else [p.mask.name, *p.mask.values],
            "score": None if p.score == NONE else [p.score.name, *p.score.values],
            "seqlen": p.seqlen_q, "batch": p.batch, "heads": p.heads_q, "pass": self.pass_,
            "packed": list(p.lengths) if isinstance(p, PackedProblem) else None,
        }  # fmt: skip

    def __str__(self) -> str:
        p = self.problem
        return f"{self.kind} {self.pass_} {p.dtype} head dim {p.head_dim} {p.mask} score {p.score} length {p.seqlen_q}"


def flops(problem: Problem, pass_: str) -> float:
    """As the FlashAttention-2 paper counts: see Problem.flops; "both" is forward plus backward."""
    return sum(problem.flops(one) for one in (("fwd", "bwd") if pass_ == "both" else (pass_,)))


@dataclass(frozen=True)
class Grid:
    """The FlashAttention-2 paper's settings (section 4.1) at the chosen head dims, masks and lengths: 16k tokens in all,
    hidden size 2048. Memory is measured at batch 1, one dtype, head dim, mask and score term. ValueError names a bad value."""

    dtypes: Sequence[str] = ("bf16",)
    head_dims: Sequence[int] = HEAD_DIMS
    masks: Sequence[Mask] = (FULL, CAUSAL)
    scores: Sequence[Score] = (NONE,)  #: terms
    seqlens: Sequence[int] = BUCKETS
    passes: Sequence[str] = BENCHED
    timings: Sequence[str] = ("interleaved",)
    memory_seqlens: Sequence[int] = MEMORY_SEQLENS
    packings: Sequence[tuple[int, ...]] = ()  #: packed sequences by their lengths: in place of all other cells

    def __post_init__(self) -> None:
        words = (
            ("dtype", self.dtypes, BENCH_DTYPES),
            ("pass", self.passes, BENCHED),
            ("timing", self.timings, TIMINGS),
        )
        for name, values, allowed in words:
            for value in values:
                if value not in allowed:
                    raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(allowed)}")
        for dim in self.head_dims:
            if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM or dim % HEAD_DIM_STEP:
                raise ValueError(
                    f"headdim: got {dim}, allowed are {MIN_HEAD_DIM} to {MAX_HEAD_DIM} in steps of {HEAD_DIM_STEP}"
                )
        for length in (*self.seqlens, *self.memory_seqlens):
            if length < 1:
                raise ValueError(f"seqlen: got {length}, allowed are lengths from 1 up")

    def cells(self) -> list[Cell]:
        if self.packings:
            return [
                Cell(
                    PACKED_TIMINGS[timing],
                    posed(dtype, dim, max(1, WORKLOAD_HIDDEN // dim), mask, lengths, score),
                    pass_,
                )
                for dtype, dim, mask, score, lengths, pass_, timing in itertools.product(
                    self.dtypes, self.head_dims, self.masks, self.scores, self.packings, self.passes, self.timings
                )
            ]
        timed = [
            Cell(TIMINGS[timing], _problem(dtype, dim, mask, score, length, max(1, WORKLOAD_TOKENS // length)), pass_)
            for dtype, dim, mask, score, length, pass_, timing in itertools.product(
                self.dtypes, self.head_dims, self.masks, self.scores, self.seqlens, self.passes, self.timings
            )
        ]
        dim = 128 if 128 in self.head_dims else self.head_dims[0]
        # a backward needs its forward, so its memory is that of both
        passes = ["fwd"] * ("fwd" in self.passes) + ["both"] * bool({"bwd", "both"} & set(self.passes))
        memory = [
            Cell("memory", _problem(self.dtypes[0], dim, self.masks[0], self.scores[0], length, 1), pass_)
            for length, pass_ in itertools.product(self.memory_seqlens, passes)
        ]
        return timed + memory


def _problem(dtype: str, head_dim: int, mask: Mask, score: Score, seqlen: int, batch: int) -> Problem:
    heads = max(1, WORKLOAD_HIDDEN // head_dim)
    return Problem(dtype, batch, heads, heads, seqlen, seqlen, head_dim, head_dim, mask, score=score)


# ---- whether it is right -------------------------------------------------------------------------------------------


class Stand:
    """One problem set up for every peer: inputs, references, and each peer's function once it was asked for."""

    def __init__(self, problem: Problem, peers: Mapping[str, Peer], device: str) -> None:
        import torch

        self.problem, self.peers = problem, peers
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]
        generator = torch.Generator(device).manual_seed(0)
        shape = (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim)
        #: q, k, v, do as a model's projections leave them in memory, for every peer alike: (batch, seqlen, heads, dim)
        self.inputs = [torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(4)]
        self.function = functools.cache(lambda name: peers[name].make(problem))

    @functools.cached_property
    def references(self) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
        """Of the first and the last (batch, head)."""
        corners = {(0, 0), (self.problem.batch - 1, self.problem.heads_q - 1)}
        return {(b, h): self._reference(b, h) for b, h in corners}

    def _reference(self, b: int, h: int) -> dict[str, torch.Tensor]:
        """Of packed sequences each by itself."""
        import torch

        terms, inputs = (self.problem.mask, self.problem.score), [tensor[b, :, h] for tensor in self.inputs]
        lengths = self.problem.lengths if isinstance(self.problem, PackedProblem) else (self.problem.seqlen_q,)
        parts = zip(*(tensor.split(lengths) for tensor in inputs), strict=True)
        first = 0 if isinstance(self.problem, PackedProblem) else b  # number of the first sequence
        alone = [reference(q, k, v, do, *terms, number, h) for number, (q, k, v, do) in enumerate(parts, first)]
        return {name: torch.cat([one[name] for one in alone]) for name in alone[0]}

    def call(self, name: str, pass_: str) -> Call:
        """One launch of a pass: "fwd" without gradients -> (o,); "bwd" of one kept forward, or "both" -> (dq, dk, dv)."""
        import torch

        peer, function = self.peers[name], self.function(name)
        q, k, v, do = (t if peer.layout == "bshd" else t.transpose(1, 2) for t in self.inputs)
        if pass_ == "fwd":

            def forward() -> tuple[torch.Tensor, ...]:
                with torch.no_grad():
                    return (function(q, k, v),)

            return forward
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        if pass_ == "both":
            return lambda: torch.autograd.grad(function(*leaves), leaves, do)
        out = function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)

    def error(self, name: str, pass_: str, results: tuple[torch.Tensor, ...]) -> float:
        """Worst tile error over the results; infinite if one holds a NaN or Inf, or has another shape than its input."""
        worst = 0.0
        for what, tensor in zip(_RESULTS[pass_], results, strict=True):
            rows_first = tensor if self.peers[name].layout == "bshd" else tensor.transpose(1, 2)
            if rows_first.shape != self.inputs[0].shape or not bool(rows_first.isfinite().all()):
                return float("inf")
            worst = max(
                worst, *(tile_error(rows_first[b, :, h], want[what]) for (b, h), want in self.references.items())
            )
        return worst


# ---- measuring a cell ----------------------------------------------------------------------------------------------


def _reason(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"[:300]


def _try_peer(stand: Stand, rig: Rig, cell: Cell, name: str) -> tuple[dict[str, Any], Call | None]:
    """Run a peer once and compare. -> its entry so far, and its call if it is worth measuring."""
    unfit = stand.peers[name].unfit(cell.problem, cell.pass_, rig.free_bytes())
    if unfit:
        return {"status": "skipped", "why": unfit}, None
    try:
        call = stand.call(name, cell.pass_)
        error = stand.error(name, cell.pass_, call())
    except Exception as failure:  # a peer is other people's code: whatever it raises is its result
        why = _reason(failure)
        if not rig.healthy():
            raise BenchError(
                f"{name} broke the CUDA context at: {cell} ({why}). The cells before it are kept: go on with --resume and "
                f"--peers without {name}"
            ) from failure
        return {"status": "failed", "why": why}, None
    if not error <= MOST_ERROR[cell.problem.dtype]:
        why = f"differs from the float32 reference by {error:.2g}, {MOST_ERROR[cell.problem.dtype]:g} is let pass"
        return {"status": "wrong", "why": why}, None
    entry: dict[str, Any] = {"status": "ok", "error": error}
    if (kernels := stand.peers[name].kernels) is not None:
        entry["kernels"] = kernels(cell.problem, cell.pass_)
    return entry, call


def summarise(samples: Mapping[str, list[float]], operations: float) -> dict[str, dict[str, float]]:
    """Per peer: median and 10 / 90 % quantiles in ms (of fewer than ten samples the extremes), TFLOP/s at the median, and
    ``ratio``, how many times as fast fa2tune was: the median over rounds of (its time / fa2tune's time in the same round)."""
    summary = {}
    ours = samples.get(SUBJECT)
    for name, times in samples.items():
        deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) >= 10 else sorted(times)
        median = statistics.median(times)
        summary[name] = {
            "ms": median, "low_ms": deciles[0], "high_ms": deciles[-1], "samples": len(times),
            "tflops": operations / median / 1e9,
        }  # fmt: skip
        if ours is not None:
            summary[name]["ratio"] = statistics.median(t / own for t, own in zip(times, ours, strict=True))
    return summary


def measure(stand: Stand, rig: Rig, cell: Cell, seconds: float) -> dict[str, Any]:
    """A cell's record: its identity and, per peer, an entry whose ``status`` is "ok" with figures, or "wrong", "failed" or
    "skipped" with ``why``. Only what gave the right result is measured."""
    stand.references  # noqa: B018  # computed here, so that no peer is blamed if they fail
    entries: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for name in stand.peers:
        entries[name], call = _try_peer(stand, rig, cell, name)
        if call is None:
            continue
        if cell.kind == "memory":
            entries[name]["peak_bytes"] = rig.peak_bytes(call)
        else:
            calls[name] = call
    if calls:
        samples = rig.sustain(calls) if cell.kind.endswith("sustained") else rig.time(calls, seconds)
        for name, figures in summarise(samples, flops(cell.problem, cell.pass_)).items():
            entries[name] |= figures
    return {**cell.identity, "peers": entries}


# ---- the results file ----------------------------------------------------------------------------------------------


class Results:
    """``bench.json``: {"schema", "complete", "runs": [environment of each slice], "cells": [records, with "run": index]}.

    An existing file is refused unless ``resume``. ValueError says what is wrong with it."""

    #: What must not change between slices of one file.
    SAME = ("gpu", "sm_count", "code", "torch", "triton", "cudnn")

    def __init__(self, path: Path, environment: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        self.data: dict[str, Any] = {"schema": SCHEMA, "complete": False, "runs": [], "cells": []}
        if path.exists():
            if not resume:
                raise ValueError(f"out: {path} exists; --resume continues it, or name another folder")
            self.data = load(path)
            for field in self.SAME:
                before, now = self.data["runs"][-1].get(field), environment.get(field)
                if before != now:
                    raise ValueError(f"resume: {path} was measured with {field} {before!r}, here it is {now!r}")
            self.data["complete"] = False
        self.data["runs"].append(dict(environment))

    def holds(self, cell: Cell, peers: Mapping[str, Peer]) -> bool:
        """Whether the cell was measured with at least these peers."""
        return any(_is(record, cell) and set(peers) <= set(record["peers"]) for record in self.data["cells"])

    def add(self, cell: Cell, record: Mapping[str, Any]) -> None:
        kept = [old for old in self.data["cells"] if not _is(old, cell)]
        self.data["cells"] = [*kept, {**record, "run": len(self.data["runs"]) - 1}]
        self.save()

    def save(self) -> None:
        """Whole or not at all: a slice may be cut off at any moment."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(part, self.path)


def _is(record: Mapping[str, Any], cell: Cell) -> bool:
    return all(record.get(field) == value for field, value in cell.identity.items())  # older files lack some


def load(path: Path) -> dict[str, Any]:
    """Read a results file. ValueError names the file and what is wrong with it."""
    try:
        if path.exists() and not path.is_file():  # reading from a FIFO would wait for a writer
            raise ValueError(f"{path}: is not a regular file")
        if path.stat().st_size > MAX_FILE:
            raise ValueError(f"{path}: is larger than {MAX_FILE >> 20} MiB")
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: cannot be read as JSON: it is nested too deeply") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: is not a results file of fa2tune bench with schema {SCHEMA}")
    if why := _damage(data):
        raise ValueError(f"{path}: {why}; its cells are not as `fa2tune bench` writes them")
    return data


#: Field of a cell -> its type; a bool is no number.
_CELL = {"kind": str, "dtype": str, "head_dim": int, "causal": bool, "seqlen": int, "pass": str, "peers": dict}
_FIGURES = ("ms", "low_ms", "high_ms", "tflops", "ratio", "peak_bytes")


def _damage(data: Mapping[str, Any]) -> str | None:
    """What is not as ``Results`` writes it, or None: files are data from elsewhere."""
    runs, cells = data.get("runs"), data.get("cells")
    if not isinstance(runs, list) or not all(isinstance(run, dict) and {"gpu", "date"} <= set(run) for run in runs):
        return "runs must be a list of environments, each with gpu and date"
    if not isinstance(cells, list) or (cells and not runs):
        return "cells must be a list, and any cell needs a run"
    for number, cell in enumerate(cells):
        if not isinstance(cell, dict):
            return f"cell {number} is not an object"
        for field, kind in _CELL.items():
            if type(cell.get(field)) is not kind:
                return f"{field} of cell {number} must be {kind.__name__}, is {cell.get(field)!r:.40}"
        if (window := cell.get("window")) is not None and not _is_window(window):
            return f"window of cell {number} must be null or two numbers or nulls, is {window!r:.40}"
        if (mask := cell.get("mask")) is not None and not _is_named(mask, int):
            return f"mask of cell {number} must be null or a name and integers, is {mask!r:.40}"
        if (score := cell.get("score")) is not None and not _is_named(score, float):
            return f"score of cell {number} must be null or a name and numbers, is {score!r:.40}"
        if not _is_packing(cell.get("packed"), cell["kind"] in PACKED_TIMINGS.values()):
            return f"packed of cell {number} must be null or, of packed sequences, their lengths, is {cell.get('packed')!r:.40}"
        for name, entry in cell["peers"].items():
            if not isinstance(entry, dict) or not isinstance(entry.get("status"), str):
                return f"{name!r:.40} of cell {number} has no status"
            if entry["status"] != "ok" and not isinstance(entry.get("why"), str):
                return f"{name!r:.40} of cell {number} is {entry['status']!r:.40} without a reason (why)"
            for field in _FIGURES:
                value = entry.get(field, 1)
                if type(value) not in (int, float) or not 0 < value < math.inf:
                    return f"{field} of {name!r:.40} in cell {number} must be a positive number, is {value!r:.40}"
            if "tflops" in entry and not {"ms", "low_ms", "high_ms"} <= set(entry):
                return f"{name!r:.40} in cell {number} has TFLOP/s without times"
    return None


def _is_window(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(v is None or (type(v) is int and v >= 0) for v in value)


def _is_packing(value: Any, packed: bool) -> bool:
    if not packed:
        return value is None
    return isinstance(value, list) and bool(value) and all(type(each) is int and each > 0 for each in value)


def _is_named(value: Any, kind: type) -> bool:
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], str) and value[0].isidentifier()
        and all(type(each) is kind for each in value[1:])
    )  # fmt: skip


def run(
    cells: Sequence[Cell], peers: Mapping[str, Peer], rig: Rig, results: Results, *, seconds: float = 0.15,
    time_budget: float | None = None, progress: Callable[[int, int, Mapping[str, Any]], None] = lambda *_: None,
) -> bool:  # fmt: skip
    """Measure what ``results`` does not hold yet, ``seconds`` of GPU time per peer and interleaved cell. Stops before a cell
    that would likely pass ``time_budget`` (seconds), but never before the first. -> whether everything is done."""
    began, longest = time.monotonic(), 0.0
    todo = [cell for cell in cells if not results.holds(cell, peers)]
    done = len(cells) - len(todo)
    for problem, group in itertools.groupby(todo, key=lambda cell: cell.problem):
        stand = Stand(problem, peers, rig.device)
        for cell in group:
            start = time.monotonic()
            if time_budget is not None and longest and start - began + longest > time_budget:
                return False
            record = measure(stand, rig, cell, seconds)
            results.add(cell, record)
            done += 1
            progress(done, len(cells), record)
            longest = max(longest, time.monotonic() - start)
        del stand
        rig.release()
    results.data["complete"] = True
    results.save()
    return True
