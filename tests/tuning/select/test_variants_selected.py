"""Several variants of a kernel: searched apart, selected in one race."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cache_rows import row
from tuner_fakes import true_time
from tuner_runs import H200, HERE, SPEC, Bench
from variant_fakes import DEFAULT

from fa2tune.compiling import fingerprint
from fa2tune.compiling.registry import portable_of, variant_named
from fa2tune.report import sources
from fa2tune.rows.row import PREDICTED, over_portable
from fa2tune.spec.problem import BACKWARD, KERNELS, STRATEGIES
from fa2tune.spec.variant import DESCRIPTOR, POINTER, PORTABLE, WARP_SPECIALIZED, implementation_of
from fa2tune.tuning.request.plan import Target
from fa2tune.tuning.search import space
from fa2tune.tuning.search.candidates import Legal
from fa2tune.tuning.select.final import Final

pytestmark = pytest.mark.usefixtures("specialized_fakes", "quick_starts")


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
    (said,) = (line for line in bench.lines if "no row by" in line)
    assert said.startswith(f"fwd bf16 128 causal 4096: no row by {WARP_SPECIALIZED}: ") and said.endswith(
        "NaN in 3 of 9 elements"
    )


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


SPECIALIZED = row(implementation=WARP_SPECIALIZED, config=DEFAULT, time_us=500.0)


def test_finals_without_the_portable_variant(bench: Bench) -> None:
    def one(name: str, *implementations: str) -> SimpleNamespace:
        return SimpleNamespace(
            variant=variant_named(name),
            space=SimpleNamespace(implementations=lambda: implementations),
            default={"of": name},
            of_kernel=name,
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
