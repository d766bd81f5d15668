"""SASS counting on a written listing, trip counts against the mask itself, and how predictions must move."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
from benchmark_scripts import script

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, registry, sass
from fa2tune.compiling.compiler import Binary
from fa2tune.predicting import model, prior, tiles
from fa2tune.spec.key import TuningKey
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem, Specialization

H200 = gpus.named("h200")

# An outer loop (.L_x_0) around an inner one (.L_x_1) with products; cold code behind EXIT spins on a barrier and jumps back.
LISTING = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0030*/              @!P1 BRA `(.L_x_3) ;
.L_x_2:
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, R112, gdesc[UR12].tnspB, R88 ;
        /*0060*/                   MUFU.EX2 R5, R5 ;
        /*0070*/                   FFMA R5, R5, R6, R7 ;
        /*0080*/                   ISETP.GE.AND P0, PT, R2, R9, PT ;
        /*0090*/                   FSEL R5, R5, -INF , P0 ;
        /*00a0*/                   LDS.128 R12, [R13] ;
        /*00b0*/                   LDSM.16.M88.4 R12, [R13] ;
        /*00c0*/                   STL.64 [R1+0x8], R20 ;
        /*00d0*/                   LDGSTS.E.BYPASS.LTC128B.128 [R11], desc[UR6][R8.64] ;
        /*00e0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00f0*/               @P0 BRA `(.L_x_1) ;
        /*0100*/               @P2 BRA `(.L_x_0) ;
        /*0110*/                   EXIT ;
.L_x_3:
        /*0120*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0130*/              @!P1 BRA `(.L_x_3) ;
        /*0140*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*0150*/                   BRA `(.L_x_4);
"""


def test_sass_of_the_innermost_loop() -> None:
    (loop,) = sass.loops(LISTING)
    assert loop.mma == "HGMMA"
    assert loop.tensor_flops == 2 * 64 * (128 + 64) * 16 / 4
    assert (loop.mufu, loop.fp32, loop.ffma, loop.compares, loop.copies) == (1, 1, 1, 2, 1)
    # the first product reads A and B, the second B alone; LDS, LDSM and the copy's write move 16 bytes a thread
    assert loop.shared_bytes == 2 * 16 * (64 + 128 + 64) / 4 + 3 * 512
    assert loop.local_bytes == 256
    assert loop.barriers == 2  # BAR and SYNCS; the spin in the cold code is rare
    assert (loop.products, loop.meetings, loop.arrivals, loop.shuffles) == (2, 1, 1, 0)
    assert loop.product_bytes == 2 * 16 * (64 + 128 + 64) / 4


def test_sass_phases_end_where_products_are_waited_for() -> None:
    waited = LISTING.replace("        /*0060*/", "        /*0054*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n        /*0060*/")
    (loop,) = sass.loops(waited)
    first, second, after = (dict(zip(sass.PHASE, phase, strict=True)) for phase in loop.phases)
    assert (first["pending"], second["pending"], after["pending"]) == (
        -1,
        -1,
        1,
    )  # "gsb" ends the first group of products
    assert (first["tensor_flops"], second["tensor_flops"]) == (2 * 64 * 128 * 16 / 4, 2 * 64 * 64 * 16 / 4)
    assert (after["mufu"], after["fp32"], after["local_bytes"], after["tensor_flops"]) == (1, 1, 256, 0)
    assert sum(phase[sass.PHASE.index("issue")] for phase in loop.phases) == loop.issue
    assert (
        sass.loops(LISTING.replace("HGMMA.64x128x16", "HMMA.16816").replace("HGMMA.64x64x16", "HMMA.16816"))[0].phases
        == ()
    )


def test_sass_of_a_mask_behind_a_branch() -> None:
    masked = LISTING.replace(
        "        /*0060*/",
        "        /*0054*/ @P3 BRA `(.L_x_9) ;\n        /*0058*/ "
        + 4 * "FSEL R5, R5, -INF , P0 ;\n /*0059*/ "
        + "NOP ;\n.L_x_9:\n        /*0060*/",
    )
    plain, whole = sass.loops(masked)
    assert (plain.compares, whole.compares) == (2, 6)
    assert plain.tensor_flops == whole.tensor_flops
    guarded = masked.replace("NOP ;\n.L_x_9", "REDG.E.ADD.F32 [R2], R5 ;\n.L_x_9")
    (loop,) = sass.loops(guarded)
    assert loop.atomics == 1


def test_sass_of_mma_sync_and_of_plain_fma() -> None:
    body = "\n.L_1:\n /*0000*/ {} ;\n /*0010*/ @P0 BRA `(.L_1) ;\n /*0020*/ EXIT ;\n"
    assert sass.loops(body.format("HMMA.16816.F32.BF16 R4, R8, R12, R4"))[0].tensor_flops == 4096
    assert sass.loops(body.format("HMMA.1688.F32.TF32 R4, R8, R12, R4"))[0].tensor_flops == 2048
    assert sass.loops(body.format("FFMA R4, R8, R12, R4"))[0].ffma == 1
    assert sass.loops(body.format("MOV R4, R8")) == ()


def test_sass_of_roles_behind_a_jump_table() -> None:
    """Each role's loop is found, whichever of them the listing has first, and no loop around several of them."""
    loop = ".L_{0}:\n /*0000*/ {1} ;\n /*0010*/ @P0 BRA `(.L_{0}) ;\n /*0020*/ BRA `(.L_9) ;\n"
    role = ".L_1{0}:\n /*0000*/ MOV R1, R2 ;\n" + loop
    product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
    roles = [role.format(1, product), role.format(2, product), role.format(3, "LDS.128 R12, [R13]")]
    head = "\n.L_9:\n /*0000*/ LDS.U8 R2, [R3] ;\n /*0010*/ BRX R2 -0x20 ;\n"
    for listed in permutations((*roles, ".L_10:\n /*0000*/ EXIT ;\n")):
        assert [(one.products, one.issue) for one in sass.loops(head + "".join(listed))] == [(1, 2), (1, 2)]


MASKS = (FULL, CAUSAL, Mask("causal_top_left"), band(20, 0), band(7, 30), band(None, 5), band(9, None), band(0, 0),
         Mask("chunked", 32), Mask("chunked", 21))  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("sq", "sk"), [(64, 64), (50, 50), (33, 90), (90, 33), (1, 70), (70, 1), (130, 130)])
@pytest.mark.parametrize(("m", "n"), [(16, 32), (32, 16)])
def test_trips_are_those_that_the_mask_leaves(sq: int, sk: int, mask: Mask, m: int, n: int) -> None:
    """Counted pair by pair. Of a last tile that is not whole it depends on the mask what its rows behind the end visit."""
    p = Problem("bf16", 1, 2, 1, sq, sk, 64, 64, mask)
    rows, columns = -(-sq // m) * m, -(-sk // n) * n
    i, j = np.arange(rows)[:, None], np.arange(columns)
    every = np.broadcast_to(mask.visible(i, j, sq, sk), (rows, columns)) & (j < sk)

    def blocks(seen: np.ndarray) -> np.ndarray:
        return seen.reshape(rows // m, m, columns // n, n)

    real, whole = blocks(every & (i < sq)).any((1, 3)), blocks(every).all((1, 3))
    for nth, (plain, masked) in enumerate(tiles.of_queries(p, m, n)):
        some = blocks(every).any((1, 3))[nth].sum()
        if (nth + 1) * m <= sq:
            assert (plain, plain + masked) == (whole[nth].sum(), some)
        assert plain >= 0 and real[nth].sum() <= plain + masked <= some
    # queries behind the last are zero, so they need no mask; keys of a tile that is not whole are all masked
    whole = blocks(every | (i >= sq)).all((1, 3)) & real
    for nth, (plain, masked) in enumerate(tiles.of_keys(p, m, n)):
        some = blocks(every).any((1, 3))[:, nth].sum()
        assert p.group * real[:, nth].sum() <= plain + masked <= p.group * some
        assert p.group * (whole[:, nth].sum() - 1) <= plain <= p.group * whole[:, nth].sum()
        assert plain == p.group * whole[:, nth].sum() or sq % m


def test_a_window_takes_the_share_of_its_tiles() -> None:
    """Of 16k tokens, measured on an H200 (benchmarks/calls/windows.json): 0.17 to 0.18 of causal in the portable forward."""
    variant, gpu = registry.variant_named("portable/fwd"), gpus.named("h200")
    config = {"BLOCK_M": 128, "BLOCK_N": 64, "LOADS": "descriptor", "MASKED": "last", "HEADS_PER_WAVE": 4,
              "num_warps": 8, "num_stages": 2, "maxnreg": 0}  # fmt: skip

    def time(mask: Mask) -> float:
        p = Problem("bf16", 1, 16, 16, 16384, 16384, 128, 128, mask)
        return prior.estimates(variant, p.specialization, [config], gpu, p)[0]

    assert 0.12 < time(band(1023, 0)) / time(CAUSAL) < 0.2
    assert time(Mask("causal_top_left")) == time(CAUSAL)
    assert time(Mask("chunked", 4096)) < 0.4 * time(CAUSAL)  # a fourth of the pairs
    assert time(Mask("chunked", 4096)) > 0.25 * time(CAUSAL)


LOOP = sass.Loop(
    tensor_flops=2.0 * 128 * 64 * 256 / 8, mma="HGMMA", mufu=34, fp32=136, alu=60, compares=20, issue=320, shared_bytes=9000,
    copies=8, barriers=2,
)  # fmt: skip
CONFIG = {"BLOCK_M": 128, "BLOCK_N": 64, "HEADS_PER_WAVE": 4, "num_stages": 3}


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[sass.Loop, ...]]:
    """What the disassembler is made to say: cubin path -> loops."""
    known = {"": (replace(LOOP, compares=60, alu=120, issue=420), LOOP)}
    monkeypatch.setattr(sass, "counts", known.__getitem__)
    return known


def seconds(gpu: gpus.Gpu = H200, problem: dict[str, Any] | None = None, **binary: Any) -> float:
    p = Problem("bf16", 2, 16, 16, 8192, 8192, 128, 128, mask=FULL)
    whole = Binary("portable/fwd", Specialization("bf16", 128, 128, "full"), CONFIG, gpu.arch, 98304, 8, 168, 0, "")
    return model.predict(replace(whole, **binary), replace(p, **(problem or {})), gpu)


@pytest.mark.usefixtures("loops")
def test_predictions_scale_with_the_work() -> None:
    base = seconds()
    assert 0.5e-3 < base < 4.4e-3  # 1.1 PFLOP: between peak and a quarter of it
    assert seconds(problem={"batch": 4}) == pytest.approx(2 * base, rel=0.1)
    assert seconds(problem={"seqlen_q": 16384, "seqlen_k": 16384}) == pytest.approx(4 * base, rel=0.1)
    assert seconds(problem={"mask": CAUSAL}) == pytest.approx(base / 2, rel=0.2)
    assert seconds(problem={"batch": 0}) == 0.0


@pytest.mark.usefixtures("loops")
def test_predictions_follow_the_gpu() -> None:
    assert seconds(gpus.named("h100-pcie")) > seconds()
    assert seconds(gpus.named("h200@66sm")) == pytest.approx(2 * seconds(), rel=0.1)


def test_predictions_follow_the_machine_code(loops: dict[str, tuple[sass.Loop, ...]]) -> None:
    base = seconds()
    loops["spills"] = tuple(replace(loop, local_bytes=20_000) for loop in loops[""])
    loops["half"] = tuple(replace(loop, tensor_flops=loop.tensor_flops / 2) for loop in loops[""])
    assert seconds(cubin_path="spills") > base
    assert seconds(config={**CONFIG, "num_stages": 1}) > base  # nothing is asked for ahead
    assert seconds(cubin_path="half") < base
    assert seconds(shared_bytes=200_000, num_warps=4) > seconds(shared_bytes=100_000, num_warps=4)  # occupancy


@pytest.mark.usefixtures("loops")
def test_causal_tail_depends_on_the_order_of_heads() -> None:
    together = seconds(problem={"mask": CAUSAL, "batch": 1}, config={**CONFIG, "HEADS_PER_WAVE": 16})
    apart = seconds(problem={"mask": CAUSAL, "batch": 1}, config={**CONFIG, "HEADS_PER_WAVE": 1})
    assert together < apart


@pytest.mark.usefixtures("loops")
def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit on rtx-4090"):
        seconds(gpus.named("rtx-4090"), shared_bytes=110_000)


@pytest.mark.usefixtures("loops")
def test_explain_names_the_pipes() -> None:
    p = Problem("bf16", 2, 16, 16, 8192, 8192, 128, 128, mask=FULL)
    whole = Binary("portable/fwd", Specialization("bf16", 128, 128, "full"), CONFIG, 90, 98304, 8, 168, 0, "")
    parts = model.explain(whole, p, H200)
    assert set(parts.pipes) == {"tensor", "mufu", "fp32", "alu", "issue", "shared", "l2"}
    assert max(parts.pipes.values()) <= parts.trip_cycles
    assert parts.hbm_seconds < parts.seconds


def test_figures_of_quality() -> None:
    module = script("model_fit")
    assert module.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert module.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(module.spearman([1, 2, 3], [5, 5, 5]))
    figures = module.quality([10, 11, 12, 20], [2, 1, 3, 4])
    assert figures["regret_1"] == pytest.approx(0.1)
    assert figures["regret_5"] == 0


@pytest.fixture(scope="module")
def guessed() -> dict[str, Any]:
    """Keys of which nothing is known but what prior.py guesses: kernel -> Measured, its times still to be made up."""
    found = {}
    fit = script("model_fit")
    for kernel in ("fwd", "bwd_dkdv"):
        key = TuningKey("h200", 132, 90, kernel, "bf16", "ieee", 128, 128, "causal", 1024)
        variant, spec, problem = registry.portable_of(kernel), key.specialization(), key.workload()
        configs = [c for c in variant.space.points() if limits.before_compile(variant, spec, c, H200) is None][::7]
        guess = prior.Guess(variant, spec, configs, H200)
        sides = [(config["BLOCK_M"], config["BLOCK_N"]) for config in configs]
        tilings = model.side_by_side([tiles.tiling(guess.owns_queries, problem, m, n) for m, n in sides])
        found[kernel] = fit.Measured(key, H200, tuple(configs), guess.candidates(), tilings, np.ones(len(configs)))
    return found


def test_a_fit_finds_the_constants_that_made_the_times(guessed: dict[str, Any]) -> None:
    fit = script("model_fit")
    true = replace(model.CALIBRATION, clock=0.7, load=1000.0, pace=1.8, in_step=0.4, barrier=60.0)
    noise = np.random.default_rng(0)
    data = []
    for one in guessed.values():
        times = one.predicted_us(true) * np.exp(noise.normal(0, 0.02, len(one.configs)))
        data.append(replace(one, times_us=times))
    blind = fit.fit(data[:1])  # has seen the forward alone
    figures = fit.quality(data[1].times_us, data[1].predicted_us(blind))
    assert figures["spearman"] > 0.97
    assert figures["spearman_best"] > 0.8
    assert figures["regret_5"] < 0.05
    assert figures["level"] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv"])
def test_what_was_measured_is_ranked_as_asked(kernel: str) -> None:
    """The bars of benchmarks/model_quality.py, which also judges every key by constants fitted without it."""
    path = Path(__file__).parents[2] / "benchmarks" / "tables" / f"h200_{kernel}_bf16_256_causal_4096.jsonl.gz"
    data = script("model_fit").measured(script("tables").load(path))
    figures = script("model_fit").quality(data.times_us, data.predicted_us(model.CALIBRATION))
    assert figures["spearman"] > 0.8
    assert figures["spearman_best"] > 0.5
    assert figures["regret_5"] < 0.05
    variant, spec = registry.portable_of(kernel), data.key.specialization()
    guessed = np.array(prior.estimates(variant, spec, data.configs, H200, data.key.workload()))
    assert script("model_fit").spearman(data.times_us, guessed) > 0.7
    good = data.times_us < 1.05 * data.times_us.min()
    assert (guessed[good] < 2 * guessed.min()).all()  # what is guessed to take longer need not be compiled


def test_samples_of_sm80_code_can_be_checked_again() -> None:
    sm80 = script("sm80_times")
    key = sm80.key_of("fwd", 64)
    configs = sm80.chosen(key, 4, seed=0)
    assert configs[0] == registry.portable_of("fwd").space.default(key.specialization(), 80)
    entries = []
    for number, config in enumerate(configs):
        loop = replace(LOOP, mma="HMMA", tensor_flops=LOOP.tensor_flops * (number + 1), phases=())
        facts = {"registers": 128, "stack": 0, "shared_bytes": 49152, "loops": [list(astuple(loop))]}
        trips = config["BLOCK_M"] * config["BLOCK_N"]
        entries.append({"kernel": "fwd", "head_dim": 64, "config": config, "time_us": 100.0 * (number + 1) / trips,
                        "here": facts, "there": facts})  # fmt: skip
    found = sm80.figures({"gpu": "h200", "target": "a100", "loop_fields": sm80.LOOP_FIELDS, "entries": entries})
    assert set(found) == {"fwd 64"}
    assert found["fwd 64"]["n"] == 5
    assert found["fwd 64"]["spearman"] > 0.6  # more products, smaller tiles: longer
    assert -1 <= found["fwd 64"]["spearman_target"] <= 1


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv", "bwd_dq", "bwd_fused"])
@pytest.mark.parametrize("gpu", ["h200", "a100", "rtx-4090"])
def test_every_legal_config_can_be_estimated(kernel: str, gpu: str) -> None:
    target = gpus.named(gpu)
    for dtype, precision in (("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32")):
        key = TuningKey(
            target.name, target.sm_count, target.arch, kernel, dtype, precision, 128, 128, "causal", 4096
        )  # fmt: skip
        variant, spec, problem = registry.portable_of(kernel), key.specialization(), key.workload()
        configs = [c for c in variant.space.points() if limits.before_compile(variant, spec, c, target) is None]
        times = prior.estimates(variant, spec, configs, target, problem)
        fastest = problem.flops(kernel) / (target.peak(dtype, precision) * 1e6)
        assert all(fastest < time_us < 1000 * fastest for time_us in times)
        assert prior.estimate(variant, spec, configs[-1], target, problem) == pytest.approx(times[-1], rel=1e-6)


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="what Triton 3.6 makes of a config")
def test_a_guess_is_near_what_the_compiler_makes_of_it() -> None:
    spec = Specialization("bf16", 64, 64, mask="full")
    problem = Problem("bf16", 4, 32, 32, 4096, 4096, 64, 64, mask=FULL)
    variant = registry.portable_of("fwd")
    for config in (
        variant.space.default(spec, 90),
        {**variant.space.default(spec, 90), "BLOCK_M": 128, "num_warps": 8},
    ):
        binary = compiler.build(variant, spec, config, 90)
        guess = prior.Guess(variant, spec, [config], H200)
        loop = model.plain_and_masked(sass.counts(binary.cubin_path))[0]
        assert guess.shared_bytes()[0, 0] == pytest.approx(binary.shared_bytes, rel=0.05)
        assert guess.registers()[0][0, 0] == pytest.approx(binary.registers, rel=0.25)
        counts = guess.candidates().counts
        assert counts["tensor_flops"][0, 0] == loop.tensor_flops
        assert counts["product_bytes"][0, 0] == loop.product_bytes
        assert counts["mufu"][0, 0] == loop.mufu
        assert counts["issue"][0, 0] == pytest.approx(loop.issue, rel=0.3)
        compiled = model.predict(binary, problem, H200) * 1e6
        assert prior.estimate(variant, spec, config, H200, problem) == pytest.approx(compiled, rel=0.2)
