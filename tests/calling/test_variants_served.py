"""Several variants of a kernel: looked up by what can serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cache_rows import CONFIG, row
from click.testing import CliRunner
from tuner_runs import H200, SPEC
from variant_fakes import DEFAULT

from fa2tune.calling import choosing, dispatch, serving
from fa2tune.calling.kinds import PORTABLE_ROWS, WARP_SPECIALIZED_ROWS
from fa2tune.cli.explain import explain
from fa2tune.compiling.compiler import CompileError
from fa2tune.compiling.registry import portable_of
from fa2tune.rows import lookup, reader
from fa2tune.rows.store import Store
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import BACKWARD, Problem
from fa2tune.spec.variant import DESCRIPTOR, POINTER, PORTABLE, WARP_SPECIALIZED, implementation_of

pytestmark = pytest.mark.usefixtures("specialized_fakes", "quick_starts")


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reader, "shipped_paths", list)
    dispatch.reload()
    choosing.toolchain.cache_clear()
    yield reader.user_path()
    dispatch.reload()
    choosing.toolchain.cache_clear()


SPECIALIZED = row(implementation=WARP_SPECIALIZED, config=DEFAULT, time_us=500.0)

BY_POINTER = row(implementation=POINTER, config=CONFIG, time_us=700.0)

DESCRIBED = row(implementation=DESCRIPTOR, config={**CONFIG, "LOADS": DESCRIPTOR}, time_us=600.0)


def explained(*arguments: object) -> str:
    done = CliRunner().invoke(explain, ["-v", "--gpu", "h200", "--causal", *map(str, arguments)], terminal_width=200)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_fastest_row_that_may_serve_does(user: Path) -> None:
    Store(user).put([SPECIALIZED, BY_POINTER, DESCRIBED])
    assert "config    warp_specialized" in explained("--pass", "fwd")
    assert "lead      1.200 times as fast as the portable winner" in explained("--pass", "fwd")
    assert "TMA can" in explained("--pass", "fwd", "--unaligned"), "copied, so that the fastest serves"
    unaligned = explained("--pass", "fwd", "--unaligned", "--heads", 1, "--seqlen", 16, "--seqlen-k", 4096)
    assert "config    pointer" in unaligned
    assert "refused   warp_specialized" in unaligned and "not multiples of 16 bytes" in unaligned
    problem = Problem("bf16", 4, 16, 16, 4096, 4096, 128, 128, CAUSAL)
    assert choosing.choose(problem, "fwd", H200).config == DEFAULT
    assert choosing.choose(problem, "fwd", H200, kind=PORTABLE_ROWS).config["LOADS"] == DESCRIPTOR
    assert serving.served_by(problem, H200, backward=False) == {"fwd": "warp_specialized (1.20 x portable)"}


def test_a_constraint_of_its_own_sends_it_to_the_portable_winner(user: Path) -> None:
    broken = {**DEFAULT, "GROUPS": 3}
    Store(user).put([row(implementation=WARP_SPECIALIZED, config=broken, time_us=500.0), DESCRIBED])
    said = explained("--pass", "fwd")
    assert "config    descriptor" in said and "64 a group" in said


@pytest.mark.parametrize(("name", "value"), [("GROUPS", 7), ("GROUPS", "2"), ("GROUPS", True), ("BLOCK_M", 0)])
def test_values_that_no_space_has_are_refused(user: Path, name: str, value: object) -> None:
    Store(user).put([row(implementation=WARP_SPECIALIZED, config={**DEFAULT, name: value}, time_us=1.0), BY_POINTER])
    said = explained("--pass", "fwd")
    assert "config    pointer" in said and f"its config has {name}" in said


def bwd_rows(*, with_kernels: bool) -> list:
    key = {"kernel": "bwd"}
    implementations = dict.fromkeys(("bwd_dq", "bwd_dkdv"), WARP_SPECIALIZED)
    rows = [
        row(
            key,
            strategy="split",
            implementation="portable",
            config=dict.fromkeys(implementations, DESCRIPTOR),
            time_us=900.0,
        ),
        row(key, strategy="split", implementation="warp_specialized", config=implementations, time_us=700.0),
        row(
            key,
            strategy="fused",
            implementation="warp_specialized",
            config={"bwd_fused": WARP_SPECIALIZED},
            time_us=600.0,
        ),
    ]
    for kernel in ("bwd_dq", "bwd_dkdv", "bwd_fused") if with_kernels else ():
        rows.append(row({"kernel": kernel}, implementation=WARP_SPECIALIZED, config=DEFAULT, time_us=300.0))
        values = dict(portable_of(kernel).space.default(SPEC, 90))
        rows.append(row({"kernel": kernel}, implementation=values["LOADS"], config=values, time_us=200.0))
    return rows


PROBLEM = Problem("bf16", 4, 16, 16, 4096, 4096, 128, 128, CAUSAL)


def test_the_strategy_is_the_row_s_and_so_are_its_kernels(user: Path) -> None:
    Store(user).put(bwd_rows(with_kernels=True))
    assert choosing.strategy_of(PROBLEM, H200, False) == ("fused", {"bwd_fused": WARP_SPECIALIZED_ROWS})
    # a portable row is faster by itself; the whole backward was measured with the other
    assert choosing.choose(PROBLEM, "bwd_fused", H200, WARP_SPECIALIZED_ROWS).config == DEFAULT
    strategy, kinds = choosing.strategy_of(PROBLEM, H200, True)
    assert strategy == "split" and kinds == dict.fromkeys(("bwd_dq", "bwd_dkdv"), WARP_SPECIALIZED_ROWS)
    said = explained("--pass", "bwd", "--deterministic")
    assert "config    split warp_specialized" in said and "refused   fused warp_specialized" in said
    assert said.count("config    warp_specialized") == 2


def test_a_strategy_whose_kernels_cannot_serve_gives_way(user: Path) -> None:
    Store(user).put(bwd_rows(with_kernels=True))
    unaligned = Problem(**{**{f: getattr(PROBLEM, f) for f in PROBLEM.__slots__}, "aligned": False, "tma": False})
    strategy, kinds = choosing.strategy_of(unaligned, H200, False)
    assert strategy == "split" and kinds == dict.fromkeys(("bwd_dq", "bwd_dkdv"), PORTABLE_ROWS)
    said = explained("--pass", "bwd", "--unaligned", "--heads", 1, "--seqlen", 16, "--seqlen-k", 4096)
    assert "no row of its warp-specialised bwd_fused can serve this problem" in said
    Store(user).put(bwd_rows(with_kernels=False))
    dispatch.reload()


def test_strategies_of_a_later_release_are_refused(user: Path) -> None:
    Store(user).put([row({"kernel": "bwd"}, strategy="teleported", implementation="portable", config={}, time_us=1.0)])
    assert choosing.strategy_of(PROBLEM, H200, False) == ("split", {})


def test_what_does_not_load_gives_way_to_the_portable_winner(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(user).put([SPECIALIZED, BY_POINTER, DESCRIBED])
    tried = []

    def make(choices):
        tried.append(dict(choices["fwd"].config))
        if implementation_of(choices["fwd"].config) == WARP_SPECIALIZED:
            raise CompileError("no such instruction")
        return choices

    chooser = choosing.Chooser(PROBLEM, H200)
    assert dispatch._plan(chooser, {"fwd": chooser.choose("fwd")}, make)["fwd"].config["LOADS"] == DESCRIPTOR
    assert [implementation_of(config) for config in tried] == [WARP_SPECIALIZED, DESCRIPTOR]
    assert json.dumps(tried[0], sort_keys=True) == json.dumps(DEFAULT, sort_keys=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"implementation": DESCRIPTOR, "config": CONFIG},
        {"implementation": POINTER, "config": DEFAULT},
        {"implementation": WARP_SPECIALIZED, "config": CONFIG},
        {"strategy": "fused", "implementation": WARP_SPECIALIZED, "config": {"bwd_fused": POINTER}},
        {"strategy": "fused", "implementation": PORTABLE, "config": {"bwd_fused": WARP_SPECIALIZED}},
    ],
)
def test_a_row_filed_as_what_its_config_is_not_is_refused(changes: dict) -> None:
    filed = row({"kernel": BACKWARD} if "strategy" in changes else {}, **changes)
    chooser = choosing.Chooser(PROBLEM, H200, [], lookup.Toolchain())
    why = chooser.strategy_refusal(filed, False) if "strategy" in changes else chooser.fitted(filed).refused
    assert why is not None and why.startswith(f"it is filed as {filed.filed_as}")


def test_fp32_has_no_such_row(user: Path) -> None:
    Store(user).put([SPECIALIZED])
    problem = Problem("fp32", 4, 16, 16, 4096, 4096, 128, 128, CAUSAL)
    assert implementation_of(choosing.choose(problem, "fwd", H200).config) == POINTER
