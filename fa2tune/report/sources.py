"""What a page is made of, read from files: cache rows, studies, exhaustive tables, results of ``fa2tune bench``.

Studies are read as Optuna holds them; nothing is written to any of the files.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa2tune.rows import reader, record
from fa2tune.rows.reader import CacheFileError
from fa2tune.rows.row import Row
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Config

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

#: A study's name is its key, field by field, and a stamp of what its trials rest on (study.study_name). Only the name that the
#: driver of an unlisted GPU gives may hold spaces.
_VALUE = {"gpu": ".+"}


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    named = " ".join(f"{name}=(?P<{name}>{_VALUE.get(name, '[^ ]+')})" for name in names)
    return re.compile(f"{named} (?P<stamp>.*)")


#: Before keys named the mask and the family a name had ``causal``, True or False.
_NAMES = [_pattern(record.KEY_FIELDS), _pattern(record.KEY_FIELDS_2)]
#: What Optuna's database holds, among other things.
_OPTUNA = {"studies", "trials", "trial_params", "trial_user_attributes", "version_info", "alembic_version"}


_VARIANT = "variant="  #: a word of a stamp: the variant of the kernel that was searched, where it is not its own


@dataclass(frozen=True)
class Trial:
    """One candidate at one key."""

    config: Config
    time_us: float | None  #: measured, or predicted where the study is; None: it has a status instead
    status: str  #: "" if it was timed, else a short word: "spills", "crash", ...
    why: str  #: the reason in full
    predicted_us: float | None  #: by the model before it was measured; None where nothing was predicted
    filed: datetime | None  #: when its outcome was known
    frozen: FrozenTrial  #: as Optuna holds it, for Optuna's own evaluators


@dataclass(frozen=True)
class StoredSearch:
    """One study: a key's candidates, in the order they were filed."""

    key: TuningKey
    name: str
    obtained: str  #: one of ``rows.row.OBTAINED``, as the stamp has it
    trials: Sequence[Trial]
    wrong: Sequence[tuple[Config, str]]  #: timed, then found wrong: config, why
    variant: str = ""  #: name of the variant that was searched, where it is not the kernel's own; "": that
    exhaustive: bool = False  #: every legal config, in no order that means anything: a table, no search

    @property
    def searched(self) -> str:
        """What was searched: a kernel, or another variant of it."""
        return self.variant or self.key.kernel

    @property
    def timed(self) -> list[tuple[int, Trial, float]]:
        """(place, trial, microseconds) of those that have a time."""
        return [(place, t, t.time_us) for place, t in enumerate(self.trials) if t.time_us is not None]


@dataclass(frozen=True)
class Sources:
    """Everything a page shows. What was not given or found is empty."""

    title: str
    rows: Sequence[Row]
    searches: Sequence[StoredSearch] = ()
    bench: Mapping[str, Any] | None = None  #: results of ``fa2tune bench`` (comparison.load)
    files: Mapping[str, Path] = field(default_factory=dict)  #: what was read, by kind
    notes: Sequence[str] = ()  #: what a reader should know of the reading
    others: Sequence[Row] = ()  #: of the cache to compare with


class SourceError(ValueError):
    """A file that cannot be shown. The message names the argument, the file and the reason."""


def read_cache(path: Path, option: str = "--cache") -> list[Row]:
    try:
        rows = reader.read(path)
    except CacheFileError as error:
        raise SourceError(f"{option}: {error}") from error
    if not rows:
        raise SourceError(f"{option}: {path} holds no rows")
    return rows


def _check_studies(path: Path) -> None:
    """Looked at before Optuna is, which would make its tables in any database it is given."""
    if not path.is_file():
        raise SourceError(f"--studies: {path}: {'is not a regular file' if path.exists() else 'no such file'}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise SourceError(f"--studies: {path}: {error}") from error
    if not tables >= _OPTUNA:
        kind = "a cache file (give it as --cache)" if tables == {"rows"} else "no Optuna database"
        raise SourceError(f"--studies: {path} is {kind}")


def key_of_study(name: str) -> tuple[TuningKey, str] | None:
    """Key and stamp out of a study's name; None if it is not one of fa2tune's."""
    found = next(filter(None, (pattern.fullmatch(name) for pattern in _NAMES)), None)
    if found is None:
        return None
    values: dict[str, Any] = found.groupdict()
    stamp = values.pop("stamp")
    try:
        for each in ("sm_count", "arch", "head_dim", "head_dim_v", "bucket"):
            values[each] = int(values[each])
        if "causal" in values:
            values["causal"] = {"True": True, "False": False}[values["causal"]]
    except (ValueError, KeyError):
        return None
    return record.key_from(values), stamp


def _trial(frozen: FrozenTrial) -> Trial:
    about = frozen.user_attrs.get("outcome", {})
    predicted = about.get("predicted_us")
    return Trial(
        dict(frozen.params), frozen.value if frozen.state.name == "COMPLETE" else None, str(about.get("fate", "")),
        str(about.get("why", "")), predicted if isinstance(predicted, float) else None, frozen.datetime_complete, frozen,
    )  # fmt: skip


def _kept(attributes: Mapping[str, Any]) -> Iterator[Row]:
    """The rows a study's trials led to (study.KeyStudy.keep), each checked as a cache file's are."""
    for value in attributes.values():
        try:
            kept = json.loads(value)
            yield from record.of_document(kept)
        except (TypeError, ValueError):  # an attribute of another kind
            continue


def read_studies(path: Path) -> tuple[list[StoredSearch], list[Row], list[str]]:
    """Per key the study with the latest trial, the rows those kept, and notes on what was left aside."""
    _check_studies(path)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # a path in a URI of SQLite's: read-only, so that not even an older database is touched
    where = f"sqlite:///{path.absolute().as_uri()}?mode=ro&uri=true"
    found: dict[tuple[TuningKey, str], tuple[datetime, StoredSearch, list[Row]]] = {}
    foreign = older = 0
    try:
        storage = optuna.storages.RDBStorage(where, skip_table_creation=True)
        for study in storage.get_all_studies():
            known = key_of_study(study.study_name)
            if known is None:
                foreign += 1
                continue
            key, stamp = known
            frozen = storage.get_all_trials(study._study_id, deepcopy=False)
            trials = [_trial(each) for each in frozen if each.state.is_finished()]
            if not trials:
                continue
            wrong = [(dict(config), why) for config, why in json.loads(study.user_attrs.get("disqualified", "[]"))]
            variant = next((word[len(_VARIANT) :] for word in stamp.split() if word.startswith(_VARIANT)), "")
            search = StoredSearch(key, study.study_name, stamp.partition(" ")[0], trials, wrong, variant)
            of = key, variant
            latest = max((t.filed for t in trials if t.filed), default=datetime.min)
            if of in found:
                older += 1
            if of not in found or latest > found[of][0]:
                found[of] = latest, search, list(_kept(study.user_attrs))
    except Exception as error:  # Optuna and SQLAlchemy raise kinds of their own
        raise SourceError(f"--studies: {path}: {str(error).splitlines()[0]}") from error
    if not found:
        raise SourceError(f"--studies: {path} holds no trials of fa2tune")
    notes = []
    if older:
        notes.append(
            f"{older} older studies of the same keys (other kernels, spaces, models or versions) are not shown"
        )
    if foreign:
        notes.append(f"{foreign} studies in {path.name} are not of fa2tune")
    entries = [found[of] for of in sorted(found)]
    return [search for _, search, _ in entries], [row for *_, rows in entries for row in rows], notes


def read_bench(path: Path) -> Mapping[str, Any]:
    from fa2tune.bench import comparison

    try:
        data = comparison.load(path)
    except ValueError as error:
        raise SourceError(f"--bench: {error}") from error
    timed = any(cell["kind"] in comparison.TIMINGS.values() for cell in data["cells"])
    if not timed:
        raise SourceError(f"--bench: {path} holds no timed cell")
    return data


def gather(
    cache: Path | None, studies: Path | None, bench: Path | None = None, compare: Path | None = None
) -> Sources:  # fmt: skip
    """What a page needs, by what was asked for:

    nothing: the user's cache and the studies beside it; ``cache``: that file, and the studies beside it where there are any;
    ``studies`` alone: that run, with its winning rows; both: these rows and these searches. ``compare``: another cache.
    """
    files: dict[str, Path] = {}
    rows: list[Row] = []
    if cache is None and studies is None:
        cache = reader.user_path()
        if not cache.exists():
            raise SourceError(f"there is no user cache at {cache}: run `fa2tune tune`, or name a file with --cache "
                              "(`fa2tune cache list` shows the shipped ones) or --studies")  # fmt: skip
    if cache is not None:
        rows = read_cache(cache)
        files["cache"] = cache
        own = cache.with_name("studies.sqlite")
        if studies is None and own.exists():
            studies = own
    searches: list[StoredSearch] = []
    notes: list[str] = []
    if studies is not None:
        searches, kept, notes = read_studies(studies)
        files["studies"] = studies
        rows = rows or sorted(kept, key=record.identity)
    data = None
    if bench is not None:
        data = read_bench(bench)
        files["bench"] = bench
    others: Sequence[Row] = ()
    if compare is not None:
        if not rows:
            raise SourceError(f"--compare: {compare} needs rows to compare with, and {studies} holds none")
        others = read_cache(compare, "--compare")
        files["compared with"] = compare
    main = cache or studies
    assert main is not None
    return Sources(main.name, rows, searches, data, files, notes, others)
