"""Writing cache files: schema, renewal, merge, export, several processes at once. What every store of rows keeps:
tests/sharing/test_row_stores.py."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from cache_rows import BARE, FULL, WHOLE, row

from fa2tune.rows import reader, record, store
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.spec.key import TuningKey

FIXTURES = Path(__file__).parents[1] / "fixtures"
#: A config and a workload as they were when the fixtures were written: a store keeps what it is given.
THEN = {name: value for name, value in FULL.config.items() if name != "MASKED"} | {"MASKED_FIRST": False}
SIZE = dict.fromkeys(("heads_q", "heads_kv"), 16) | {"batch": 4, "seqlen_q": 4096, "seqlen_k": 4096}
#: The rows of the fixtures.
KEPT = [
    BARE,
    row({"mask": "full"}, implementation="descriptor", obtained="sibling", config=THEN, **SIZE),
    row(config=THEN, **SIZE),
]


def kept(version: int) -> list[Row]:
    """What a file of a schema version held: before 3 without the hash of the binary, before 2 without whether the GPU had been
    throttled."""
    lacking = {"binary_hash": None} if version < 3 else {}
    return [replace(r, **lacking, **({"throttled": None} if version < 2 else {})) for r in KEPT]


def ordered(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=record.identity)


def test_reader_and_sqlalchemy_hold_one_schema(tmp_path: Path) -> None:
    Store(tmp_path / "c.sqlite").put([FULL, BARE, WHOLE])
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'c.sqlite'}")
    with engine.connect() as connection:
        assert [c["name"] for c in sa.inspect(engine).get_columns("rows")] == list(
            record.columns(record.SCHEMA_VERSION)
        )
        written = [tuple(values) for values in connection.execute(store.TABLE.select())]
    engine.dispose()
    read = reader.read(tmp_path / "c.sqlite")
    assert read == [BARE, WHOLE, FULL]
    assert [tuple(record.encode(r).values()) for r in read] == written


def test_every_field_of_a_row_is_a_column() -> None:
    names = [f.name for f in fields(TuningKey)] + [f.name for f in fields(Row) if f.name != "key"] + ["config_hash"]
    assert sorted(names) == sorted(column.name for column in record.COLUMNS)
    defaults = Row(WHOLE.key, WHOLE.implementation, {}, WHOLE.obtained, WHOLE.proof)
    same = [f.name for f in fields(Row)[5:] if getattr(WHOLE, f.name) == getattr(defaults, f.name)]
    assert not same, "the round trip proves nothing about these"


def test_renew_replaces_one_config_of_a_slot(tmp_path: Path) -> None:
    cache = Store(tmp_path / "c.sqlite")
    one, two = (replace(FULL, config={"BLOCK_M": size}, time_us=float(size)) for size in (64, 128))
    cache.put([one, two])
    cache.renew([replace(two, time_us=1.5), BARE])
    assert cache.rows() == ordered([BARE, one, replace(two, time_us=1.5)])


def test_a_workload_that_is_not_said_is_that_of_the_key() -> None:
    assert (BARE.batch, BARE.heads_q, BARE.heads_kv, BARE.seqlen_q, BARE.seqlen_k) == (4, 16, 16, 4096, 4096)
    said = replace(BARE, batch=0, heads_q=0, heads_kv=2, seqlen_q=1, seqlen_k=0)
    assert (said.batch, said.heads_q, said.heads_kv, said.seqlen_q, said.seqlen_k) == (4, 16, 2, 1, 4096)


def test_merge_keeps_the_later_made(tmp_path: Path) -> None:
    ours, theirs = Store(tmp_path / "ours.sqlite"), Store(tmp_path / "theirs.sqlite")
    later = "2026-01-31T12:00:01+00:00"
    stale, fresh = row({"bucket": 512}), row({"bucket": 1024})
    ours.put([FULL, stale, replace(fresh, created=later)])
    theirs.put([replace(FULL, samples=7), replace(stale, samples=7, created=later), replace(fresh, samples=7), BARE])
    [merged] = ours.merge(theirs.path)
    assert (merged.added, merged.replaced, merged.left) == (1, 1, 2)
    assert [(c.kept[0].key.bucket, c.kept[0].samples, c.replaced) for c in merged.conflicts][1:] == [
        (1024, 200, False),
        (4096, 200, False),
    ]
    assert {r.key.bucket: r.samples for r in ours.rows() if r.key.gpu == "h200"} == {512: 7, 1024: 200, 4096: 200}
    assert BARE in ours.rows()
    [merged] = ours.merge(theirs.path)
    assert (merged.added, merged.replaced, merged.left) == (0, 0, 4)


def test_merge_takes_a_slot_as_a_whole(tmp_path: Path) -> None:
    """Times of two machines never compete: a config of the older file is faster, and goes all the same."""
    older = [replace(FULL, config={"BLOCK_M": size}, time_us=time) for size, time in ((64, 9.0), (128, 1.0))]
    newer = [replace(FULL, config={"BLOCK_M": size}, time_us=8.0) for size in (32, 64)]
    newer[1] = replace(newer[1], created="2026-02-01T00:00:00Z")  # one is enough
    other = replace(FULL, batch=3)
    Store(tmp_path / "older.sqlite").put([*older, other])
    Store(tmp_path / "newer.sqlite").put(newer)
    for into, source in (("older", "newer"), ("newer", "older")):
        copy = tmp_path / f"into {into}.sqlite"
        copy.write_bytes((tmp_path / f"{into}.sqlite").read_bytes())
        [merged] = Store(copy).merge(tmp_path / f"{source}.sqlite")
        assert reader.read(copy) == ordered([*newer, other])
        [conflict] = merged.conflicts
        assert (conflict.kept, conflict.left) == (ordered(newer), ordered(older))
        assert conflict.replaced == (source == "newer")
        assert (merged.added, merged.replaced, merged.left) == ((0, 2, 0) if source == "newer" else (1, 0, 2))


def test_merge_takes_all_files_or_none_and_their_order_does_not_count(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.sqlite" for name in "abc"]
    for number, file in enumerate(files):  # made in one second, with as many samples: a tie
        Store(file).put([row({"bucket": 512 + number}), replace(FULL, time_us=800.0 + number)])
    one, other = Store(tmp_path / "one.sqlite"), Store(tmp_path / "other.sqlite")
    reports = one.merge(*files)
    assert [(r.path, r.added) for r in reports] == [(files[0], 2), (files[1], 1), (files[2], 1)]
    assert sum(len(r.conflicts) for r in reports) == 2
    other.merge(*reversed(files))
    assert one.path.read_bytes() == other.path.read_bytes()
    third = Store(tmp_path / "third.sqlite")
    third.put([BARE])
    files[2].write_text("spoilt")
    with pytest.raises(reader.CacheFileError, match=str(files[2])):
        third.merge(*files)
    assert third.rows() == [BARE]


def test_remove(tmp_path: Path) -> None:
    cache = Store(tmp_path / "c.sqlite")
    other = replace(FULL, config={})
    cache.put([FULL, other, BARE])
    cache.remove([replace(FULL, time_us=1.0), row({"bucket": 512})])
    assert cache.rows() == ordered([BARE, other])


def test_export_gives_the_same_bytes_whatever_the_history(tmp_path: Path) -> None:
    many = [row({"bucket": bucket}) for bucket in (512, 1024, 2048)]
    one, other = Store(tmp_path / "one.sqlite"), Store(tmp_path / "other.sqlite")
    one.put(many)
    for r in reversed(many):
        other.put([replace(r, config={"x" * 60: 1})])
        other.put([replace(r, config=dict(reversed(r.config.items())))])
    for kind in store.FILE_KINDS:
        one.export(tmp_path / f"1.{kind}", kind)
        other.export(tmp_path / f"2.{kind}", kind)
        assert (tmp_path / f"1.{kind}").read_bytes() == (tmp_path / f"2.{kind}").read_bytes()
    header = (tmp_path / "1.sqlite").read_bytes()[:100]
    assert header[18:20] == b"\1\1", "rollback journal, not WAL"
    assert header[36:40] == bytes(4), "no free pages: vacuumed"
    with pytest.raises(ValueError, match="the cache file itself"):
        one.export(one.path)
    with pytest.raises(ValueError, match="allowed are sqlite, json"):
        one.export(tmp_path / "x", "yaml")


def test_json_twin_says_what_the_rows_say(tmp_path: Path) -> None:
    store.export([FULL, BARE], tmp_path / "c.json", "json")
    twin = json.loads((tmp_path / "c.json").read_text())
    assert twin["schema"] == record.SCHEMA_VERSION
    assert [entry["gpu"] for entry in twin["rows"]] == ["a100-sxm-80gb", "h200"]
    full = twin["rows"][1]
    assert full["config"] == FULL.config
    assert full["errors"] == FULL.errors
    assert (full["mask"], full["family"], full["binary_hash"]) == ("causal", "dense", FULL.binary_hash)
    assert set(full) == {column.name for column in record.COLUMNS}


def test_shipped_files_equal_their_twins_byte_for_byte() -> None:
    twins = Path(__file__).parents[2] / "cache"  # the wheel does not hold them
    for path in reader.shipped_paths():
        twin = twins / path.with_suffix(".json").name
        assert record.to_json(reader.read(path)) == twin.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("version", range(record.SCHEMA_VERSION + 1))
def test_every_schema_is_read_and_upgraded_by_the_next_write(version: int, tmp_path: Path) -> None:
    old = FIXTURES / f"schema_{version}.sqlite"
    assert ordered(reader.read(old)) == ordered(kept(version))
    path = tmp_path / "c.sqlite"
    path.write_bytes(old.read_bytes())
    Store(path).put([row({"bucket": 512})])
    assert int.from_bytes(path.read_bytes()[60:64], "big") == record.SCHEMA_VERSION
    assert reader.read(path) == ordered([*kept(version), row({"bucket": 512})])


@pytest.mark.parametrize("version", range(2, record.SCHEMA_VERSION + 1))
def test_the_twin_of_every_schema_is_read(version: int) -> None:
    """Before version 2 no twin was shipped."""
    assert ordered(reader.read(FIXTURES / f"schema_{version}.json")) == ordered(kept(version))


@pytest.mark.parametrize("kind", store.FILE_KINDS)
def test_a_variant_of_a_whole_backward_becomes_strategy_and_implementation(kind: str) -> None:
    found = {(r.key.mask, r.strategy, r.implementation, r.batch, r.heads_q, r.heads_kv, r.seqlen_q, r.seqlen_k)
             for r in reader.read(FIXTURES / f"schema_2_backward.{kind}")}  # fmt: skip
    assert found == {
        ("causal", "split", "portable", 32, 32, 32, 512, 512),
        ("causal", "split", "warp_specialized", 32, 32, 32, 512, 512),  # it named no workload
        ("causal", "fused", "portable", 7, 8, 2, 512, 512),
        ("full", "fused", "warp_specialized", 32, 32, 32, 512, 512),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"schema": 4, "rows": []}', "has schema version 4, this fa2tune reads up to 3: upgrade fa2tune"),
        ('{"schema": 3, "rows": [7]}', "must hold an object for each row"),
        ('{"schema": 3}', "must be an object with a schema version and a list of rows"),
        ('{"schema": 3, "rows": [{"gpu": "h200"}]}', "column sm_count: is missing"),
        ('{"schema": 3, ', "Expecting"),
        ('{"schema": ' + "[" * 100_000, "is nested too deep"),
    ],
)
def test_a_twin_that_cannot_be_used_is_an_error_that_names_it(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(reader.CacheFileError, match=rf"cache file .*c\.json: .*{said}"):
        reader.read(tmp_path / "c.json")


def test_a_twin_is_not_written_to(tmp_path: Path) -> None:
    store.export([FULL], tmp_path / "c.json", "json")
    with pytest.raises(reader.CacheFileError, match="is the JSON twin of a cache file, which is only read"):
        Store(tmp_path / "c.json")
    [merged] = Store(tmp_path / "c.sqlite").merge(tmp_path / "c.json")
    assert merged.added == 1 and reader.read(tmp_path / "c.sqlite") == [FULL]


def test_a_file_that_is_no_cache_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    path.write_text("notes")
    with pytest.raises(reader.CacheFileError, match="not an SQLite database"):
        Store(path)
    assert path.read_text() == "notes"


def test_a_place_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Store(tmp_path / "file" / "c.sqlite")
    if os.geteuid():  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(OSError, match="cannot be written"):
            Store(tmp_path / "locked" / "c.sqlite")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    Store(tmp_path / "real.sqlite").put([BARE])
    (tmp_path / "link.sqlite").symlink_to(tmp_path / "real.sqlite")
    Store(tmp_path / "link.sqlite").put([FULL])
    assert (tmp_path / "link.sqlite").is_symlink()
    assert reader.read(tmp_path / "real.sqlite") == [BARE, FULL]


def _put_some(path: Path, writer: int, count: int) -> None:
    cache = Store(path)
    for number in range(count):
        cache.put([row({"bucket": 1 + number, "head_dim": 1 + writer}), row(samples=writer)])


def test_processes_write_at_once_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_put_some, args=(path, writer, 6)) for writer in range(3)]
    for process in writers:
        process.start()
    while any(process.is_alive() for process in writers):
        if path.exists():
            reader.read(path)  # never torn
    assert [process.exitcode for process in writers] == [0, 0, 0]
    assert len(reader.read(path)) == 3 * 6 + 1
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def _put_for_ever(path: Path) -> None:
    cache = Store(path)
    while True:
        cache.put([row({"bucket": bucket}) for bucket in range(1, 50)])


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX")
def test_a_writer_killed_half_way_leaves_a_whole_file_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    Store(path).put([BARE])
    process = multiprocessing.get_context("spawn").Process(target=_put_for_ever, args=(path,))
    process.start()
    while len(reader.read(path)) == 1 and process.is_alive():
        time.sleep(0.01)
    process.kill()
    process.join()
    assert len(reader.read(path)) == 50
    Store(path).put([FULL])
    assert FULL in reader.read(path)


def test_a_lock_that_is_not_let_go_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOCK_TIMEOUT_S", 0.05)
    cache = Store(tmp_path / "c.sqlite")
    holder = sqlite3.connect(tmp_path / ".c.sqlite.lock", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(OSError, match="locked"):
        cache.put([FULL])
    holder.close()
    cache.put([FULL])
