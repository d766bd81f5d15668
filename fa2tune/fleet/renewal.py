"""Renews rows whose sources were edited and whose machine code is still what was measured: they are compiled again and the hash
of what comes out is compared with the row's (``launching/machine_code.py``). Needs no GPU and no older sources.

A row that is fresh and has no such hash gets it: its sources are those that were measured. A whole backward is renewed if every
kernel row that serves it agrees. Rows of another Triton than the one here are passed over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fa2tune.compiling import compiler, fingerprint
from fa2tune.fleet.finding import UNTOLD, gpu_of_key, parts_of, row_misfit, variant_of_row
from fa2tune.fleet.upkeep import COMPILE_MEMORY, COMPILE_SECONDS
from fa2tune.launching import machine_code
from fa2tune.measuring import worker
from fa2tune.measuring.worker import Crew, Job
from fa2tune.rows import reader, record
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.spec.problem import BACKWARD, Specialization
from fa2tune.tuning.request.watcher import WorkerFunctions

FRESH = "fresh"  #: its sources are those here, and it has a hash
RENEWED = "renewed"  #: its sources are others, its machine code is the same
HASH_ADDED = "hash added"  #: fresh; it had none that can be compared
SAME_CODE = "the same"  #: of a check: its machine code was compared
OTHER_CODE = "other machine code"
NO_HASH = "no hash"  #: its sources are others and there is nothing to compare
NOT_COMPILED = "does not compile"
OTHER_TRITON = "another Triton"
NOT_REACHED = "not reached"  #: in the time that there was
RENEWAL_STATES = (
    FRESH,
    RENEWED,
    HASH_ADDED,
    SAME_CODE,
    OTHER_CODE,
    NO_HASH,
    NOT_COMPILED,
    UNTOLD,
    OTHER_TRITON,
    NOT_REACHED,
)
#: With these a row keeps what it said.
NOT_RENEWED = frozenset((OTHER_CODE, NO_HASH, NOT_COMPILED, UNTOLD, NOT_REACHED))

WRITE_SECONDS = 10.0  #: between writes of the file; a killed run loses that much


@dataclass(frozen=True)
class RenewalResult:
    """The result for one row."""

    row: Row
    state: str  #: one of RENEWAL_STATES
    why: str = ""
    new: Row | None = None  #: to be written in its place


#: Kernel, specialization, config (as JSON), compute capability.
_CodeSource = tuple[str, Specialization, str, int]


@dataclass
class Renewal:
    """One look at rows. ``among``: those from which whole backwards take their kernels, as a rule those of the file."""

    rows: Sequence[Row]
    among: Sequence[Row]
    check: bool = False  #: compare fresh rows, too, and give no row a hash
    functions: WorkerFunctions = field(default_factory=WorkerFunctions)
    workers: int | None = None  #: compiling at a time; None: one per core
    seconds: float | None = None  #: for compiles; None: as long as it takes
    progress: Callable[[str, int, int], None] = lambda what, done, total: None
    found: Callable[[RenewalResult], None] = lambda compared: None  #: called with each result as it is there

    def __post_init__(self) -> None:
        self.results: dict[int, RenewalResult] = {}  #: by id of the row
        self._hashes: dict[_CodeSource, tuple[str, str, str]] = {}  #: (hash, "", "") or ("", state, why)

    def go(self) -> list[RenewalResult]:
        """Every row's result, in the order of the rows."""
        waiting: dict[_CodeSource, list[Row]] = {}
        pending: dict[int, set[_CodeSource]] = {}
        for row in self.rows:
            needed = self._needed(row)
            if isinstance(needed, RenewalResult):
                self._file(needed)
                continue
            pending[id(row)] = set(needed)
            for code in pending[id(row)]:
                waiting.setdefault(code, []).append(row)

        def take(code: _CodeSource) -> None:
            for row in waiting[code]:
                pending[id(row)].discard(code)
                if not pending[id(row)]:
                    self._file(self._compared(row))

        self._compile(list(waiting), take)
        for row in self.rows:
            if id(row) not in self.results:
                self._file(RenewalResult(row, NOT_REACHED))
        return [self.results[id(row)] for row in self.rows]

    def _file(self, compared: RenewalResult) -> None:
        self.results[id(compared.row)] = compared
        self.found(compared)

    def _needed(self, row: Row) -> list[_CodeSource] | RenewalResult:
        """What has to be compiled for a row, or its result, which takes no compile."""
        current = fingerprint.kernel_hashes().get(row.source)
        if row.triton != fingerprint.triton_version():
            return RenewalResult(row, OTHER_TRITON, f"made with Triton {row.triton or 'unknown'}")
        if current is None:
            return RenewalResult(row, NOT_COMPILED, f"there is no {row.source} here")
        fresh, whole = row.kernel_hash == current, row.key.kernel == BACKWARD
        if fresh and (whole or (machine_code.known(row.binary_hash) and not self.check)):
            return RenewalResult(row, FRESH)
        parts = parts_of(row, self.among) if whole else {row.key.kernel: row}
        found = [part for part in parts.values() if part]
        if len(found) < len(parts) or not parts:
            lacking = ", ".join(name for name, part in parts.items() if part is None) or row.strategy
            return RenewalResult(row, UNTOLD, f"no {row.obtained} row for its {lacking}")
        unknown = [part.key.kernel for part in found if not machine_code.known(part.binary_hash)]
        if unknown and (self.check or not fresh):
            return RenewalResult(row, NO_HASH, f"of its {', '.join(unknown)}" if whole else "")
        for part in found:
            if (why := row_misfit(part, gpu_of_key(part.key, None))) is not None:
                return RenewalResult(row, NOT_COMPILED, f"refused: {why}")
        return [_code_of(part) for part in found]

    def _compared(self, row: Row) -> RenewalResult:
        """The result for a row for which everything is compiled."""
        whole = row.key.kernel == BACKWARD
        new = replace(row, kernel_hash=fingerprint.kernel_hashes()[row.source])
        for part in parts_of(row, self.among).values() if whole else [row]:
            assert part is not None  # or _needed had a result
            digest, state, why = self._hashes[_code_of(part)]
            if not state and machine_code.known(part.binary_hash):
                state = "" if machine_code.agree(digest, str(part.binary_hash)) else OTHER_CODE
            if state:
                return RenewalResult(row, state, f"its {part.key.kernel} {why}".rstrip() if whole else why)
            if not whole:
                held = str(part.binary_hash)
                new = replace(new, binary_hash=machine_code.kept(held, digest) if machine_code.known(held) else digest)
        if self.check:
            return RenewalResult(row, SAME_CODE)
        return RenewalResult(row, HASH_ADDED if new.kernel_hash == row.kernel_hash else RENEWED, new=new)

    def _compile(self, codes: Sequence[_CodeSource], take: Callable[[_CodeSource], None]) -> None:
        until = None if self.seconds is None else time.monotonic() + self.seconds
        environment = {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": _cache_folder()} if codes else {}
        with Crew(self.workers or len(os.sched_getaffinity(0)), environment, COMPILE_MEMORY) as crew:
            for code in codes:
                kernel, spec, config, arch = code
                arguments = (kernel, spec, json.loads(config), arch)
                crew.submit(Job(self.functions.machine_code, arguments, COMPILE_SECONDS, tag=code))
            done = 0
            while crew.load and (until is None or time.monotonic() < until):
                for job in worker.wait([crew], 0.5):
                    digest, why = job.result if job.failure is None else ("", job.failure)
                    state = "" if digest else UNTOLD if job.failure is not None else NOT_COMPILED
                    self._hashes[job.tag] = digest, state, why
                    take(job.tag)
                    done += 1
                self.progress("configs compiled", done, len(codes))


def _cache_folder() -> str:
    """Where Triton keeps what is compiled here: one folder for these very sources. Its own key does not see every edit (the
    order of a named tuple's fields), and what it had of other sources would be taken for that of these."""
    from triton import knobs

    return str(Path(knobs.cache.dir) / "fa2tune" / fingerprint.source_digest()[:16])


def _code_of(row: Row) -> _CodeSource:
    variant = variant_of_row(row)
    config = compiler.binary_config(variant, variant.space.completed(row.config))
    return row.key.kernel, row.key.specialization(), json.dumps(config, sort_keys=True), machine_code.arch_of(row)


class Writer:
    """Writes results as they come: the file, and the readable twin beside it, where there is one. Each appears whole."""

    def __init__(self, path: Path) -> None:
        self.store, self.twin = Store(path), path.with_suffix(".json")
        self.waiting: list[RenewalResult] = []
        self.last = time.monotonic()

    def __call__(self, compared: RenewalResult) -> None:
        if compared.new is not None:
            self.waiting.append(compared)
        if time.monotonic() - self.last > WRITE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """What is waiting is on disk afterwards; a row that another process has changed meanwhile stays as it is."""
        if self.waiting:
            there = {record.identity(row): row for row in self.store.rows()}
            waiting = [one for one in self.waiting if there.get(record.identity(one.row)) == one.row]
            self.store.renew(one.new for one in waiting if one.new)
            if reader.is_twin(self.twin):
                self.store.export(self.twin, "json")
        self.waiting, self.last = [], time.monotonic()
