"""Every kernel compiles for every architecture, with no GPU present, within the limits, and does the products it should."""

from __future__ import annotations

import ast
import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from cache_rows import row

from fa2tune import gpus
from fa2tune.calling import dispatch
from fa2tune.compiling import compiler, fingerprint, limits, sass
from fa2tune.compiling.compiler import CompileError
from fa2tune.predicting import model
from fa2tune.problem import KERNELS, Problem, Specialization, TuningKey, padded_head_dim
from fa2tune.rows import reader
from fa2tune.rows.row import hashed_as
from fa2tune.variant import WARP_SPECIALIZED

ROOT = Path(__file__).parent.parent
GPUS = {80: "a100", 86: "rtx-3090", 89: "rtx-4090", 90: "h200", 100: "b200", 120: "rtx-5090"}
bf16 = partial(Specialization, "bf16")


class Case(NamedTuple):
    kernel: str
    arch: int
    spec: Specialization
    changes: dict[str, Any]

    def __str__(self) -> str:
        spec = self.spec
        loads = self.changes.get("LOADS", "")
        mask = "causal" if spec.causal else "full"
        return (
            f"{self.kernel}-sm_{self.arch}-{spec.dtype}-{spec.head_dim}x{spec.head_dim_v}-{mask}{loads and '-' + loads}"
        )


def cases() -> Iterator[Case]:
    descriptor = {"LOADS": "descriptor"}
    # the mask alternates: both machine codes hold a masked loop
    for number, kernel in enumerate(KERNELS):
        mask = number % 2 == 0
        for arch in (80, 90):
            for dim in (64, 128, 256):
                yield Case(kernel, arch, bf16(dim, dim, causal=mask ^ (dim == 128)), {})
        yield Case(kernel, 90, bf16(128, 128, causal=mask), descriptor)
        yield Case(kernel, 80 if mask else 90, bf16(72, 40, causal=True), {})  # not a power of two, V apart
        for arch in (86, 89, 100, 120):
            yield Case(kernel, arch, bf16(64, 64, causal=True), {})
    yield Case("fwd", 90, bf16(64, 64, causal=True, aligned=False, wide=True), {})
    yield Case("fwd", 90, bf16(96, 64, causal=True, negate=True), descriptor)
    yield Case("fwd", 80, Specialization("fp16", 128, 128, causal=True), {})
    yield Case("fwd", 80, Specialization("fp32", 64, 64, causal=False), {})
    yield Case("fwd", 90, Specialization("fp32", 64, 64, causal=True, precision="tf32"), {})
    yield Case("bwd_dq", 90, Specialization("fp32", 64, 64, causal=False), {})
    yield Case("bwd_dkdv", 80, Specialization("fp32", 64, 64, causal=True, precision="tf32"), {})


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_compiles_within_the_limits(case: Case) -> None:
    gpu = gpus.named(GPUS[case.arch])
    variant = compiler.variant_named(case.kernel)
    config = {**variant.space.default(case.spec, case.arch), **case.changes}
    assert limits.before_compile(variant, case.spec, config, gpu) is None
    binary = compiler.build(variant, case.spec, config, case.arch)

    refusal = limits.after_compile(binary, gpu)
    if case.kernel == "bwd_fused" and refusal is not None and refusal.name == "spills" and triton.__version__ >= "3.9":
        # it can be launched; a tuner would not measure it (docs/experiments.md)
        pytest.xfail(f"its default was measured with Triton 3.6; Triton {triton.__version__}: {refusal.why}")
    assert refusal is None, binary
    assert limits.blocks_per_sm(binary, gpu) >= 1
    assert 16 <= binary.registers <= 255
    assert binary.shared_bytes >= limits.shared_lower_bound(variant, case.spec, config)

    loops = sass.counts(binary.cubin_path)
    # a way round without the mask and one with it; one in all where a small mask is predicated instead of branched around
    assert len(loops) == 2 or (len(loops) == 1 and config["MASKED"] == "inside")
    d, dv = padded_head_dim(case.spec.head_dim), padded_head_dim(case.spec.head_dim_v)
    tile = Problem(case.spec.dtype, 1, 1, 1, config["BLOCK_M"], config["BLOCK_N"], d, dv, causal=False)
    for loop in loops:
        assert loop.mufu > 0
        if loop.mma == "UTCHMMA":  # its shape is not in the mnemonic
            continue
        # What a loop runs, by its instructions, against what it should, by its block sizes. More where warps repeat each
        # other's products: mma.sync with more warps than the scores have tiles of 16 x 8.
        run = binary.num_warps * (loop.tensor_flops or loop.ffma * 2 * sass.WARP_THREADS)
        assert 0.99 <= run / tile.flops(case.kernel) <= 3, loop

    spec = case.spec
    key = TuningKey(
        gpu.name, gpu.sm_count, gpu.arch, case.kernel, spec.dtype, spec.precision, spec.head_dim, spec.head_dim_v,
        spec.causal, 2048,
    )  # fmt: skip
    problem = key.workload()
    predicted = model.predict(binary, problem, gpu)
    # no faster than the tensor cores, no slower than a hundredth of them
    ideal = problem.flops(case.kernel) / (gpu.peak(spec.dtype, spec.precision) * 1e12)
    assert ideal < predicted < 100 * ideal


@pytest.mark.parametrize("arch", [80, 90])
def test_the_pre_pass_compiles(arch: int) -> None:
    variant = compiler.variant_named("bwd_delta")
    spec = bf16(128, 128, causal=False)
    config = variant.space.default(spec, arch)
    binary = compiler.build(variant, spec, config, arch)
    gpu = gpus.named(GPUS[arch])
    assert limits.before_compile(variant, spec, config, gpu) is None
    assert limits.after_compile(binary, gpu) is None
    assert sass.counts(binary.cubin_path) == ()
    problem = Problem("bf16", 1, 16, 16, 16384, 16384, 128, 128, causal=False)
    assert model.predict(binary, problem, gpu) > 2 * 16 * 16384 * 128 * 2 / (gpu.hbm_gbs * 1e9)


@pytest.mark.parametrize(
    ("edited", "stale"),
    [
        ("fwd", set()),
        ("bwd_dq", {"split", "split_warp_specialized"}),
        ("bwd_dkdv_hopper", {"split_warp_specialized"}),
        ("bwd_fused_hopper", {"fused_warp_specialized"}),
        ("bwd_delta", {"fused", "fused_warp_specialized"}),
    ],
)
def test_an_edited_kernel_makes_the_rows_of_its_road_stale(
    edited: str, stale: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashes() -> dict[str, str]:
        return {way: fingerprint.backward_hash.__wrapped__(way) for way in fingerprint._BACKWARDS}

    before, real = hashes(), fingerprint.kernel_hash
    monkeypatch.setattr(fingerprint, "kernel_hash", lambda v: "edited" if v.name == edited else real(v))
    assert {way for way, made in hashes().items() if made != before[way]} == stale


@pytest.mark.parametrize("path", reader.shipped_paths(), ids=lambda path: path.stem)
def test_shipped_rows_belong_to_these_kernels(path: Path) -> None:
    """A kernel was edited: tune and ship again, or the rows are stale where they are newest."""
    rows = reader.read(path)
    assert rows
    made_with = {(hashed_as(one.key.kernel, one.variant), one.kernel_hash) for one in rows}
    assert made_with <= set(fingerprint.kernel_hashes().items())


@pytest.mark.parametrize("path", reader.shipped_paths(), ids=lambda path: path.stem)
def test_shipped_rows_are_filed_as_what_their_configs_are(path: Path) -> None:
    for one in reader.read(path):
        why = dispatch.refusal(one.key.workload(), gpus.named(one.key.gpu), deterministic=False)(one)
        assert why is None or "only a measurement" in why, one


# ---- another Triton, which has no such Gluon


def test_what_cannot_be_imported_is_absent_and_its_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"fwd_hopper": ImportError("no mbarrier"), "bwd_prepare_hopper": AttributeError("no warp_specialize")}
    there, find, real = set(compiler.variants()), compiler.variants.__wrapped__, importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        if (error := broken.get(name.rpartition(".")[2])) is not None:
            raise error
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with caplog.at_level(logging.WARNING, "fa2tune"):
        found = find()
        # and what cannot run without it
        assert there - set(found) == {"fwd_hopper", "bwd_prepare_hopper", "bwd_fused_hopper"}
    assert [record.message.partition("kernels.")[2] for record in caplog.records] == [
        "bwd_prepare_hopper (AttributeError: no warp_specialize)", "fwd_hopper (ImportError: no mbarrier)",
    ]  # fmt: skip

    config = compiler.variant_named("fwd_hopper").space.default(bf16(128, 128, True), 90)
    monkeypatch.setattr(compiler, "variants", lambda: found)
    monkeypatch.setattr(fingerprint, "variants", lambda: found)
    compiler.ways.cache_clear()
    try:
        problem = Problem("bf16", 4, 16, 16, 4096, 4096, 128, 128, True)
        refused = dispatch.refusal(problem, gpus.named("h200"))(row(variant=WARP_SPECIALIZED, config=config))
        assert refused == "kernel fwd: got a 'warp_specialized' config, known are pointer, descriptor"
        hashes = fingerprint.kernel_hashes.__wrapped__()
        assert "fwd warp_specialized" not in hashes and hashes["bwd_dq warp_specialized"]
    finally:
        compiler.ways.cache_clear()

    broken["fwd"] = ImportError("no tl.dot")
    with pytest.raises(ImportError, match=r"no tl\.dot"):
        list(find())


def test_portable_kernels_compile_without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = bf16(64, 64, True)
    portable, other = map(compiler.variant_named, ("fwd", "fwd_hopper"))
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon._runtime", None)
    assert compiler.source(portable, spec, portable.space.default(spec, 90)).fn is portable.kernel
    with pytest.raises(CompileError, match="lacks what fwd_hopper is written with"):
        compiler.compile_kernel(other, spec, other.space.default(spec, 90), 90)


def test_every_python_hashes_kernels_alike() -> None:
    """Python 3.12 writes a string inside a formatted one by other quotes than 3.11: rows made there were stale here."""
    folders = [
        Path(str(importlib.import_module(f"fa2tune.{name}").__path__[0])) for name in ("kernels", "search_spaces")
    ]
    nodes = [
        node for folder in folders for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ]
    formatted = [node for node in nodes if isinstance(node, ast.FormattedValue)]
    assert formatted
    for node in formatted:
        strings = [
            one
            for one in ast.walk(node.value)
            if isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str | bytes))
        ]
        assert not strings, ast.unparse(node.value)


def test_only_hashes_asked_for_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(fingerprint, "kernel_hash", lambda variant: made.append(variant.name) or "abc")
    hashes = fingerprint.kernel_hashes.__wrapped__()
    assert len(hashes) > 8 and "bwd split" in hashes and not made
    assert hashes["fwd"] == hashes.get("fwd") == "abc" and hashes.get("no such kernel", "") == ""
    assert made == ["fwd"]


def test_a_kernels_ways_are_found_without_the_other_kernels() -> None:
    """By the names of the modules: nothing that serves a kernel lies where it is not looked for."""
    for kernel in KERNELS:
        alone = set(compiler.Variants().serving(kernel))
        assert {variant for variant in compiler.variants().values() if variant.filed_under == kernel} <= alone
    code = "import sys, torch; from fa2tune.compiling import compiler; compiler.ways('fwd'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    imported = {name.rpartition(".")[2] for name in done.stdout.split() if name.startswith("fa2tune.kernels.")}
    assert imported == {"common", "hopper", "hopper_forward", "fwd", "fwd_hopper", "fwd_norms"}
