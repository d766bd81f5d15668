"""Acts on the results of ``upkeep.py``: rows that hold get new evidence, the others are tuned again.

Every row that is removed is reported. A row that lost, and that no search improves on, is kept with its new time. A row that
was launched and failed, and that nothing replaces, would fail in a call: it moves to a file beside the cache,
``<name>.sqlite.withdrawn``, which is not read by calls and from which ``cache merge`` restores it. A row that does not compile
here stays: every call skips it, and other machines of the fleet may still have the older compiler.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fa2tune.fleet.finding import FAILS, HOLDS, LOST, UNTOLD, Finding, odd_key
from fa2tune.fleet.upkeep import Verification
from fa2tune.rows import record
from fa2tune.rows.row import PREDICTED, Row
from fa2tune.rows.store import Store
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD
from fa2tune.tuning.request.plan import KERNELS_OF_PASS, TuneRequest, make_plan
from fa2tune.tuning.select.report import Report

REFRESH_SECONDS = 1.0  #: between writes of rows that hold; a killed run loses that much


@dataclass
class Repaired:
    """What was done with the rows of a file."""

    refreshed: list[Row] = field(default_factory=list)  #: held; now with today's evidence
    retuned: list[Row] = field(default_factory=list)  #: had lost or failed; the new rows
    kept: list[tuple[Row, str]] = field(default_factory=list)  #: not repaired, still in the file, and why
    withdrawn: list[tuple[Row, str]] = field(default_factory=list)  #: out of the file, and why


def withdrawn_path(path: Path) -> Path:
    """The file for rows that are taken out. Its suffix is not that of a cache file, so no layer reads it."""
    return path.with_name(f"{path.name}.withdrawn")


class Refresher:
    """Writes rows that hold with today's evidence, as findings come in. They are fresh from then on."""

    def __init__(self, path: Path) -> None:
        self.store = Store(path)
        self.waiting: list[Row] = []
        self.filed: list[Row] = []
        self.last = 0.0

    def __call__(self, finding: Finding) -> None:
        if finding.state == HOLDS and finding.fresh:
            self.waiting.append(finding.fresh)
        if time.monotonic() - self.last > REFRESH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """What is waiting is on disk afterwards."""
        if self.waiting:
            self.store.renew(self.waiting)
        self.filed += self.waiting
        self.waiting = []
        self.last = time.monotonic()


def searchable(key: TuningKey) -> bool:
    """Whether ``fa2tune tune`` can search for a key. A file may come from a later release."""
    return odd_key(key) is None and key.kernel != BACKWARD and key.precision == "ieee"


def requests(findings: Sequence[Finding], path: Path, **search: object) -> list[tuple[TuneRequest, list[Finding]]]:
    """The narrowest searches that tune the rows of ``findings`` anew, and which rows each is for: of those with ``searchable``
    keys. ``search``: trials, time_budget_s, workers, seed of a TuneRequest."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = finding.row.key
        if not searchable(key):
            continue
        about = (key.gpu, key.kernel, key.dtype, key.precision, key.head_dim, key.head_dim_v, key.mask)
        groups.setdefault((*about, finding.row.obtained, bool(finding.stale)), []).append(finding)
    found = []
    for members in groups.values():
        key = members[0].row.key
        request = TuneRequest(
            gpu=key.gpu, head_dims=(key.head_dim,), head_dim_v=key.head_dim_v, dtypes=(key.dtype,), masks=(key.mask,),
            pass_=next(name for name, kernels in KERNELS_OF_PASS.items() if key.kernel in kernels), kernels=(key.kernel,),
            buckets=tuple(sorted({finding.row.key.bucket for finding in members})), cache=path,
            **search,  # type: ignore[arg-type]
        )  # fmt: skip
        found.append((request, members))
    return found


def repair(
    path: Path, findings: Sequence[Finding], look: Verification, tune: Callable[[TuneRequest], Report],
    say: Callable[[str], None] = lambda text: None, **search: object,
) -> Repaired:  # fmt: skip
    """Repair ``path`` by the ``findings`` of ``look``. ``tune``: runs a search, as ``tuner.tune`` does.

    Every step is written as soon as it is done, so a killed command continues from there."""
    store, done = Store(path), Repaired()
    refresher = look.found if isinstance(look.found, Refresher) else Refresher(path)
    if look.found is not refresher:
        refresher.waiting = [finding.fresh for finding in findings if finding.state == HOLDS and finding.fresh]
    refresher.flush()
    done.refreshed = refresher.filed
    broken = [finding for finding in findings if finding.state in (LOST, FAILS)]
    single = [finding for finding in broken if finding.row.key.kernel != BACKWARD]
    beyond = [finding for finding in single if not searchable(finding.row.key)]
    _settle(store, beyond, [], "`fa2tune tune` cannot search for its key", done)
    for request, members in requests(single, path, **search):
        new, why = _tuned(store, request, members, tune, say)
        done.retuned += new
        _settle(store, members, new, why, done)
    _whole(store, findings, look, done)
    for finding in findings:
        if finding.state == UNTOLD:
            done.kept.append((finding.row, finding.why))
    return done


def _tuned(
    store: Store, request: TuneRequest, members: Sequence[Finding], tune: Callable[[TuneRequest], Report],
    say: Callable[[str], None],
) -> tuple[list[Row], str]:  # fmt: skip
    """The new rows of a search, and why there are none. The search works on a copy of the file, since it finds rows for every
    implementation of its keys. The file takes the rows that are repaired and those that it lacked; the others stay as they
    are."""
    key = members[0].row.key
    wanted = members[0].row.obtained
    title = f"{key.gpu} {key.kernel} {key.dtype} {key.head_dim} {key.mask}"
    try:
        target = make_plan(request).target
    except ValueError as error:
        return [], f"cannot be tuned here: {error}"
    if wanted != PREDICTED and target.obtained != wanted:
        return [], f"{members[0].row.obtained_on or key.gpu}, which measured it, is not here"
    say(f"tuning {title}, {', '.join(map(str, request.buckets))}")
    there = store.rows()
    with tempfile.TemporaryDirectory() as folder:
        aside = Path(folder)
        Store(aside / "cache.sqlite").put(there)
        # of a row made by this very toolchain the studies would hand back what they found then
        studies = (store.path.parent if members[0].stale else aside) / "studies.sqlite"
        report = tune(replace(request, cache=aside / "cache.sqlite", studies=studies))
    mended = {record.slot(finding.row) for finding in members}
    stays = {record.slot(row) for row in there} - mended
    new = [row for row in report.rows if record.slot(row) not in stays]
    store.put(new)
    if report.interrupted:  # what it did not come to is not settled
        raise KeyboardInterrupt
    return new, "the search did not come to its end" if report.missing else ""


def _settle(store: Store, members: Sequence[Finding], new: Sequence[Row], why: str, done: Repaired) -> None:
    """Keep or withdraw the rows that no new one replaces."""
    replaced = {record.slot(row) for row in new}
    for finding in members:
        row = finding.row
        if record.slot(row) in replaced:
            continue
        reason = why or "the search found nothing better"
        if finding.state == LOST and finding.fresh:
            store.renew([finding.fresh])  # what it says of itself is true again
            done.kept.append((row, f"{finding.why}; {reason}: kept with its new time"))
        elif finding.dangerous:
            gone = Store(withdrawn_path(store.path))
            for before in gone.rows():
                if record.identity(before) == record.identity(row) and before != row:
                    reason += f"; replaces the row of {before.created} that was withdrawn before"
            gone.renew([row])
            store.remove([row])
            done.withdrawn.append((row, f"{finding.why}; {reason}"))
        else:
            done.kept.append((row, f"{finding.why}; {reason}: kept, calls skip it"))


def _whole(store: Store, findings: Sequence[Finding], look: Verification, done: Repaired) -> None:
    """Compare whole backwards again, with the kernels that serve now. Nothing is searched."""
    rows = store.rows()
    broken = {record.slot(f.row): f for f in findings if f.row.key.kernel == BACKWARD and f.state in (LOST, FAILS)}
    now = [row for row in rows if record.slot(row) in broken]
    if not now:
        return
    parts = [row for row in rows if any(_is_part(row, whole) for whole in now)]
    again = Verification([*parts, *now], rows, look.present, look.functions, look.workers, look.progress).go()
    for finding in again[len(parts) :]:
        before = broken[record.slot(finding.row)]
        if finding.fresh:
            store.renew([finding.fresh])
            done.retuned.append(finding.fresh)
        elif finding.state != HOLDS:
            _settle(store, [before if before.dangerous else finding], [], finding.why, done)


def _is_part(row: Row, whole: Row) -> bool:
    return row.obtained == whole.obtained and row.key == whole.key.with_(kernel=row.key.kernel) and row.key != whole.key
