"""The kernels for GPUs without wgmma compile for their architectures with no GPU present, within the limits, to the
instructions they are made of. Their numerics need a GPU: tests/gpu/test_sm80.py."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from benchmark_scripts import script
from hopper_builds import TESTED

from fa2tune import gpus
from fa2tune.compiling import compiler, fingerprint, limits, registry, sass
from fa2tune.launching.image import Image
from fa2tune.rows.row import Row, hashed_as
from fa2tune.search_spaces.lib import ampere
from fa2tune.search_spaces.sm80 import bwd_fused, fwd
from fa2tune.spec.key import TuningKey
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Problem, Specialization
from fa2tune.tuning.request.plan import TuneRequest, make_plan
from fa2tune.tuning.run import open_jobs

FORWARD, BACKWARD = registry.variant_named("sm80/fwd"), registry.variant_named("sm80/bwd_fused")
ORDERED = registry.variant_named("sm80/bwd_ordered")
BOTH = pytest.mark.parametrize("variant", [FORWARD, BACKWARD], ids=["fwd", "bwd_fused"])
#: One GPU of each compute capability that these kernels are for.
SERVED = ("a100", "a10", "orin-agx-64gb", "l4", "rtx-4090", "rtx-5090", "rtx-pro-6000")


def spec_of(dim: int, mask: str = "full", **more: Any) -> Specialization:
    return replace(Specialization("bf16", dim, dim, mask), **more)


def refusal(variant: Any, gpu: str, spec: Specialization, **changes: Any) -> str:
    card = gpus.named(gpu)
    config = {**variant.space.default(spec, card.arch), **changes}
    found = limits.before_compile(variant, spec, config, card)
    return found.name if found else ""


def test_the_registry_finds_them_next_to_the_others() -> None:
    assert (
        registry.implementations("fwd")["sm80"] is FORWARD and registry.implementations("bwd_fused")["sm80"] is BACKWARD
    )
    for variant in (FORWARD, BACKWARD):
        assert registry.portable_of(variant.serves).name == f"portable/{variant.serves}"
        config = variant.space.default(spec_of(64), 80)
        assert registry.variant_of(variant.serves, config) is variant
        assert registry.misfit(variant.serves, "sm80", config) is None
    assert BACKWARD.before == ("sm80/bwd_prepare",) and BACKWARD.after == ("sm80/bwd_finish",)


@BOTH
@pytest.mark.parametrize("gpu", SERVED)
def test_defaults_are_legal_where_they_serve(variant: Any, gpu: str) -> None:
    for dim in (16, 32, 64, 72, 96, 128, 192, 256):
        for mask in ("full", "causal"):
            assert refusal(variant, gpu, spec_of(dim, mask)) == ""
    for dims in ((128, 64), (64, 128), (192, 128), (72, 40), (16, 256), (256, 16)):
        assert refusal(variant, gpu, Specialization("fp16", *dims, "causal")) == ""


@BOTH
def test_what_they_cannot_do_is_refused_by_name(variant: Any) -> None:
    for gpu in ("h100", "h200", "gh200", "b200"):
        assert refusal(variant, gpu, spec_of(128)) == "without_wgmma"
    assert refusal(variant, "a100", spec_of(128, aligned=False)) == "copies_are_aligned"
    assert refusal(variant, "a100", spec_of(64, dtype="fp32")) == "sixteen_bit"


@BOTH
def test_windows_and_chunks_are_served(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for mask in ("band", "chunked"):
        assert refusal(variant, "a100", spec_of(64, mask)) == ""
    monkeypatch.setattr(registry, "hooks_of", lambda mask: {"key_range", "query_range", "keep", "sees"})
    assert refusal(variant, "a100", spec_of(64, "band")) == "mask"


def test_small_shared_memory_refuses_what_the_a100_takes() -> None:
    spec = spec_of(128)
    large = BACKWARD.space.default(spec, 80)
    assert bwd_fused.shared_bytes(large, spec) > 99 * 1024
    assert BACKWARD.space.broken(large, spec, 80) is None
    for arch in (86, 89, 120):
        broken = BACKWARD.space.broken(large, spec, arch)
        assert broken is not None and broken.name == "tiles_fit_shared_memory"


def test_limits_are_those_of_the_catalogue() -> None:
    for gpu in SERVED:
        card = gpus.named(gpu)
        assert ampere.shared_limit(card.arch) == card.shared_per_block


def test_a_prediction_leaves_no_kernel_out() -> None:
    for gpu in ("a100", "h100", "h200"):
        assert open_jobs.unmodelled(make_plan(TuneRequest(gpu=gpu, head_dims=(64,), dtypes=("bf16",)))) == []


def test_a_whole_backward_is_stale_only_with_the_kernels_it_names() -> None:
    """Rows without such a kernel do not mind that there is one."""
    key = TuningKey("NVIDIA A100", 108, 80, "bwd", "bf16", "ieee", 64, 64, "causal", 512)
    portable = Row(key, "portable", {"bwd_fused": "pointer"}, "measured", "target", strategy="fused")
    named = replace(portable, config={"bwd_fused": "sm80"})
    assert portable.source == "bwd fused portable causal" == hashed_as("bwd", "portable", "causal", "fused")
    assert named.source == "bwd fused portable+sm80 causal"
    hashes = fingerprint.kernel_hashes()
    assert hashes[named.source] == fingerprint.backward_hash("fused", "portable", "causal", ("sm80",))
    assert hashes[named.source] != hashes[portable.source]
    assert hashes.get("bwd fused portable+none causal") is None and hashes.get("bwd split portable+sm80 causal") is None


# ---- machine code


def built(variant: Any, spec: Specialization, arch: int, **changes: Any) -> tuple[Any, str]:
    """The binary, and its listing."""
    binary = compiler.build(variant, spec, {**variant.space.default(spec, arch), **changes}, arch)
    command = [compiler.tool("cuobjdump"), "-sass", binary.cubin_path]
    return binary, subprocess.run(command, capture_output=True, text=True, check=True).stdout


#: 128 keys and V in registers, which fit 99 KiB.
HELD = {
    "V_IN_REGISTERS": True, "P_THROUGH": "shared", "BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "SCORE_WARPS": 2,
    "KEY_WARPS": 4, "QUERY_WARPS": 2,
}  # fmt: skip
FORMS = [
    (FORWARD, 64, "causal", 80, {}),
    (FORWARD, 128, "full", 86, {}),
    (FORWARD, 96, "causal", 89, {}),
    (FORWARD, 64, "band", 80, {}),
    (FORWARD, 64, "causal", 80, {"SCHEDULE": "fa2"}),
    (FORWARD, 128, "causal", 80, {}),
    (FORWARD, 256, "full", 120, {}),
    (BACKWARD, 64, "causal", 86, {}),
    (BACKWARD, 128, "full", 80, {}),
    (BACKWARD, 128, "causal", 89, {}),
    (BACKWARD, 256, "causal", 120, {}),
    (BACKWARD, 64, "band", 80, {}),
    (BACKWARD, 128, "chunked", 86, {}),
    (FORWARD, 128, "causal", 80, {"score": "softcap"}),
    (FORWARD, 256, "causal", 89, {"score": "softcap"}),
    (BACKWARD, 64, "causal", 80, {"score": "softcap"}),
    (BACKWARD, 128, "full", 80, {"score": "softcap"}),
    (BACKWARD, 128, "causal", 89, {"score": "softcap"}),
    (BACKWARD, 256, "causal", 80, {"score": "softcap"}),
    (ORDERED, 128, "causal", 80, {"score": "softcap"}),
    (FORWARD, 96, "full", 80, {"Q_HELD": 96}),
    (FORWARD, 128, "full", 86, {"Q_HELD": 32}),
    # not searched
    (FORWARD, 256, "full", 80, {"O_IN_HALVES": True, "BLOCK_N": 64, "SCHEDULE": "fa2"}),
    (FORWARD, 256, "causal", 89, {"O_IN_HALVES": True}),
    (BACKWARD, 256, "causal", 80, {"SCORES_APART": True, "KEYS_APART": True, "SCORE_WARPS": 4, "KEY_WARPS": 2}),
    (
        BACKWARD,
        256,
        "full",
        89,
        {**HELD, "BLOCK_M": 32, "BLOCK_N": 64, "SCORE_WARPS": 2, "KEY_WARPS": 2, "QUERY_WARPS": 2},
    ),
    (BACKWARD, 96, "full", 89, {**HELD, "KEYS_APART": True}),
    (BACKWARD, 64, "causal", 80, {"IN_ORDER": True}),
    (BACKWARD, 128, "full", 80, {"IN_ORDER": True}),
    (BACKWARD, 128, "causal", 89, {"IN_ORDER": True}),
    (
        BACKWARD,
        256,
        "causal",
        80,
        {"IN_ORDER": True, "SCORES_APART": True, "KEYS_APART": True, "SCORE_WARPS": 4, "KEY_WARPS": 2},
    ),
    (BACKWARD, 64, "band", 80, {"IN_ORDER": True}),
    (ORDERED, 64, "causal", 86, {}),
    (ORDERED, 128, "full", 80, {}),
    (ORDERED, 64, "band", 120, {}),
]


@pytest.mark.parametrize(
    ("variant", "dim", "mask", "arch", "changes"), FORMS, ids=lambda value: getattr(value, "name", None)
)
def test_machine_code_is_what_it_is_made_of(
    variant: Any, dim: int, mask: str, arch: int, changes: dict[str, Any]
) -> None:
    score, changes = changes.get("score", "none"), {name: changes[name] for name in changes if name != "score"}
    spec = spec_of(dim, mask, score=score)
    binary, listing = built(variant, spec, arch, **changes)
    gpu = gpus.named({80: "a100", 86: "a10", 89: "l4", 120: "rtx-5090"}[arch])
    assert limits.before_compile(variant, spec, binary.config, gpu) is None
    assert limits.after_compile(binary, gpu) is None and (binary.spills <= 96 or not TESTED)
    space = fwd if variant is FORWARD else bwd_fused
    assert binary.shared_bytes == space.shared_bytes(binary.config, spec)
    # tiles come by 16 bytes, past L1, and by nothing else
    copies = re.findall(r"\bLDGSTS\S*", listing)
    assert copies and set(copies) == {"LDGSTS.E.BYPASS.128"}
    assert not re.search(r"\bLDG\.E(\.U16|\.128)\b", listing)
    products = set(re.findall(r"\bHMMA\S*", listing))
    assert products == {"HMMA.16816.F32.BF16"}
    sums = re.findall(r"\bRED\S*", listing)
    assert bool(sums) == (variant is not FORWARD)
    # blocks under the mask, and clear ones
    loops = sass.counts(binary.cubin_path)
    assert len(loops) >= 2 and all(loop.mma == "HMMA" and loop.copies and loop.mufu for loop in loops)
    assert min(loop.issue for loop in loops) < max(loop.issue for loop in loops)
    # other compilers spill more: Triton 3.8 102 words where 3.6 spills 42. No loop moves half a word for each of its products
    assert all(2 * loop.local_bytes <= loop.products * 128 for loop in loops)


def test_a_fixed_order_costs_no_trip_anything() -> None:
    """The loops are those of the other kernel: what differs from tile to tile is worked out between tiles."""
    spec, found = spec_of(128), []
    for variant in (BACKWARD, ORDERED):
        binary, _ = built(variant, spec, 80)
        found.append((binary.shared_bytes, sass.counts(binary.cubin_path)))
    (shared, free), (its_shared, its) = found
    assert its_shared == shared and [loop.products for loop in its] == [loop.products for loop in free]
    for one, other in zip(free, its, strict=True):
        assert other.issue <= 1.1 * one.issue, "more instructions in a trip"


@pytest.mark.parametrize(("dim", "mask"), [(64, "causal"), (96, "full"), (128, "full"), (128, "causal"), (256, "full")])
def test_turns_cost_a_trip_one_fence(dim: int, mask: str) -> None:
    """No barrier more. Between additions and a fence, and between a fence and additions, all threads meet."""
    (free, listing), (binary, its) = (
        built(BACKWARD, spec_of(dim, mask), 80, IN_ORDER=order) for order in (False, True)
    )
    assert binary.shared_bytes == free.shared_bytes
    loops, before = sass.counts(binary.cubin_path), sass.counts(free.cubin_path)
    assert [loop.products for loop in loops] == [loop.products for loop in before]
    barriers, fences = (len(re.findall(rf"\b{name}\b", its)) for name in ("BAR", "MEMBAR"))
    assert fences == len(loops) + 1 and "MEMBAR" not in listing
    assert barriers <= len(re.findall(r"\bBAR\b", listing)) + 1, "one behind the last block"
    order = "".join(name[0] for name in re.findall(r"\b(RED|MEMBAR|BAR)\b", its))
    assert order.count("M") == fences and not re.search("RM|MR", order)


def test_no_loop_of_the_forward_at_64_spills() -> None:
    for mask in ("full", "causal"):
        binary, _ = built(FORWARD, spec_of(64, mask), 80)
        assert {loop.local_bytes for loop in sass.counts(binary.cubin_path)} == {0}


@pytest.mark.parametrize("variant", [FORWARD, BACKWARD], ids=["fwd", "bwd_fused"])
def test_no_product_has_padding(variant: Any) -> None:
    """Of head dim 96, padded to 128, a block has three quarters of 128's products; sums of P aside, which have no head dim.

    The forward writes a trip twice, once for each pair of buffers. A compiler may keep both (Triton 3.6) or make one of them
    (3.8): a loop holds as many blocks as it has times the exponentials of one."""
    config = variant.space.default(spec_of(128), 80)
    tile = config["BLOCK_M"] * config["BLOCK_N"] // config["num_warps"]  # a warp's scores of a block
    sums = tile // (16 * 16) if variant is FORWARD else 0
    counted = {}
    for dim in (96, 128):
        binary, _ = built(variant, spec_of(dim), 80, **config)
        found = set()
        for loop in sass.counts(binary.cubin_path):
            blocks = loop.mufu // (tile // 32)
            assert blocks in (1, 2) and loop.products % blocks == 0
            found.add(loop.products // blocks - sums)
        (counted[dim],) = found
    products = {FORWARD: 2, BACKWARD: 5}[variant]  # of a tile and a head dim, each of 16 x 8 x 16
    assert counted == {dim: products * tile * dim // (16 * 8 * 16) for dim in (96, 128)}


def test_a_raised_reference_is_a_branch() -> None:
    """O is multiplied only where a row's reference was raised: no way round the loop has to pass the multiplications."""
    binary, listing = built(FORWARD, spec_of(128), 80)
    assert "VOTE" in listing
    config = binary.config
    of_o = config["BLOCK_M"] * 128 // (32 * config["num_warps"])
    ways = sass.counts(binary.cubin_path)
    assert min(loop.fp32 for loop in ways) < of_o < max(loop.fp32 for loop in ways)


def test_the_race_takes_forms_next_to_shipped_rows() -> None:
    """No form where there is none, and none that breaks a limit."""
    race = script("sm80_race")
    found = list(race.cells(("fwd", "bwd"), (64, 256), ("causal",), (512, 4096), 0, "l4", 0, forms=True))
    assert [(cell.pass_, cell.head_dim, cell.length) for cell in found] == [
        ("fwd", 256, 512), ("fwd", 256, 4096), ("bwd", 256, 512), ("bwd", 256, 4096),
    ]  # fmt: skip
    for cell in found:
        variant, spec = FORWARD if cell.pass_ == "fwd" else BACKWARD, spec_of(256, "causal")
        (row,) = race.shipped(variant, spec, cell.length, gpus.named("l4"))
        assert row in cell.configs and cell.configs[0] == variant.space.default(spec, 89)
        assert all(variant.space.broken(config, spec, 89) is None for config in cell.configs)
        assert any(config not in (row, cell.configs[0]) for config in cell.configs)


def test_workspaces_hold_whole_blocks() -> None:
    problem = Problem("bf16", 2, 4, 2, 203, 333, 72, 40, CAUSAL)
    config = BACKWARD.space.default(problem.specialization, 80)
    assert BACKWARD.workspaces(problem, config) == {
        "peaks": ((2, 4, 256), "fp32"), "deltas": ((2, 4, 256), "fp32"), "sums": ((2, 4, 256, 128), "fp32"),
    }  # fmt: skip
    assert BACKWARD.scalars(problem, config, False) == {"rows_padded": 256}
    assert BACKWARD.programs(problem, config, 108) == -(-333 // config["BLOCK_N"]) * 2 * 2


def test_the_race_takes_legal_configs_and_reports_the_best() -> None:
    race = script("sm80_race")
    found = list(race.cells(("fwd", "bwd"), (64,), ("causal",), (512, 2048), 3, "a10", 0))
    assert [(cell.pass_, cell.length) for cell in found] == [("fwd", 512), ("fwd", 2048), ("bwd", 512), ("bwd", 2048)]
    for cell in found:
        variant = FORWARD if cell.pass_ == "fwd" else BACKWARD
        assert len(cell.configs) == 4 and cell.configs[0] == variant.space.default(spec_of(64, "causal"), 86)
        for config in cell.configs:
            assert limits.before_compile(variant, spec_of(64, "causal"), config, gpus.named("a10")) is None
    asked = {name for name, _, _ in race._binaries(found[-1])}
    assert asked == {"sm80/bwd_prepare", "sm80/bwd_fused", "sm80/bwd_finish", "portable/fwd"}
    asked_for = [race.in_order(text) for text in ("0", "2", "turns", "turns16")]
    (both,) = race.cells(("bwd",), (64,), ("causal",), (512,), 0, "a100", 0, in_order=asked_for)
    assert [dict(config).get("IN_ORDER") for name, _, config in race._binaries(both) if name == "sm80/bwd_fused"] == [
        False,
        True,
    ]
    asked = {name for name, _, _ in race._binaries(both)}
    assert {"sm80/bwd_fused", "sm80/bwd_ordered", "sm80/bwd_ordered_zero", "sm80/bwd_ordered_finish"} <= asked
    problem = Problem("bf16", 1, 32, 32, 16384, 16384, 64, 64, CAUSAL)
    choice = race.ordered_choice(problem, both.configs[0], gpus.named("h200"))
    assert choice.variant is ORDERED and choice.config == {**both.configs[0], "DQ_BUFFERS": 8}
    for buffers, band in ((race.TURNS, 16), (-32, 32)):
        choice = race.ordered_choice(problem, both.configs[0], gpus.named("h200"), buffers)
        assert choice.variant is BACKWARD
        assert choice.config == {**both.configs[0], "IN_ORDER": True, "HEADS_PER_WAVE": band}
    (cell,) = race.cells(("bwd",), (128,), ("causal",), (8192,), 0, "a100", 0, rows=True)
    (row,) = race.shipped(BACKWARD, spec_of(128, "causal"), 8192, gpus.named("a100"))
    assert cell.configs == [dict(race.point(row))]
    changes = [
        race.parsed('{"BLOCK_N": 32}'),
        race.parsed('64:{"SCHEDULE": "fa2"}'),
        race.parsed('128:{"BLOCK_M": 64}'),
    ]
    (cell,) = race.cells(("fwd",), (64,), ("full",), (512,), 0, "a100", 0, changes)
    default = FORWARD.space.default(spec_of(64), 80)
    assert cell.configs == [default, {**default, "BLOCK_N": 32}, {**default, "SCHEDULE": "fa2"}]
    a100, a10, h200 = (gpus.named(name) for name in ("a100", "a10", "h200"))
    image = Image("kernel", b"", 64 * 1024, 4, 1, False, False, ())
    blocks = [h200.shared_per_sm // (race.crowded(image, gpu, h200).shared + 1024) for gpu in (a100, a10)]
    assert blocks == [2, 1]

    def timed(length: int, **ratios: float) -> dict[str, Any]:
        methods = {
            name: {"ratio": ratio, "tflops": 300.0} for name, ratio in {"SDPA FlashAttention-2": 1.0, **ratios}.items()
        }
        return {"pass": "fwd", "head_dim": 64, "mask": "full", "length": length, "methods": methods}

    steady = {"in order, 8 sums: a": 1.0, "in order, 8 sums: b": 0.8, "SDPA FlashAttention-2, deterministic": 0.7}
    lines = [line.split(" (")[0] for line in race.best([timed(512, a=1.1, **steady)])]
    assert lines[:3] == [
        "fwd  64 full     512: 1.100 x", "fwd in order  64 full     512: 1.000 x",
        "fwd, SDPA deterministic  64 full     512: 0.700 x",
    ]  # fmt: skip
    lines = list(race.best([timed(512, a=1.1, b=1.2), timed(2048, a=0.9)]))
    assert [line.split(": ")[1].split(" x")[0] for line in lines[:2]] == ["1.200", "0.900"]
    assert lines[2] == "fwd: at least 0.900 x, geometric mean 1.039 x over 2 cells"
