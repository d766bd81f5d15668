"""Calls in a cluster and on a bad day: under torch.distributed a call works alone, and no cache file can make one fail."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cache_rows import FULL

import fa2tune
from fa2tune.calling import dispatch
from fa2tune.compiling.registry import portable_of
from fa2tune.rows import reader, record
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import Specialization

SPEC = Specialization("fp16", 16, 16, "causal")
#: What the interpreter is taken for: the lowest architecture there is.
KEY = TuningKey("a100-sxm-80gb", 108, 80, "fwd", "fp16", "ieee", 16, 16, "causal", 512)


def small(**config: Any) -> Row:
    """A row that serves the calls of these tests, told from the default by its config."""
    default = portable_of("fwd").space.default(SPEC, 80)
    return replace(
        FULL, key=KEY, implementation="pointer", config={**default, "LOADS": "pointer", "HEADS_PER_WAVE": 1, **config}
    )


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, 40, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]


def call() -> None:
    """A forward and a backward, checked."""
    q, k, v = inputs()
    o = fa2tune.attention(q, k, v, causal=True)
    o.sum().backward()
    expected = F.scaled_dot_product_attention(
        q.detach().float(), k.detach().float(), v.detach().float(), is_causal=True
    )
    torch.testing.assert_close(o.detach().float(), expected, atol=5e-3, rtol=5e-3)
    assert q.grad is not None and torch.isfinite(q.grad).all()


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has read no file yet, and does not keep what these tests had it read."""
    monkeypatch.setattr(reader, "shipped_paths", list)
    dispatch.reload()
    dispatch.SERVED.clear()
    yield
    monkeypatch.undo()
    dispatch.reload()
    dispatch.SERVED.clear()


# --- torch.distributed

#: Modules that tune, time or decide by time: a call must never come to need one.
NEVER = (
    "optuna",
    "fa2tune.tuning.run.tuner",
    "fa2tune.measuring.measure",
    "fa2tune.tuning.select.measured",
    "fa2tune.measuring.racing",
    "fa2tune.rows.store",
    "triton.testing",
)


def _forbid(*_: object, **__: object) -> None:
    raise AssertionError("a call of attention must not come here")


def rank(number: int, port: int, path: str, pipe: Connection[Any, Any]) -> None:
    """One rank: calls attention while the other one does nothing at all, and tells what served it."""
    os.environ["FA2TUNE_CACHE"] = path
    reader.shipped_paths = list
    import torch.distributed as dist
    import triton.testing

    store = dist.TCPStore("127.0.0.1", port, 2, is_master=number == 0)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    dist.barrier()
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier", "send",
                 "recv", "isend", "irecv", "reduce", "scatter", "gather", "monitored_barrier"):  # fmt: skip
        setattr(dist, name, _forbid)
    torch.cuda.Event = triton.testing.do_bench = _forbid
    for method in ("allreduce", "allgather", "broadcast", "barrier", "send", "recv"):
        setattr(dist.ProcessGroup, method, _forbid)
    assert pipe.recv() == "go"
    already = {name for name in NEVER if name in sys.modules}
    call()
    pulled_in = {name for name in NEVER if name in sys.modules} - already
    pipe.send((dict(dispatch.SERVED), sorted(pulled_in), fa2tune.manifest().hash))
    pipe.recv()  # the process group stays up until both have called
    os._exit(0)  # no tear-down that would meet the other rank


def test_a_call_waits_for_no_rank_tunes_nothing_and_decides_alike(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    Store(path).put([small()])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = []
    for number in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank, args=(number, port, str(path), theirs), daemon=True)
        process.start()
        ranks.append((process, ours))
    try:
        said = []
        for process, pipe in ranks:  # one after the other: the second stands still while the first calls
            pipe.send("go")
            assert pipe.poll(240), f"a rank waits for the other one ({process.exitcode})"
            said.append(pipe.recv())
        assert said[0] == said[1]
        served, pulled_in, _ = said[0]
        assert served["problem exact, GPU exact, measured, stale, fleet layer"] == 1
        assert not pulled_in
    finally:
        for process, pipe in ranks:
            pipe.close()
            process.kill()
            process.join()


# --- bad files


def _sql(*statements: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            for statement in statements:
                database.execute(statement)

    return spoil


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes()))  # type: ignore[func-returns-value]


BAD_FILES: dict[str, Callable[[Path], object]] = {
    "empty": _bytes(lambda data: b""),
    "cut short": _bytes(lambda data: data[: len(data) // 2]),
    "overwritten": _bytes(lambda data: data[:4096] + b"\xa5" * (len(data) - 4096)),
    "text": _bytes(lambda data: b"not a database\n" * 500),
    "newer schema": _bytes(lambda d: d[:60] + (record.SCHEMA_VERSION + 1).to_bytes(4, "big") + d[64:]),
    "no file": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a loop": lambda path: (path.unlink(), path.symlink_to(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "wrong type": _sql("UPDATE rows SET bucket = 'x'"),
    "huge value": _sql("UPDATE rows SET driver = printf('%.*c', 10000000, 'x')"),
    "deep JSON": _sql("UPDATE rows SET config = replace(printf('%.*c', 20000, 'x'), 'x', '{\"a\":')"),
    "path trick": _sql("UPDATE rows SET kernel = '../../etc/passwd'"),
    "trigger": _sql("CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END"),
    "view": _sql("ALTER TABLE rows RENAME TO r", "CREATE VIEW rows AS SELECT * FROM r"),
    "endless view": _sql(
        "DROP TABLE rows",
        "CREATE VIEW rows AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
    ),
}


@pytest.mark.parametrize("layer", ["user", "fleet"])
@pytest.mark.parametrize("kind", BAD_FILES)
def test_no_file_makes_a_call_fail(
    kind: str, layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = reader.user_path() if layer == "user" else tmp_path / "fleet.sqlite"
    Store(path).put([small()])
    BAD_FILES[kind](path)
    if layer == "fleet":
        monkeypatch.setenv("FA2TUNE_CACHE", str(path))
    with caplog.at_level(logging.WARNING, "fa2tune"):
        q, k, v = (t.detach() for t in inputs())
        assert torch.isfinite(fa2tune.attention(q, k, v, causal=True)).all()
    assert dict(dispatch.SERVED) == {"default": 1}
    skipped = [r.getMessage() for r in caplog.records if "layer skipped" in r.getMessage()]
    if (kind, layer) != ("no file", "user"):  # which is normal
        assert [str(path) in message for message in skipped] == [True]


@pytest.mark.parametrize(
    "config",
    [
        {"num_warps": "8"},
        {"num_warps": 0},
        {"num_warps": -4},
        {"num_warps": 3},
        {"num_stages": 1 << 40},
        {"BLOCK_M": 0},
        {"BLOCK_M": 48},
        {"BLOCK_N": True},
        {"LOADS": "os.system"},
        {"LOADS": 1},
        {"MASKED": "nowhere"},
        {"HEADS_PER_WAVE": 0},
        {"maxnreg": "255"},
        {"EXTRA": 1},
    ],
    ids=str,
)
def test_a_config_of_wrong_types_or_values_serves_no_call(config: dict[str, Any], tmp_path: Path) -> None:
    Store(reader.user_path()).put([small(**config)])
    q, k, v = (t.detach() for t in inputs())
    assert torch.isfinite(fa2tune.attention(q, k, v, causal=True)).all()
    assert dict(dispatch.SERVED) == {"default": 1}


def test_a_good_row_serves_and_a_spoilt_file_is_noticed_at_the_next_start_only(tmp_path: Path) -> None:
    path = reader.user_path()
    Store(path).put([small()])
    call()
    assert dispatch.SERVED["problem exact, GPU exact, measured, stale, user layer"] == 1
    path.write_text("spoilt while the process runs")
    call()
    dispatch.reload()
    dispatch.SERVED.clear()
    call()
    assert dispatch.SERVED["default"] > 0
