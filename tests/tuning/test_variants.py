"""Several variants of a kernel: searched apart, selected in one race, looked up by what can serve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_rows import CONFIG, row
from click.testing import CliRunner
from test_tuner import HERE, SPEC, Bench
from tuner_fakes import true_time
from variant_fakes import DEFAULT

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch, serving
from fa2tune.cli.explain import explain
from fa2tune.compiling import fingerprint, limits, registry
from fa2tune.compiling.compiler import CompileError
from fa2tune.compiling.registry import portable_of, variant_named, variant_of
from fa2tune.report import sources
from fa2tune.rows import lookup, reader
from fa2tune.rows.row import PREDICTED, backward_implementation, over_portable
from fa2tune.rows.store import Store
from fa2tune.spec.mask import CAUSAL, ROW_MASKS
from fa2tune.spec.problem import BACKWARD, KERNELS, STRATEGIES, Problem
from fa2tune.spec.variant import DESCRIPTOR, POINTER, PORTABLE, WARP_SPECIALIZED, implementation_of
from fa2tune.tuning.request.plan import Target
from fa2tune.tuning.search import space
from fa2tune.tuning.search.candidates import Legal
from fa2tune.tuning.select.final import Final

pytestmark = pytest.mark.usefixtures("specialized_fakes", "quick_starts")
H200 = gpus.named("h200")


# ---- which variant a config is of


def test_a_config_tells_its_variant() -> None:
    assert implementation_of(CONFIG) == POINTER and variant_of("fwd", CONFIG).name == "portable/fwd"
    assert implementation_of(DEFAULT) == WARP_SPECIALIZED and variant_of("fwd", DEFAULT).name == "sm90/fwd"
    assert [v.name for v in registry.variants_of("bwd_dq")] == ["portable/bwd_dq", "sm90/bwd_dq"]
    assert list(registry.implementations("fwd")) == [POINTER, DESCRIPTOR, WARP_SPECIALIZED]
    with pytest.raises(ValueError, match="known are pointer, descriptor, warp_specialized"):
        variant_of("fwd", {"LOADS": "by mail"})


def test_two_variants_of_one_implementation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = {**registry.variants(), "again": variant_named("sm90/fwd"), "more": SimpleNamespace(
        name="more", serves="fwd", portable=False, implementations=(WARP_SPECIALIZED,))}  # fmt: skip
    monkeypatch.setattr(registry, "variants", lambda: twice)
    registry.implementations.cache_clear()
    with pytest.raises(ValueError, match="sm90/fwd and more are both warp_specialized"):
        registry.implementations("fwd")


def test_other_architectures_are_refused() -> None:
    variant = variant_named("sm90/fwd")
    assert limits.before_compile(variant, SPEC, DEFAULT, H200) is None
    for gpu in ("a100", "b200"):
        refused = limits.before_compile(variant, SPEC, DEFAULT, gpus.named(gpu))
        assert refused is not None and refused.name == "architecture" and "exactly 9.0" in refused.why


def test_portable_rows_stay_fresh_whatever_the_others_are() -> None:
    hashes = fingerprint.kernel_hashes()
    filed = {f"{strategy} {backward_implementation(special)}" for strategy in STRATEGIES for special in (False, True)}
    assert set(hashes) >= {
        f"{name} {mask}"
        for name in (
            *KERNELS,
            *(f"{kernel} {WARP_SPECIALIZED}" for kernel in KERNELS),
            *(f"bwd {variant}" for variant in filed),
        )
        for mask in ROW_MASKS
    }
    assert len({hashes[f"bwd {variant} full"] for variant in filed}) == len(filed)


# ---- the tuner


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_a_whole_backward_is_held_against_the_portable_one_by_their_lead_over_the_default() -> None:
    """Each may have been timed at another clock."""
    portable = row({"kernel": BACKWARD}, strategy="split", implementation="portable", time_us=400.0, gain=1.1)
    default = row({"kernel": BACKWARD}, strategy="fused", implementation="portable", time_us=380.0, gain=None)
    later = row({"kernel": BACKWARD}, strategy="fused", implementation="warp_specialized", time_us=390.0, gain=1.65)
    assert over_portable(later, [portable, default, later]) == pytest.approx(1.5)
    assert over_portable(later, [default, later]) == pytest.approx(380 / 390)


def test_all_implementations_race_together_and_each_keeps_a_row_where_it_beats_the_default(bench: Bench) -> None:
    report = bench.tune(HERE, trials=20)
    rows = {(r.key.bucket, r.implementation): r for r in report.rows}
    assert set(rows) == {
        (512, POINTER),
        (512, DESCRIPTOR),
        *((4096, implementation) for implementation in (POINTER, DESCRIPTOR, WARP_SPECIALIZED)),
    }
    best = rows[4096, WARP_SPECIALIZED]
    assert best.config == {"BLOCK_M": 128, "BLOCK_N": best.config["BLOCK_N"], "GROUPS": 2, "STAGES": 3, "HEADS_PER_WAVE": 16,
                           "num_warps": 4}  # fmt: skip
    default = portable_of("fwd").space.default(SPEC, 90)
    assert best.gain == pytest.approx(true_time(default, 4096) / true_time(best.config, 4096))
    assert best.kernel_hash == fingerprint.kernel_hashes()["fwd warp_specialized causal"]
    assert best.space_hash != rows[4096, POINTER].space_hash
    portable = min(rows[4096, implementation].time_us for implementation in (POINTER, DESCRIPTOR))
    assert over_portable(best, report.rows) == pytest.approx(portable / best.time_us)
    assert over_portable(rows[4096, POINTER], report.rows) is None
    assert any("x portable" in line and "warp_specialized" in line for line in bench.lines)
    # one race of all of them, the portable default first
    proofs = [contenders for _, bucket, contenders in bench.did("proof") if bucket == 4096]
    assert len(proofs) == 1 and proofs[0][0] == dict(default)
    assert {implementation_of(config) for config in proofs[0]} == {POINTER, DESCRIPTOR, WARP_SPECIALIZED}
    # heats are of one variant
    for _, _, contenders in bench.did("screen"):
        assert len({implementation_of(config) == WARP_SPECIALIZED for config in contenders}) == 1

    found = sources.gather(bench.folder / "cache.sqlite", None)
    assert {(search.searched, search.key.bucket) for search in found.searches} == {
        (name, bucket) for name in ("fwd", "sm90/fwd") for bucket in (512, 4096)
    }
    assert all(t.predicted_us is None for s in found.searches if s.variant for t in s.trials)

    bench.forget()
    again = bench.tune(HERE, trials=20)
    assert not bench.log.exists() and sorted(again.rows, key=repr) == sorted(report.rows, key=repr)


def test_portable_variants_may_get_fewer_trials(bench: Bench) -> None:
    bench.tune(HERE, trials=9, portable_trials=3, buckets=(4096,))
    compiled = [implementation_of(config) == WARP_SPECIALIZED for *_, config in bench.did("compile")]
    assert compiled.count(False) == 3 and compiled.count(True) == 9
    with pytest.raises(ValueError, match="portable-trials: got 0"):
        bench.tune(HERE, portable_trials=0)


def test_a_wrong_variant_costs_the_others_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    default, real = portable_of("fwd").space.default(SPEC, 90), space.legal
    few = {
        "BLOCK_M": 128,
        "num_warps": 8,
        "num_stages": 3,
        "maxnreg": 0,
        "HEADS_PER_WAVE": 16,
        "MASKED": default["MASKED"],
    }

    def fewer(variant: Any, *asked: Any) -> Legal:
        """So few portable ones that both runs try each: which of many they come to depends on what is timed by then."""
        found = real(variant, *asked)
        if not variant.portable:
            return found
        some = (c for c in found.configs if few.items() <= c.items() and c["BLOCK_N"] in (32, 64))
        return replace(found, configs=(default, *some))

    monkeypatch.setattr(space, "legal", fewer)
    clean = bench.tune(HERE, trials=8, buckets=(4096,))
    assert len([c for c in bench.tried() if "LOADS" in c]) == 5
    monkeypatch.setenv("FA2TUNE_FAKE_POISON", "specialized")
    bench.folder = bench.folder / "poisoned"
    bench.folder.mkdir()
    report = bench.tune(HERE, trials=8, buckets=(4096,))
    assert {r.filed_as for r in clean.rows} == {r.filed_as for r in report.rows} | {WARP_SPECIALIZED}
    assert {r.filed_as: r.config for r in report.rows}.items() <= {r.filed_as: r.config for r in clean.rows}.items()
    assert report.statuses["wrong_result"] or report.statuses["failed"]


def test_they_are_predicted_as_the_portable_ones_are(bench: Bench) -> None:
    report = bench.tune(Target(H200, PREDICTED, None), pass_="both", trials=4, buckets=(4096,))
    for kernel in KERNELS:
        assert WARP_SPECIALIZED in {r.filed_as for r in report.rows if r.key.kernel == kernel}
    whole = {r.filed_as: r for r in report.rows if r.key.kernel == BACKWARD}
    assert {"split portable", f"split {WARP_SPECIALIZED}"} <= set(whole)
    special = whole[f"split {WARP_SPECIALIZED}"]
    assert special.kernel_hash == fingerprint.backward_hash("split", WARP_SPECIALIZED, SPEC.mask)
    assert WARP_SPECIALIZED in special.config.values()
    assert {one for name in ("split portable", "fused portable") for one in whole[name].config.values()} <= {
        POINTER, DESCRIPTOR
    }  # fmt: skip
    assert whole[f"fused {WARP_SPECIALIZED}"].barred


def test_whole_backwards_with_and_without_them(bench: Bench) -> None:
    report = bench.tune(HERE, pass_="bwd", trials=6, buckets=(4096,))
    whole = {r.filed_as: r for r in report.rows if r.key.kernel == "bwd"}
    assert set(whole) == {f"{strategy} {kind}" for strategy in STRATEGIES for kind in (PORTABLE, WARP_SPECIALIZED)}
    split, special = whole["split portable"], whole["split warp_specialized"]
    assert set(split.config.values()) <= {POINTER, DESCRIPTOR}
    assert special.config == dict.fromkeys(("bwd_dq", "bwd_dkdv"), WARP_SPECIALIZED)
    assert special.time_us < split.time_us
    assert {r.strategy for r in whole.values()} == {"split", "fused"}
    assert split.kernel_hash != special.kernel_hash
    races = [contenders for kernel, _, contenders in bench.did("proof") if kernel == "bwd"]
    assert len(races) == 1 and len(races[0]) == 5


# ---- the lookup


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
    assert choosing.choose(problem, "fwd", H200, kind=False).config["LOADS"] == DESCRIPTOR
    assert serving.served_by(problem, H200, backward=False) == {"fwd": "warp_specialized (1.20 x portable)"}


def test_a_constraint_of_its_own_sends_it_to_the_portable_winner(user: Path) -> None:
    broken = {**DEFAULT, "GROUPS": 3}
    Store(user).put([row(implementation=WARP_SPECIALIZED, config=broken, time_us=500.0), DESCRIBED])
    said = explained("--pass", "fwd")
    assert "config    descriptor" in said and "64 rows a group" in said


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
    assert choosing.strategy_of(PROBLEM, H200, False) == ("fused", {"bwd_fused": True})
    # a portable row is faster by itself; the whole backward was measured with the other
    assert choosing.choose(PROBLEM, "bwd_fused", H200, True).config == DEFAULT
    strategy, kinds = choosing.strategy_of(PROBLEM, H200, True)
    assert strategy == "split" and kinds == {"bwd_dq": True, "bwd_dkdv": True}
    said = explained("--pass", "bwd", "--deterministic")
    assert "config    split warp_specialized" in said and "refused   fused warp_specialized" in said
    assert said.count("config    warp_specialized") == 2


def test_a_strategy_whose_kernels_cannot_serve_gives_way(user: Path) -> None:
    Store(user).put(bwd_rows(with_kernels=True))
    unaligned = Problem(**{**{f: getattr(PROBLEM, f) for f in PROBLEM.__slots__}, "aligned": False, "tma": False})
    strategy, kinds = choosing.strategy_of(unaligned, H200, False)
    assert strategy == "split" and kinds == {"bwd_dq": False, "bwd_dkdv": False}
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


# ---- a kernel without portable configs


def test_finals_without_the_portable_variant(bench: Bench) -> None:
    def one(name: str, *implementations: str) -> SimpleNamespace:
        return SimpleNamespace(
            variant=variant_named(name),
            space=SimpleNamespace(implementations=lambda: implementations),
            default={"of": name},
            title=name,
        )

    portable, other = one("portable/fwd", POINTER, DESCRIPTOR), one("sm90/fwd", WARP_SPECIALIZED)
    key = SPECIALIZED.key
    both, alone = Final([other, portable], key, None), Final([other], key, None)
    assert both.portable is portable and both.default == {"of": "portable/fwd"}
    assert alone.portable is None and alone.default == {"of": "sm90/fwd"}
    assert "no legal config" in alone._rival_of(WARP_SPECIALIZED)


def test_a_kernel_without_legal_portable_configs_is_tuned_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = space.legal
    none = lambda variant, *asked: real(variant, *asked) if not variant.portable else Legal((), {"none": 1})  # noqa: E731
    monkeypatch.setattr(space, "legal", none)
    report = bench.tune(HERE, pass_="both", trials=4, buckets=(4096,))
    assert {r.key.kernel: r.filed_as for r in report.rows} == dict.fromkeys(KERNELS, WARP_SPECIALIZED)
    assert all(r.gain is None for r in report.rows)
    assert any("bwd_dq, bwd_dkdv has no legal portable config" in line for line in bench.lines)


def test_fp32_has_no_such_row(user: Path) -> None:
    Store(user).put([SPECIALIZED])
    problem = Problem("fp32", 4, 16, 16, 4096, 4096, 128, 128, CAUSAL)
    assert implementation_of(choosing.choose(problem, "fwd", H200).config) == POINTER
