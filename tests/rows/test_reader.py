"""Reading cache files: every value checked, nothing hostile believed; which files serve."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from cache_rows import BARE, FULL, row

from fa2tune.rows import reader, record
from fa2tune.rows.reader import CacheFileError
from fa2tune.rows.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Store(tmp_path / "c.sqlite").put([FULL])
    return tmp_path / "c.sqlite"


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("sm_count", "'132'||'x'"),  # text in an integer column
        ("sm_count", "0"),
        ("sm_count", "9223372036854775807"),
        ("bucket", "-1"),
        ("mask", "'causal '"),
        ("mask", "1"),
        ("family", "'sparse'"),
        ("strategy", "'split/fused'"),
        ("implementation", "''"),
        ("seqlen_q", "-1"),
        ("config_hash", "'0'"),
        ("config_hash", "'0123456789abcdef'"),  # not of its config
        ("binary_hash", "'0123456789abcdef'"),
        ("samples", "1.5"),
        ("samples", "x'00'"),
        ("time_us", "'fast'"),
        ("time_us", "-1.0"),
        ("time_us", "9e999"),  # infinity
        ("obtained", "'guessed'"),
        ("kernel", "'../fwd'"),
        ("gpu", "''"),
        ("driver", "char(27)||'[2J'"),  # a terminal escape
        ("driver", "printf('%.*c', 1000, 'x')"),
        ("driver", "printf('%.*c', 10000000, 'x')"),
        ("driver", "cast(x'ff' as text)"),  # no UTF-8
        ("driver", "x'00'"),
        ("created", "'2026-01-31'"),
        ("config", "'[]'"),
        ("config", "'{'"),
        ("config", "'{\"a\": {}}'"),
        ("config", "'{\"a\": NaN}'"),
        ("config", "'{\"a\": 1.5}'"),
        ("config", "'{\"a\": null}'"),
        ("config", '\'{"a": 1, "a": 2}\''),
        ("config", "'{\"__import__(1)\": 1}'"),
        ("config", "'{\"a\": ' || printf('%.*c', 5000, '9') || '}'"),
        ("errors", "replace(printf('%.*c', 20000, 'x'), 'x', '{\"a\":')"),  # nested 20,000 deep
        ("errors", '\'{"a": {"b": Infinity}}\''),
        ("pruned", "'{\"a\": true}'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(column: str, value: str, path: Path) -> None:
    execute(path, f"UPDATE rows SET {column} = {value}")
    with pytest.raises(CacheFileError, match=r"c\.sqlite: ") as caught:
        reader.read(path)
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (["CREATE VIEW extra AS SELECT 1"], "one table"),
        (["CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END"], "one table"),
        (["ALTER TABLE rows RENAME TO r", "CREATE VIEW rows AS SELECT * FROM r"], "one table"),
        (["DROP TABLE rows"], "one table"),
        (["DROP TABLE rows", "CREATE TABLE rows (gpu TEXT)"], "columns"),
        (["ALTER TABLE rows ADD COLUMN extra TEXT"], "columns"),
        (["ALTER TABLE rows ADD COLUMN extra TEXT AS (driver) VIRTUAL"], "columns"),
        (["CREATE TABLE alembic_version (v TEXT)"], "one table"),  # an Optuna study
        ([f"PRAGMA user_version={record.SCHEMA_VERSION + 1}"], "upgrade fa2tune"),
        (["PRAGMA user_version=0"], "columns are not those of schema version 0"),
        (["PRAGMA application_id=1"], "not a fa2tune cache"),
        (["PRAGMA journal_mode=WAL"], "WAL"),
    ],
)
def test_a_file_that_is_more_or_other_than_one_table_is_refused(statements: list[str], said: str, path: Path) -> None:
    execute(path, *statements)
    with pytest.raises(CacheFileError, match=said):
        reader.read(path)


def _without_primary_key(path: Path) -> None:
    execute(path, "CREATE TABLE copy AS SELECT * FROM rows", "INSERT INTO copy SELECT * FROM rows", "DROP TABLE rows")
    execute(path, "ALTER TABLE copy RENAME TO rows")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(b""), "not an SQLite database"),
        (lambda path: path.write_text("x" * 5000), "not an SQLite database"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), ""),
        (lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xa5" * 4096), ""),
        (lambda path: path.with_name("c.sqlite-journal").write_text("x"), "unfinished write"),
        (lambda path: (path.unlink(), path.mkdir()), "regular file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "regular file"),  # would block
        (lambda path: path.unlink(), "no such file"),
        (_without_primary_key, "same key"),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(spoil: Callable[[Path], object], said: str, path: Path) -> None:
    spoil(path)
    with pytest.raises(CacheFileError, match=rf"c\.sqlite: .*{said}"):
        reader.read(path)


def _quote_no_utf8(path: Path) -> None:
    """A byte of the table's statement in the schema, which SQLite quotes in its error."""
    content = bytearray(path.read_bytes())
    content[content.index(b"TABLE rows")] = 0xFA
    path.write_bytes(content)


def _quote_escapes(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"head_dim INTEGER", b"head_dim`\x1b[2JGER", 1))


def test_a_damaged_schema_is_a_file_that_cannot_be_used(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite's error quotes the schema: Python cannot decode it, or a terminal would act on it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped = tmp_path / "shipped.sqlite"
    Store(shipped).put([BARE])
    monkeypatch.setattr(reader, "shipped_paths", lambda: [shipped])
    for spoil in (_quote_no_utf8, _quote_escapes):
        Store(reader.user_path()).put([FULL])
        spoil(reader.user_path())
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fa2tune"):
            (layer,) = reader.layers()
        assert layer.name == "shipped" and list(layer.rows) == [BARE]
        (said,) = [entry.getMessage() for entry in caplog.records]
        assert said.startswith(f"user layer skipped: cache file {reader.user_path()}: ") and said.isprintable()
        reader.user_path().unlink()


def test_random_damage_is_an_error_of_the_reader_or_rows_that_were_checked(tmp_path: Path) -> None:
    """Up to 5 bytes of a file changed, half of the time on its first pages, where the schema stands."""
    whole = tmp_path / "whole.sqlite"
    Store(whole).put([FULL, BARE, *(row({"bucket": bucket, "kernel": f"k{bucket % 3}"}) for bucket in range(1, 50))])
    content, damaged = whole.read_bytes(), tmp_path / "damaged.sqlite"
    random_ = random.Random(20)
    refused = kept = 0
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(random_.choice([1, 1, 2, 5])):
            place = random_.randrange(random_.choice([2 * 4096, len(content)]))
            changed[place] ^= random_.randrange(1, 256)
        damaged.write_bytes(changed)
        try:
            rows = reader.read(damaged)
        except CacheFileError as error:
            assert str(error).startswith(f"cache file {damaged}: ")
            assert str(error).isprintable() and len(error.reason) <= 300
            refused += 1
        else:
            assert [record.checked(one) for one in rows] == rows
            kept += 1
    assert refused > 150 and kept > 30, "the damage must reach both outcomes"


def test_pages_that_are_read_over_and_over_end(tmp_path: Path) -> None:
    """A few pages whose children are all one page hold more rows than any memory."""
    path = tmp_path / "c.sqlite"
    Store(path).put(row({"bucket": bucket}) for bucket in range(1, 60))
    with closing(sqlite3.connect(path)) as database:
        [(root,)] = database.execute("SELECT rootpage FROM sqlite_master")
    content, size = bytearray(path.read_bytes()), 4096
    page = content[(root - 1) * size : root * size]
    assert page[0] == 2, "an interior page of an index"
    cells = int.from_bytes(page[3:5], "big")
    slots = [8, *(int.from_bytes(page[12 + 2 * cell :][:2], "big") for cell in range(cells))]  # of page numbers
    pages = len(content) // size
    for level in range(14):
        above = bytearray(page)
        if level < 13:
            for slot in slots:
                above[slot : slot + 4] = (pages + level + 1).to_bytes(4, "big")
        if level:
            content += above
        else:
            content[(root - 1) * size : root * size] = above
    content[28:32] = (len(content) // size).to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(CacheFileError, match="more to read than fits"):
        reader.read(path)


@pytest.mark.parametrize("name", ["a b?mode=rwc#c%20é.sqlite", "'\"&;.sqlite", "file:x.sqlite"])
def test_odd_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path / name).put([FULL])
    assert reader.read(tmp_path / name) == [FULL]
    monkeypatch.chdir(tmp_path)
    assert reader.read(name) == [FULL]


def test_reading_leaves_no_trace_and_needs_no_write_permission(path: Path) -> None:
    for file in path.parent.glob(".*"):
        file.unlink()
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        assert reader.read(path) == [FULL]
        assert list(path.parent.iterdir()) == [path]
    finally:
        path.parent.chmod(0o700)


def test_layers_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [layer.name for layer in reader.layers() if layer.name != "shipped"] == []
    assert not caplog.records, "no user file is normal"
    files = [tmp_path / f"{name}.sqlite" for name in ("named", "fleet1", "fleet2")]
    for number, file in enumerate([*files, reader.user_path()]):
        Store(file).put([row({"bucket": 1 + number})])
    monkeypatch.setenv("FA2TUNE_CACHE", os.pathsep.join(["", str(files[1]), str(files[2])]))
    monkeypatch.setattr(reader, "shipped_paths", lambda: [files[0]])
    found = reader.layers([files[0]])
    assert [layer.name for layer in found] == ["named", "user", "fleet", "fleet", "shipped"]
    assert [layer.rows[0].key.bucket for layer in found] == [1, 4, 2, 3, 1]


def test_shipped_rows_are_checked_when_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = [FULL, BARE, row({"kernel": "bwd_dq"}), row({"mask": "full"})]
    path = tmp_path / "shipped.sqlite"
    Store(path).put(held)
    monkeypatch.setattr(reader, "shipped_paths", lambda: [path])
    decoded: list[object] = []
    real = record.decode
    monkeypatch.setattr(record, "decode", lambda one: decoded.append(one) or real(one))
    (layer,) = reader.layers()
    rows = layer.rows
    assert isinstance(rows, reader.ShippedRows) and len(rows) == 4 and not decoded
    assert rows.of(90, "fwd", mask=("causal", "none")) == [FULL] == rows.of(90, "fwd", mask=("causal",))
    assert len(decoded) == 1 and not rows.of(12, "fwd") and not rows.of(90, "bwd")
    assert list(rows) == reader.read(path) and rows[0] in held

    execute(path, "UPDATE rows SET gpu = '' WHERE kernel = 'bwd_dq'")
    (layer,) = reader.layers()
    with caplog.at_level(logging.WARNING, "fa2tune"):
        assert isinstance(layer.rows, reader.ShippedRows) and layer.rows.of(80, "fwd") == [BARE]
        assert layer.rows.of(90, "bwd_dq") == [] == list(layer.rows) == layer.rows.of(80, "fwd")
    (said,) = [entry.message for entry in caplog.records]
    assert said.startswith(f"shipped layer skipped: cache file {path}: row ") and "column gpu" in said


def test_what_is_found_is_skipped_with_one_warning_what_is_named_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing, broken = tmp_path / "missing.sqlite", tmp_path / "broken.sqlite"
    broken.write_text("x")
    Store(tmp_path / "good.sqlite").put([BARE])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reader, "shipped_paths", list)
    monkeypatch.setenv("FA2TUNE_CACHE", os.pathsep.join(map(str, [missing, broken, tmp_path / "good.sqlite"])))
    with caplog.at_level(logging.WARNING, "fa2tune"):
        assert [layer.path for layer in reader.layers()] == [tmp_path / "good.sqlite"]
    assert [r.getMessage() for r in caplog.records] == [
        f"fleet layer skipped: cache file {missing}: no such file",
        f"fleet layer skipped: cache file {broken}: is not an SQLite database",
    ]
    for file in (missing, broken):
        with pytest.raises(CacheFileError, match=str(file)):
            reader.layers([file])


def test_user_path_by_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert reader.user_path() == tmp_path / "fa2tune" / "cache.sqlite"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    for xdg in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        for platform, folder in (
            ("linux", "home/.cache/fa2tune"),
            ("darwin", "home/Library/Caches/fa2tune"),
            ("win32", "local/fa2tune/Cache"),
        ):
            monkeypatch.setattr(sys, "platform", platform)
            assert reader.user_path() == tmp_path / folder / "cache.sqlite"


def test_reading_imports_nothing_heavy(path: Path) -> None:
    code = f"import sys; from fa2tune.rows import reader, lookup; reader.read({str(path)!r}); print(*sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert not {"sqlalchemy", "torch", "triton", "optuna", "numpy"} & set(done.stdout.split())
