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
from typing import Any

from fa2tune.problem import TuningKey
from fa2tune.rows.row import OBTAINED, PROOFS, Row

#: Version of the columns below. A new one adds to ``UPGRADES`` what its predecessor lacked.
SCHEMA_VERSION = 2

#: Schema version -> columns it lacks beside the next one, with the value its rows have there. Version 0, the
#: development files, had float32 products in IEEE arithmetic only and no column to say so; version 1 did not say whether
#: the card had been throttled.
UPGRADES: Mapping[int, Mapping[str, Any]] = {0: {"precision": "ieee"}, 1: {"throttled": None}}

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
    yield Column("causal", "INTEGER", _integer(0, 1))
    yield Column("bucket", "INTEGER", _integer(1, 1 << 40))
    yield Column("variant", "TEXT", _name)
    yield Column("obtained", "TEXT", _one_of(OBTAINED))
    yield Column("config", "JSON", _config)
    yield Column("proof", "TEXT", _one_of(PROOFS))
    yield Column("obtained_on", "TEXT", _text)
    for name in ("time_us", "time_low_us", "time_high_us"):
        yield Column(name, "REAL", _positive, nullable=True)
    yield Column("samples", "INTEGER", _integer(0, 1 << 40))
    for name in ("default_time_us", "gain", "gain_low", "gain_high", "tflops"):
        yield Column(name, "REAL", _positive, nullable=True)
    for name in ("batch", "heads_q", "heads_kv"):
        yield Column(name, "INTEGER", _integer(0, 1 << 40))
    yield Column("errors", "JSON", _errors)
    for name in ("registers", "spills", "shared_bytes"):
        yield Column(name, "INTEGER", _integer(0, 1 << 31), nullable=True)
    yield Column("tried", "INTEGER", _integer(0, 1 << 40))
    yield Column("pruned", "JSON", _counts)
    for name in ("clock_mhz", "power_limit_w", "throttled"):
        yield Column(name, "INTEGER", _integer(0, 1 << 31), nullable=True)
    for name in ("driver", "triton", "torch", "kernel_hash", "space_hash"):
        yield Column(name, "TEXT", _text)
    yield Column("created", "TEXT", _created)


COLUMNS = tuple(_columns())
KEY_FIELDS = tuple(f.name for f in fields(TuningKey))
#: What a row is unique by; files are sorted by it.
IDENTITY = (*KEY_FIELDS, "variant", "obtained")


def columns(version: int) -> tuple[str, ...]:
    """Names of the columns of a schema version, in order."""
    later = {name for v, added in UPGRADES.items() if v >= version for name in added}
    return tuple(column.name for column in COLUMNS if column.name not in later)


def identity(row: Row) -> tuple[Any, ...]:
    """What ``row`` is unique by, comparable: the order of files and of their twins."""
    return (*(getattr(row.key, name) for name in KEY_FIELDS), row.variant, row.obtained)


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


def decode(record: Mapping[str, Any]) -> Row:
    """The row of a record of the current version. ValueError names the column, what came and what is allowed."""
    values: dict[str, Any] = {}
    for column in COLUMNS:
        value = record[column.name]
        try:
            if value is None and column.nullable:
                values[column.name] = None
            else:
                values[column.name] = column.check(_parse(value) if column.kind == "JSON" else value)
        except ValueError as error:
            raise ValueError(f"column {column.name}: got {_short(value)}, {error}") from None
    values["causal"] = bool(values["causal"])
    return Row(TuningKey(*(values.pop(name) for name in KEY_FIELDS)), **values)


def upgrade(record: Mapping[str, Any], version: int) -> dict[str, Any]:
    """A record of schema ``version`` as one of the current version."""
    upgraded = dict(record)
    for older in range(version, SCHEMA_VERSION):
        upgraded |= UPGRADES[older]
    return upgraded


_dump = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def encode(row: Row) -> Record:
    """The record of a row that was read from a file or that ``checked`` has passed."""
    record: Record = {name: getattr(row.key, name) for name in KEY_FIELDS}
    record["causal"] = int(row.key.causal)
    for column in COLUMNS[len(KEY_FIELDS) :]:
        value = getattr(row, column.name)
        record[column.name] = _dump(value) if column.kind == "JSON" else value
    return record


def checked(row: Row) -> Row:
    """``row`` as a cache file would give it back: NumPy's scalars as Python's, everything else unchanged. ValueError
    names what no file may hold."""
    record = Record()
    for column in COLUMNS:
        value = getattr(row.key if column.name in KEY_FIELDS else row, column.name)
        try:
            if column.kind == "JSON":
                value = _dump(dict(value))
            elif column.kind == "INTEGER" and isinstance(value, numbers.Integral):  # causal, too
                value = int(value)
            elif column.kind == "REAL" and isinstance(value, numbers.Real):
                value = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"column {column.name}: got {_short(value)}, {error}") from None
        record[column.name] = value
    plain = decode(record)
    if plain != row:  # tuples, integer keys: JSON would hand back something else
        raise ValueError(f"config, errors, pruned: must hold plain dicts, text and numbers, got {row}")
    return plain


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def to_json(rows: Iterable[Row]) -> str:
    """``rows``, sorted, as the JSON document that stands beside a cache file for review: the same rows give the same
    bytes. Three lines a row, so that a diff shows what changed: what it answers, what it says, and the evidence."""
    parts = (IDENTITY, ("config",), [c.name for c in COLUMNS if c.name not in (*IDENTITY, "config")])
    blocks = []
    for row in sorted(rows, key=identity):
        record: dict[str, Any] = {**encode(row), "causal": row.key.causal}
        record |= {c.name: json.loads(record[c.name]) for c in COLUMNS if c.kind == "JSON"}
        lines = [json.dumps({name: record[name] for name in part})[1:-1] for part in parts]
        blocks.append("  {" + ",\n   ".join(lines) + "}")
    return f'{{"schema": {SCHEMA_VERSION}, "rows": [\n' + ",\n".join(blocks) + "\n]}\n"


def digest(rows: Iterable[Row], digits: int = 16) -> str:
    """Hexadecimal digits of what ``rows`` say, whatever file they stand in: for comparing the caches of two machines."""
    text = json.dumps([list(encode(row).values()) for row in sorted(rows, key=identity)])
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
