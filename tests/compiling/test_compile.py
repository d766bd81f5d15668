"""Every kernel compiles for every architecture, with no GPU present, within the limits, and does the products it should."""

from __future__ import annotations

import ast
import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from cache_rows import row

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.compiling import compiler, fingerprint, limits, registry, sass
from fa2tune.compiling.compiler import CompileError
from fa2tune.predicting import model
from fa2tune.rows import lookup, reader
from fa2tune.spec.key import TuningKey
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import KERNELS, SPLIT, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import WARP_SPECIALIZED

ROOT = Path(__file__).parents[2]
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
        mask = spec.mask
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
                yield Case(kernel, arch, bf16(dim, dim, mask=("full", "causal")[mask ^ (dim == 128)]), {})
        yield Case(kernel, 90, bf16(128, 128, mask=("full", "causal")[mask]), descriptor)
        yield Case(kernel, 80 if mask else 90, bf16(72, 40, mask="causal"), {})  # not a power of two, V apart
        for arch in (86, 89, 100, 120):
            yield Case(kernel, arch, bf16(64, 64, mask="causal"), {})
    yield Case("fwd", 90, bf16(64, 64, mask="causal", aligned=False, wide=True), {})
    yield Case("fwd", 90, bf16(96, 64, mask="causal", negate=True), descriptor)
    yield Case("fwd", 80, Specialization("fp16", 128, 128, mask="causal"), {})
    yield Case("fwd", 80, Specialization("fp32", 64, 64, mask="full"), {})
    yield Case("fwd", 90, Specialization("fp32", 64, 64, mask="causal", precision="tf32"), {})
    yield Case("bwd_dq", 90, Specialization("fp32", 64, 64, mask="full"), {})
    yield Case("bwd_dkdv", 80, Specialization("fp32", 64, 64, mask="causal", precision="tf32"), {})


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_compiles_within_the_limits(case: Case) -> None:
    gpu = gpus.named(GPUS[case.arch])
    variant = registry.portable_of(case.kernel)
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
    tile = Problem(case.spec.dtype, 1, 1, 1, config["BLOCK_M"], config["BLOCK_N"], d, dv, mask=FULL)
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
        spec.mask, 2048,
    )  # fmt: skip
    problem = key.workload()
    predicted = model.predict(binary, problem, gpu)
    # no faster than the tensor cores, no slower than a hundredth of them
    ideal = problem.flops(case.kernel) / (gpu.peak(spec.dtype, spec.precision) * 1e12)
    assert ideal < predicted < 100 * ideal


@pytest.mark.parametrize("arch", [80, 90])
def test_the_pre_pass_compiles(arch: int) -> None:
    variant = registry.variant_named("portable/bwd_delta")
    spec = bf16(128, 128, mask="full")
    config = variant.space.default(spec, arch)
    binary = compiler.build(variant, spec, config, arch)
    gpu = gpus.named(GPUS[arch])
    assert limits.before_compile(variant, spec, config, gpu) is None
    assert limits.after_compile(binary, gpu) is None
    assert sass.counts(binary.cubin_path) == ()
    problem = Problem("bf16", 1, 16, 16, 16384, 16384, 128, 128, mask=FULL)
    assert model.predict(binary, problem, gpu) > 2 * 16 * 16384 * 128 * 2 / (gpu.hbm_gbs * 1e9)


@pytest.mark.parametrize("spec", [Specialization("fp32", 256, 256, "full"), bf16(256, 136, "full")], ids=str)
def test_sums_of_parts_fit_the_least_shared_memory(spec: Specialization) -> None:
    """A call whose query groups are split cannot be had without the kernel that sums the parts."""
    variant = registry.variant_named("portable/bwd_gather")
    binary = compiler.build(variant, spec, variant.space.default(spec, 89), 89)
    assert binary.shared_bytes <= min(gpu.shared_per_block for gpu in gpus.catalogue()), binary
    assert limits.after_compile(binary, gpus.named("l4")) is None


@pytest.mark.parametrize(
    ("edited", "stale"),
    [
        ("portable/fwd", set()),
        ("portable/bwd_dq", {"split portable", "split warp_specialized"}),
        ("sm90/bwd_dkdv", {"split warp_specialized"}),
        ("sm90/bwd_fused", {"fused warp_specialized"}),
        ("portable/bwd_delta", {"fused portable", "fused warp_specialized"}),
    ],
)
def test_an_edited_kernel_makes_the_rows_of_its_strategy_stale(
    edited: str, stale: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashes() -> dict[str, str]:
        return {" ".join(of): fingerprint.backward_hash.__wrapped__(*of, "full") for of in fingerprint._BACKWARDS}

    before, real = hashes(), fingerprint.kernel_hash
    monkeypatch.setattr(fingerprint, "kernel_hash", lambda v, *of: "edited" if v.name == edited else real(v, *of))
    assert {variant for variant, made in hashes().items() if made != before[variant]} == stale


@pytest.mark.parametrize("path", reader.shipped_paths(), ids=lambda path: path.stem)
def test_shipped_rows_belong_to_these_kernels(path: Path) -> None:
    """A kernel was edited: tune and ship again, or the rows are stale where they are newest."""
    rows = reader.read(path)
    assert rows
    hashes = fingerprint.kernel_hashes()
    assert {one.source for one in rows if hashes.get(one.source) != one.kernel_hash} == set()


@pytest.mark.parametrize("path", reader.shipped_paths(), ids=lambda path: path.stem)
def test_shipped_rows_are_filed_as_what_their_configs_are(path: Path) -> None:
    for one in reader.read(path):
        chooser = choosing.Chooser(one.key.workload(), gpus.named(one.key.gpu), node=lookup.Toolchain())
        why = chooser.strategy_refusal(one, False) if one.key.kernel == "bwd" else chooser.fitted(one).refused
        behind = one.strategy == SPLIT and "it was only predicted" in (why or "")
        assert why is None or behind or "only a measurement" in why, one


# ---- another Triton, which has no such Gluon


def test_what_cannot_be_imported_is_absent_and_its_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"sm90.fwd": ImportError("no mbarrier"), "sm90.bwd_prepare": AttributeError("no warp_specialize")}
    there, find, real = set(registry.variants()), registry.variants.__wrapped__, importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        if (error := broken.get(name.removeprefix("fa2tune.kernels."))) is not None:
            raise error
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with caplog.at_level(logging.WARNING, "fa2tune"):
        found = find()
        # and what cannot run without it
        assert there - set(found) == {"sm90/fwd", "sm90/bwd_prepare", "sm90/bwd_fused"}
    assert [record.message.partition("kernels.")[2] for record in caplog.records] == [
        "sm90.bwd_prepare (AttributeError: no warp_specialize)", "sm90.fwd (ImportError: no mbarrier)",
    ]  # fmt: skip

    config = registry.variant_named("sm90/fwd").space.default(bf16(128, 128, "causal"), 90)
    monkeypatch.setattr(registry, "variants", lambda: found)
    registry.implementations.cache_clear()
    try:
        problem = Problem("bf16", 4, 16, 16, 4096, 4096, 128, 128, CAUSAL)
        chooser = choosing.Chooser(problem, gpus.named("h200"), [], lookup.Toolchain())
        refused = chooser.fitted(row(implementation=WARP_SPECIALIZED, config=config)).refused
        assert refused == "kernel fwd: got a 'warp_specialized' config, known are pointer, descriptor, sm80"
        hashes = fingerprint.kernel_hashes.__wrapped__()
        assert "fwd warp_specialized full" not in hashes and hashes["bwd_dq warp_specialized full"]
    finally:
        registry.implementations.cache_clear()

    broken["portable.fwd"] = ImportError("no tl.dot")
    with pytest.raises(ImportError, match=r"no tl\.dot"):
        list(find())


def test_portable_kernels_compile_without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = bf16(64, 64, "causal")
    portable, other = map(registry.variant_named, ("portable/fwd", "sm90/fwd"))
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon._runtime", None)
    assert compiler.source(portable, spec, portable.space.default(spec, 90)).fn is portable.kernel
    with pytest.raises(CompileError, match="sm90/fwd uses something that this Triton does not have"):
        compiler.compile_kernel(other, spec, other.space.default(spec, 90), 90)


def test_every_python_hashes_kernels_alike() -> None:
    """Python 3.12 writes a string inside a formatted one by other quotes than 3.11: rows made there were stale here."""
    folders = [
        Path(str(importlib.import_module(f"fa2tune.{name}").__path__[0])) for name in ("kernels", "search_spaces")
    ]
    nodes = [
        node for folder in folders for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
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
    monkeypatch.setattr(fingerprint, "kernel_hash", lambda variant, mask: made.append(variant.name) or "abc")
    hashes = fingerprint.kernel_hashes.__wrapped__()
    assert len(hashes) > 8 and "bwd split portable causal" in list(hashes) and not made
    assert (
        hashes["fwd full"] == hashes.get("fwd full") == "abc"
        and hashes.get("fwd", "") == hashes.get("no such full", "") == ""
    )
    assert made == ["portable/fwd"]


def test_a_file_whose_text_does_not_say_what_it_serves_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry.Variants()
    monkeypatch.setitem(found.stated, "portable/fwd", registry.Stated())
    with pytest.raises(ValueError, match=r'kernels/portable/fwd\.py: .* has to say as serves="fwd", got \'\''):
        found["portable/fwd"]


@pytest.mark.parametrize(
    ("text", "served"),
    [
        ('VARIANT = Variant(serves="fwd")', "fwd"),
        ("VARIANT: Variant = Variant(kernel, serves = 'fwd')", "fwd"),
        ('# serves="bwd_dq" is another\nVARIANT = Variant(serves="fwd")  # not serves="bwd_dq"', "fwd"),
        ('"""As\nVARIANT = Variant(serves="bwd_dq")\n"""\nVARIANT = Variant(serves="fwd")', "fwd"),
        ('"""As\nVARIANT = Variant(serves="bwd_dq")\n"""\nif True:\n    VARIANT = Variant(serves="fwd")', "fwd"),
        ('def described(serves="bwd_dq"):\n    pass\nVARIANT = described()', ""),
        ("VARIANT = Variant(kernel)", ""),
        ("x = 1", ""),
    ],
)
def test_what_a_file_serves_is_read_off_the_call_that_makes_its_variant(text: str, served: str) -> None:
    assert registry.stated(text, "kernels/portable/one.py").serves == served


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('KERNEL = "fwd"\nVARIANT = Variant(serves=KERNEL)', "serves: got KERNEL, allowed are "),
        ('VARIANT = Variant(serves="forward")', "serves: got 'forward', allowed are \"fwd\", "),
        ("VARIANT = Variant(**same)", r"has to name its arguments, got \*\*same"),
        ('one = Variant(serves="fwd")\nVARIANT = one', "VARIANT has to be a call that names serves itself, got one"),
        ('VARIANT = Variant(serves="fwd")\nVARIANT = Variant(serves="bwd_dq")', "got 'bwd_dq' and 'fwd', a file"),
        ("\nVARIANT = Variant(", "line 2: "),
        ('VARIANT = Variant(role="combine")', "role: got 'combine', allowed are \"packed_order\", "),
        ("VARIANT = Variant(role=ROLE)", "role: got ROLE, allowed are "),
        ("VARIANT = Variant(min_arch=HOPPER)", "min_arch: got HOPPER, allowed are integers, written out"),
        (
            "VARIANT = Variant(ordered_form_of=free.name)",
            "ordered_form_of: got free.name, allowed are paths of kernels",
        ),
    ],
)
def test_a_file_that_does_not_say_plainly_what_it_serves_is_an_error(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"kernels/portable/one\.py: .*{why}"):
        registry.stated(text, "kernels/portable/one.py")


def test_a_callback_of_another_signature_is_an_error() -> None:
    variant = registry.portable_of("fwd")
    wanted = (
        r"Variant of fwd_kernel: grid takes \(problem, config\), it has to take \(problem, config, sm_count, early\)"
    )
    with pytest.raises(TypeError, match=wanted):
        replace(variant, grid=lambda problem, config: 1)
    with pytest.raises(
        TypeError, match=r"grid takes \(config, problem, sm_count, early\), it has to take \(problem, config"
    ):
        replace(variant, grid=lambda config, problem, sm_count, early: 1)
    with pytest.raises(TypeError, match=r"early takes \(_spec\), it has to take \(problem, config, sm_count\)"):
        replace(variant, early=lambda _spec: False)


def test_a_callback_may_be_a_method_and_need_not_use_its_parameters() -> None:
    class Grids:
        def grid(self, problem: Any, _config: Any, _sm_count: int, _early: bool) -> int:
            return int(problem.batch)

    variant = replace(registry.portable_of("fwd"), grid=Grids().grid)
    assert variant.programs(Problem("bf16", 3, 4, 4, 64, 64, 64, 64, FULL), {}, 1) == 3


def test_only_paths_and_kernels_are_names() -> None:
    with pytest.raises(ValueError, match="kernel: got 'fwd', known are portable/bwd_delta, "):
        registry.variant_named("fwd")
    with pytest.raises(ValueError, match="kernel: got 'sm90/fwd', known are fwd, bwd_dkdv, bwd_dq, bwd_fused"):
        registry.portable_of("sm90/fwd")


def test_a_kernels_implementations_are_found_without_the_other_kernels() -> None:
    """By what the texts of the files say: nothing that serves a kernel is missed."""
    for kernel in KERNELS:
        alone = set(registry.Variants().serving(kernel))
        assert {variant for variant in registry.variants().values() if variant.serves == kernel} == alone
    code = "import sys, torch; from fa2tune.compiling import registry; registry.implementations('fwd'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    imported = {
        name.removeprefix("fa2tune.kernels.") for name in done.stdout.split() if name.startswith("fa2tune.kernels.")
    }
    assert imported - {"lib", "portable", "sm80", "sm90"} == {
        "lib.ampere", "lib.common", "lib.division", "lib.extent", "lib.gluon_extent", "lib.hopper", "lib.hopper_forward",
        "lib.hopper_grouped", "lib.hopper_halves", "lib.hopper_key_parts", "lib.hopper_keys", "lib.hopper_parts",
        "lib.hopper_queue", "lib.packed_order", "lib.warps", "portable.fwd", "portable.fwd_norms", "portable.packed_order",
        "sm80.fwd", "sm90.fwd",
    }  # fmt: skip
