"""The contract of a store of rows, which a cache file keeps, and the table that workers share, on SQLite and on PostgreSQL."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cache_rows import BARE, FULL, WHOLE, row
from postgres_server import server

from fa2tune.rows import record
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.sharing.shared import SharedStore
from fa2tune.sharing.storage import Storage, parsed

__all__ = ["server"]  # a fixture
NUMBERS = itertools.count()


@dataclass
class Rows:
    """A store of rows."""

    rows: Callable[[], list[Row]]
    put: Callable[[Iterable[Row]], None]
    again: Callable[[], Rows]  #: the same store, as another process opens it


def of_file(path: Path) -> Rows:
    store = Store(path)
    return Rows(store.rows, store.put, lambda: of_file(path))


def of_table(held: Storage) -> Rows:
    store = SharedStore(held)
    return Rows(
        store.rows,
        lambda rows: held.do(lambda connection: store.write(connection, list(rows))),
        lambda: of_table(Storage(held.url, held.file)),
    )


@pytest.fixture(params=["file", "table on SQLite", "table on PostgreSQL"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rows]:
    """An empty store of each kind."""
    if request.param == "file":
        yield of_file(tmp_path / "deep" / "c.sqlite")
        return
    if request.param == "table on SQLite":
        found = Storage.of_studies(tmp_path / "studies.sqlite")
    else:
        found = Storage(parsed(request.getfixturevalue("server").create(f"rows{next(NUMBERS)}")))
    yield of_table(found)
    found.engine.dispose()


def ordered(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=record.identity)


def test_rows_come_back_as_they_were_in_one_order(held: Rows) -> None:
    assert held.rows() == []
    held.put([FULL, BARE])
    held.put([])
    held.put([WHOLE])
    assert held.rows() == held.again().rows() == [BARE, WHOLE, FULL] == ordered([FULL, WHOLE, BARE])


def test_put_replaces_what_a_slot_held(held: Rows) -> None:
    others = [
        replace(FULL, implementation="descriptor"), replace(FULL, obtained="predicted"), replace(FULL, batch=3),
        replace(FULL, seqlen_k=5000), row({"family": "decode"}), replace(FULL, strategy="split"),
    ]  # fmt: skip
    held.put([FULL, *others])
    new = [replace(FULL, config={"BLOCK_M": size}, time_us=float(size)) for size in (64, 128)]
    held.put(new)
    assert held.rows() == ordered([*new, *others]), "another config of the slot is gone, those put together stay"
    held.put([replace(new[0], time_us=1.5), replace(new[0], time_us=1.6)])
    assert [r.time_us for r in held.again().rows() if record.slot(r) == record.slot(FULL)] == [1.6]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (replace(FULL, time_us=float("nan")), "time_us"),
        (replace(FULL, registers=2.5), "registers"),
        (replace(FULL, obtained="guessed"), "obtained"),
        (replace(FULL, config={"BLOCK_M": (1, 2)}), "config"),
        (replace(FULL, config={"BLOCK M": 1}), "config"),
        (replace(FULL, pruned={1: 2}), "pruned"),
        (replace(FULL, driver=None), "driver"),
        (replace(FULL, created="yesterday"), "created"),
        (replace(FULL, binary_hash="0123"), "binary_hash"),
        (replace(FULL, batch=-1), "batch"),
        (replace(FULL, strategy="split two"), "strategy"),
        (row({"family": "dens"}), "family: got 'dens', must be one of dense, banded, ragged, decode, fp8"),
        (row({"mask": "band"}), "mask: got 'band', must be one of full, causal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_put_refuses_what_no_store_may_hold(bad: Row, said: str, held: Rows) -> None:
    held.put([BARE])
    with pytest.raises(ValueError, match=said):
        held.put([FULL, bad])
    assert held.rows() == [BARE], "all of them, or none"


def test_numpy_scalars_become_plain(held: Rows) -> None:
    np = pytest.importorskip("numpy")
    held.put([replace(FULL, registers=np.int64(200), time_us=np.float64(2.5), gain=np.float32(0.5))])
    [read] = held.rows()
    assert (read.registers, read.time_us, read.gain) == (200, 2.5, 0.5)
    assert (type(read.registers), type(read.time_us)) == (int, float)
