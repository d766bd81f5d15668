"""A cache row as a flat record of plain values: the columns of a cache file, and what each may hold.

The one statement of the schema: ``store.py`` builds its SQLAlchemy table from ``COLUMNS``, ``reader.py`` checks every
value it reads against them. A cache file is data from somewhere else, so a value of the wrong type, beyond its range,
too long, too deep or with characters that a terminal would act on is an error, never repaired.

Importable without torch, triton or sqlalchemy.
"""

from __future__ import annotations

import hashlib
import json
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

from fa2tune.rows.row import OBTAINED, PROOFS, WORKLOAD, Row, canonical, digest_of
from fa2tune.spec.key import DENSE_FAMILY, FAMILIES, TuningKey
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BACKWARD
from fa2tune.spec.variant import PORTABLE, WARP_SPECIALIZED

#: Version of the columns below. A new one adds its predecessor to ``OLDER`` and to ``UPGRADES``.
SCHEMA_VERSION = 3
#: What is said of a file of a later version.
NEWER = f"has schema version {{version}}, this fa2tune reads up to {SCHEMA_VERSION}: upgrade fa2tune"

MAX_TEXT = 256  #: characters of a text value
MAX_JSON = 1 << 16  #: bytes of a JSON value
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_CREATED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|\+00:00))?")

Value = str | int | float | None
Record = dict[str, Value]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")
    if len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(f"must be printable text of at most {MAX_TEXT} characters")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("must be a name of letters, digits and underscores")
    return value


def _name_or_none(value: Any) -> str:
    return value if value == "" else _name(value)


def _digest(digits: int) -> Callable[[Any], str]:
    pattern = re.compile(f"[0-9a-f]{{{digits}}}")

    def check(value: Any) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"must be {digits} hexadecimal digits in small letters")
        return value

    return check


def _gpu(value: Any) -> str:
    if not _text(value):
        raise ValueError("must name a GPU")
    return str(value)


def _created(value: Any) -> str:
    if not isinstance(value, str) or not _CREATED.fullmatch(value):
        raise ValueError("must be a UTC time such as 2026-01-31T12:00:00Z, or empty")
    return value


def _one_of(allowed: Sequence[str]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return value

    return check


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"must be an integer from {low} to {high}")
        return value

    return check


def _positive(value: Any) -> float:
    if type(value) is not float or not 0.0 <= value <= 1e12:  # also false for NaN
        raise ValueError("must be a real number from 0 to 1e12")
    return value


def _scalar(value: Any) -> Any:
    if type(value) in (int, bool, float):
        if not abs(value) < 1 << 53:  # nor NaN, nor infinity
            raise ValueError("must hold numbers below 2^53")
        return value
    return _text(value)


def _config(value: Any) -> dict[str, Any]:
    for name, entry in value.items():
        _name(name)
        if type(entry) not in (int, bool, str):
            raise ValueError(f"entry {name!r} must be an integer, a bool or text")
        _scalar(entry)
    return dict(value)


def _errors(value: Any) -> dict[str, Any]:
    for tensor, figures in value.items():
        _text(tensor)
        if not isinstance(figures, dict):
            raise ValueError(f"entry {tensor!r} must be an object of figures")
        for name, figure in figures.items():
            _text(name), _scalar(figure)
    return dict(value)


def _counts(value: Any) -> dict[str, int]:
    for reason, count in value.items():
        _text(reason)
        _integer(0, 1 << 40)(count)
    return dict(value)


@dataclass(frozen=True)
class Column:
    """``kind``: how SQLite stores it: "TEXT", "INTEGER", "REAL", or "JSON" (an object, as text). ``check`` returns the
    value or raises ValueError that says what is allowed; for JSON it is given the parsed object."""

    name: str
    kind: str
    check: Callable[[Any], Any]
    nullable: bool = False


def _columns() -> Iterable[Column]:
    yield Column("gpu", "TEXT", _gpu)
    yield Column("sm_count", "INTEGER", _integer(1, 4096))
    yield Column("arch", "INTEGER", _integer(10, 9999))
    # Names, not lists: a row for a kernel or a dtype of a later release is no error, it just never matches.
    yield Column("kernel", "TEXT", _name)
    yield Column("dtype", "TEXT", _name)
    yield Column("precision", "TEXT", _name)
    yield Column("head_dim", "INTEGER", _integer(1, 4096))
    yield Column("head_dim_v", "INTEGER", _integer(1, 4096))
    yield Column("mask", "TEXT", _one_of(ROW_MASKS))
    yield Column("bucket", "INTEGER", _integer(1, 1 << 40))
    yield Column("family", "TEXT", _one_of(FAMILIES))
    yield Column("strategy", "TEXT", _name_or_none)
    yield Column("implementation", "TEXT", _name)
    for name in WORKLOAD:
        yield Column(name, "INTEGER", _integer(0, 1 << 40))
    yield Column("obtained", "TEXT", _one_of(OBTAINED))
    yield Column("config_hash", "TEXT", _digest(16))
    yield Column("config", "JSON", _config)
    yield Column("proof", "TEXT", _one_of(PROOFS))
    yield Column("obtained_on", "TEXT", _text)
    for name in ("time_us", "time_low_us", "time_high_us"):
        yield Column(name, "REAL", _positive, nullable=True)
    yield Column("samples", "INTEGER", _integer(0, 1 << 40))
    for name in ("default_time_us", "gain", "gain_low", "gain_high", "tflops"):
        yield Column(name, "REAL", _positive, nullable=True)
    yield Column("errors", "JSON", _errors)
    for name in ("registers", "spills", "shared_bytes"):
        yield Column(name, "INTEGER", _integer(0, 1 << 31), nullable=True)
    yield Column("tried", "INTEGER", _integer(0, 1 << 40))
    yield Column("pruned", "JSON", _counts)
    for name in ("clock_mhz", "power_limit_w", "throttled"):
        yield Column(name, "INTEGER", _integer(0, 1 << 31), nullable=True)
    for name in ("driver", "triton", "torch", "kernel_hash", "space_hash"):
        yield Column(name, "TEXT", _text)
    yield Column("binary_hash", "TEXT", _digest(64), nullable=True)
    yield Column("created", "TEXT", _created)


COLUMNS = tuple(_columns())
KEY_FIELDS = tuple(f.name for f in fields(TuningKey))
#: What a tuner fills and a merge takes as a whole: the rows of a slot were measured on one machine, and their times compete.
SLOT = (*KEY_FIELDS, "strategy", "implementation", *WORKLOAD, "obtained")
#: What a row is unique by; files are sorted by it.
IDENTITY = (*SLOT, "config_hash")
_key_values, _other_values = attrgetter(*KEY_FIELDS), attrgetter(*SLOT[len(KEY_FIELDS) :])

#: The same up to version 2.
KEY_FIELDS_2 = ("gpu", "sm_count", "arch", "kernel", "dtype", "precision", "head_dim", "head_dim_v", "causal", "bucket")
_OLDER_2 = (
    *KEY_FIELDS_2, "variant", "obtained", "config", "proof", "obtained_on", "time_us", "time_low_us", "time_high_us", "samples",
    "default_time_us", "gain", "gain_low", "gain_high", "tflops", "batch", "heads_q", "heads_kv", "errors", "registers",
    "spills", "shared_bytes", "tried", "pruned", "clock_mhz", "power_limit_w", "throttled", "driver", "triton", "torch",
    "kernel_hash", "space_hash", "created",
)  # fmt: skip
_OLDER_1 = tuple(name for name in _OLDER_2 if name != "throttled")
#: Older schema version -> its columns, in order.
OLDER: Mapping[int, tuple[str, ...]] = {
    0: tuple(name for name in _OLDER_1 if name != "precision"), 1: _OLDER_1, 2: _OLDER_2,
}  # fmt: skip


def columns(version: int) -> tuple[str, ...]:
    """Names of the columns of a schema version, in order."""
    return OLDER[version] if version in OLDER else tuple(column.name for column in COLUMNS)


def _from_2(record: Mapping[str, Any]) -> dict[str, Any]:
    """Version 2 had ``causal``, 0 or 1, for the mask, and ``variant`` for the implementation; of a whole backward that was its
    strategy, with "_warp_specialized" behind it where one of its kernels is. Its lengths are those of the key's workload."""
    later = dict(record)
    values = {name: later.pop(name) for name in ("causal", "variant")}
    for name, check in (("causal", _integer(0, 1)), ("variant", _name)):
        try:
            check(values[name])
        except ValueError as error:
            raise ValueError(f"column {name}: got {_short(values[name])}, {error}") from None
    strategy, implementation = "", values["variant"]
    if record["kernel"] == BACKWARD:
        strategy = implementation.removesuffix(f"_{WARP_SPECIALIZED}")
        implementation = PORTABLE if strategy == implementation else WARP_SPECIALIZED
    config = (
        later["config"] if isinstance(later["config"], str) else ""
    )  # what is no text is refused when it is checked
    return later | {
        "mask": ROW_MASKS[values["causal"]], "strategy": strategy, "implementation": implementation, "family": DENSE_FAMILY,
        "seqlen_q": 0, "seqlen_k": 0, "config_hash": digest_of(config), "binary_hash": None,
    }  # fmt: skip


#: Older schema version -> what makes a record of it one of the next version. Version 0, the development files, had float32
#: products in IEEE arithmetic only and no column to say so; version 1 did not say whether the GPU had been throttled.
UPGRADES: Mapping[int, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    0: lambda record: {**record, "precision": "ieee"},
    1: lambda record: {**record, "throttled": None},
    2: _from_2,
}


def slot(row: Row) -> tuple[Any, ...]:
    """The slot that ``row`` fills, alone or with others: the values of SLOT."""
    return (*_key_values(row.key), *_other_values(row))


def identity(row: Row) -> tuple[Any, ...]:
    """What ``row`` is unique by, comparable: the order of files and of their twins."""
    return (*slot(row), row.config_hash)


def by_slot(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """``rows`` by the slot that they fill, each slot's by config."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=identity):
        found.setdefault(slot(row), []).append(row)
    return found


def variant_2(row: Row) -> str:
    """What a row's implementation and strategy were up to version 2."""
    if row.key.kernel != BACKWARD:
        return row.implementation
    return f"{row.strategy}_{WARP_SPECIALIZED}" if row.warp_specialized else row.strategy


def identity_2(row: Row) -> list[Any]:
    """What a row of this slot was unique by up to version 2, under which the shared database may still hold it."""
    key = {**key_record(row.key), "causal": row.key.mask == "causal"}
    return [*(key[name] for name in KEY_FIELDS_2), variant_2(row), row.obtained]


def key_record(key: TuningKey) -> dict[str, Any]:
    """A key as files have it, by KEY_FIELDS."""
    return dict(zip(KEY_FIELDS, _key_values(key), strict=True))


def key_from(values: Mapping[str, Any]) -> TuningKey:
    """The key of what ``key_record`` gives, or gave before keys named the mask and the family: then ``causal`` is true or
    false. TypeError: a field is missing, or too many."""
    named = dict(values)
    if "causal" in named:
        named["mask"] = ROW_MASKS[bool(named.pop("causal"))]
    return TuningKey(**named)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("must not repeat a name")
    return found


def _constant(text: str) -> Any:
    raise ValueError(f"must not hold {text}")


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _parse(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or len(value) > MAX_JSON:
        raise ValueError(f"must be JSON text of at most {MAX_JSON} characters")
    if value == "{}":
        return {}
    try:
        parsed = _JSON.decode(value)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object")
    return parsed


@lru_cache(maxsize=4096)
def _known(column: Column, value: Any) -> dict[str, Any]:
    """What a JSON column holds. Rows of a file repeat configs, errors and counts."""
    found: dict[str, Any] = column.check(_parse(value))
    return found


def decode(record: Mapping[str, Any]) -> Row:
    """The row of a record of the current version. ValueError names the column, what came and what is allowed."""
    values: dict[str, Any] = {}
    for column in COLUMNS:
        value = record[column.name]
        try:
            if value is None and column.nullable:
                values[column.name] = None
            else:
                values[column.name] = dict(_known(column, value)) if column.kind == "JSON" else column.check(value)
        except ValueError as error:
            raise ValueError(f"column {column.name}: got {_short(value)}, {error}") from None
    config_hash = values.pop("config_hash")
    if config_hash != (right := digest_of(record["config"])):
        raise ValueError(f"column config_hash: got {_short(config_hash)}, must be that of its config, {right}")
    return Row(TuningKey(*(values.pop(name) for name in KEY_FIELDS)), **values)


def upgrade(record: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    """A record of schema ``version`` as one of the current version. ValueError names a column that has no counterpart."""
    for older in range(version, SCHEMA_VERSION):
        record = UPGRADES[older](record)
    return record


def encode(row: Row) -> Record:
    """The record of a row that was read from a file or that ``checked`` has passed."""
    record: Record = key_record(row.key)
    for column in COLUMNS[len(KEY_FIELDS) :]:
        value = getattr(row, column.name)
        record[column.name] = canonical(value) if column.kind == "JSON" else value
    return record


def checked(row: Row) -> Row:
    """``row`` as a cache file would give it back: NumPy's scalars as Python's, everything else unchanged. ValueError
    names what no file may hold."""
    record, key = Record(), key_record(row.key)
    for column in COLUMNS:
        if column.name == "config_hash":
            continue
        value = key[column.name] if column.name in key else getattr(row, column.name)
        try:
            if column.kind == "JSON":
                value = canonical(dict(value))
            elif column.kind == "INTEGER" and isinstance(value, numbers.Integral):
                value = int(value)
            elif column.kind == "REAL" and isinstance(value, numbers.Real):
                value = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"column {column.name}: got {_short(value)}, {error}") from None
        record[column.name] = value
    record["config_hash"] = digest_of(str(record["config"]))
    plain = decode(record)
    if plain != row:  # tuples, integer keys: JSON would hand back something else
        raise ValueError(f"config, errors, pruned: must hold plain dicts, text and numbers, got {row}")
    return plain


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def document(rows: Iterable[Row]) -> dict[str, Any]:
    """``rows`` as JSON has them: the version of the schema, and per row its columns by name."""
    return {"schema": SCHEMA_VERSION, "rows": [_entry(row) for row in rows]}


def _entry(row: Row) -> dict[str, Any]:
    record: dict[str, Any] = encode(row)
    return record | {c.name: json.loads(record[c.name]) for c in COLUMNS if c.kind == "JSON"}


def of_document(held: Any) -> list[Row]:
    """The rows of a ``document`` of this or an older schema version, every value checked. ValueError says what is wrong. One
    without a version is of version 2, as a study kept it, with the fields of each key apart."""
    version = held.get("schema", 2) if isinstance(held, dict) else None
    if type(version) is not int or version < 0 or not isinstance(rows := held.get("rows"), list):
        raise ValueError("must be an object with a schema version and a list of rows")
    if version > SCHEMA_VERSION:
        raise ValueError(NEWER.format(version=version))
    return [_of_entry(entry, version) for entry in rows]


def of_json(text: str) -> list[Row]:
    """The rows of what ``to_json`` gave, with this or an older schema version. ValueError says what is wrong."""
    try:
        return of_document(_JSON.decode(text))
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _of_entry(entry: Any, version: int) -> Row:
    if not isinstance(entry, dict):
        raise ValueError("must hold an object for each row")
    values = {**entry["key"], **entry} if isinstance(entry.get("key"), dict) else entry
    record = {name: values[name] for name in columns(version) if name in values}
    if missing := [name for name in columns(version) if name not in record]:
        raise ValueError(f"column {missing[0]}: is missing")
    for column in COLUMNS:
        if column.kind == "JSON" and isinstance(record[column.name], dict):
            record[column.name] = canonical(record[column.name])
    if type(record.get("causal")) is bool:  # as JSON has it
        record["causal"] = int(record["causal"])
    return decode(upgrade(record, version))


def to_json(rows: Iterable[Row]) -> str:
    """``rows``, sorted, as the JSON document that stands beside a cache file for review: the same rows give the same
    bytes. Three lines a row, so that a diff shows what changed: what it answers, what it says, and the evidence."""
    parts = (IDENTITY, ("config",), [c.name for c in COLUMNS if c.name not in (*IDENTITY, "config")])
    blocks = []
    for entry in document(sorted(rows, key=identity))["rows"]:
        lines = [json.dumps({name: entry[name] for name in part})[1:-1] for part in parts]
        blocks.append("  {" + ",\n   ".join(lines) + "}")
    return f'{{"schema": {SCHEMA_VERSION}, "rows": [\n' + ",\n".join(blocks) + "\n]}\n"


def digest(rows: Iterable[Row], digits: int = 16) -> str:
    """Hexadecimal digits of what ``rows`` say, whatever file they stand in: for comparing the caches of two machines."""
    text = json.dumps([list(encode(row).values()) for row in sorted(rows, key=identity)])
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
