"""Every warp-specialised variant compiles for sm_90 with no GPU present, within the limits, to the instructions it is made of.
Their numerics need a GPU: tests/gpu/test_specialized.py."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fa2tune import gpus
from fa2tune.compiling import compiler, fingerprint, limits, sass
from fa2tune.compiling.compiler import Binary
from fa2tune.problem import KERNELS, Config, Problem, Specialization
from fa2tune.variant import WARP_SPECIALIZED, Variant

H200 = gpus.named("h200")
bf16 = partial(Specialization, "bf16")
VARIANTS = [variant for kernel in KERNELS for variant in compiler.variants_of(kernel) if variant.serves]
NAMED = {variant.name: variant for variant in VARIANTS}
GROUP_WARPS = 4  #: registers are handed to warps four at a time
#: Four float32 of a thread added to device memory at once.
WIDE_SUM = "REDG.E.ADD.F32x4"
#: Variant -> head dim, and config entries beside its default, with which it claims that the exponentials of a group run beside
#: a product of its own (elsewhere they run beside another group's)
OVERLAPPING: dict[str, tuple[int, dict[str, Any]]] = {"bwd_fused_hopper": (128, {})}


class Case(NamedTuple):
    variant: Variant
    spec: Specialization

    def __str__(self) -> str:
        dims = f"{self.spec.head_dim}x{self.spec.head_dim_v}"
        return f"{self.variant.name}-{self.spec.dtype}-{dims}-{'causal' if self.spec.causal else 'full'}"


def legal(variant: Variant, spec: Specialization) -> list[dict[str, Any]]:
    return [c for c in variant.space.points() if limits.before_compile(variant, spec, c, H200) is None]


def cases() -> Iterator[Case]:
    for number, variant in enumerate(VARIANTS):
        mask = number % 2 == 0
        for spec in (
            *(bf16(dim, dim, causal=mask ^ (dim == 128)) for dim in (64, 128, 256)),
            Specialization("fp16", 64, 64, causal=True, wide=True), bf16(72, 40, causal=True), bf16(72, 72, causal=False),
        ):  # fmt: skip
            if limits.before_compile(variant, spec, variant.space.default(spec, 90), H200) is None:
                yield Case(variant, spec)


CASES = list(cases())
every = pytest.mark.parametrize("case", CASES, ids=str)


def config_of(case: Case) -> Config:
    """Its default."""
    return case.variant.space.default(case.spec, 90)


@cache
def built(case: Case) -> tuple[Binary, Any]:
    binary = compiler.build(case.variant, case.spec, config_of(case), 90)
    return binary, compiler.compile_kernel(case.variant, case.spec, config_of(case), 90)


@cache
def listing(path: str) -> str:
    command = [compiler.tool("nvdisasm"), "--print-code", "--no-dataflow", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---- the description


def test_the_house_has_some() -> None:
    assert NAMED.get("fwd_hopper") is not None


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_it_is_described_so_that_it_binds(variant: Variant) -> None:
    portable = compiler.variant_named(variant.filed_under)
    assert compiler.is_gluon(variant) and variant.ways == (WARP_SPECIALIZED,)
    assert set(variant.descriptors) <= set(variant.tensors) <= set(compiler.parameters(variant))
    assert set(variant.grid_dimensions) <= set(variant.space.dimensions)
    assert {constraint.name for constraint in variant.space.constraints if not constraint.why} == set()
    assert fingerprint.kernel_hash(variant) != fingerprint.kernel_hash(portable)
    for name in (*variant.before, *variant.after):
        assert not compiler.variant_named(name).serves
    problem = Problem("bf16", 2, 6, 3, 1000, 777, 128, 128, True)
    spec = problem.specialization
    for config in legal(variant, spec)[::97]:
        assert variant.programs(problem, config, 132) >= 1
        values = compiler.constexprs(variant, spec, config)
        assert set(values) == set(compiler.constexpr_names(variant))
        workspaces = variant.workspaces(problem, config)
        for name in variant.descriptors:
            block = compiler.block_of(variant, spec, config, name)
            assert all(side & (side - 1) == 0 and 1 <= side <= 256 for side in block), (name, block)
            if name in workspaces:
                shape = workspaces[name] if not isinstance(workspaces[name], str) else workspaces[workspaces[name]]
                assert len(shape[0]) == len(block)
    # every dimension has some use: a value of it that no legal config takes is noise
    unused = {
        (name, value)
        for name, values in variant.space.dimensions.items()
        for value in values
        if not any(
            config[name] == value
            for dim in (64, 128, 256)
            for causal in (False, True)
            for config in legal(variant, bf16(dim, dim, causal))
        )
    }
    assert not unused


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_what_tma_cannot_address_is_refused_with_a_reason(variant: Variant) -> None:
    good = bf16(128, 128, True)
    config = variant.space.default(good, 90)
    assert limits.before_compile(variant, good, config, H200) is None
    for spec in (bf16(128, 128, True, aligned=False), Specialization("fp32", 64, 64, True)):
        refused = limits.before_compile(variant, spec, config, H200)
        assert refused is not None and len(refused.why) > 20, spec
        assert not legal(variant, spec)
    for gpu in ("a100", "rtx-4090", "b200"):
        refused = limits.before_compile(variant, good, config, gpus.named(gpu))
        assert refused is not None and refused.name == "architecture"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("dim", range(16, 257, 8))
def test_the_default_is_legal_at_every_head_dim(variant: Variant, dim: int) -> None:
    for causal in (False, True):
        for dtype in ("bf16", "fp16"):
            spec = Specialization(dtype, dim, dim, causal)
            config = variant.space.default(spec, 90)
            assert set(config) == set(variant.space.dimensions)
            assert all(config[name] in values for name, values in variant.space.dimensions.items())
            refused = limits.before_compile(variant, spec, config, H200)
            assert refused is None or not legal(variant, spec), refused


def test_constants_from_the_space_are_part_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from fa2tune.search_spaces import fwd_hopper as space

    variant = NAMED["fwd_hopper"]
    plain = fingerprint.kernel_hash.__wrapped__(variant)
    monkeypatch.setattr(space, "REGISTERS", {1: 232, 2: 232, 3: 160})
    assert fingerprint.kernel_hash.__wrapped__(variant) != plain


# ---- the binary


@every
def test_it_compiles_within_the_limits(case: Case) -> None:
    binary, compiled = built(case)
    assert limits.after_compile(binary, H200) is None, binary
    assert limits.blocks_per_sm(binary, H200) >= 1
    assert binary.num_warps > config_of(case)["num_warps"], "partitions count, not the default one alone"
    assert binary.registers * binary.num_warps * limits.WARP_THREADS <= H200.registers_per_sm
    assert binary.shared_bytes <= H200.shared_per_block
    assert not compiled.metadata.global_scratch_size


@every
def test_partitions_share_out_no_more_registers_than_there_are(case: Case) -> None:
    """Warps that ask for more than the block's pool holds wait for ever."""
    binary, compiled = built(case)
    found = re.search(r"requestedRegisters = array<i32: ([\d, ]+)>", compiled.asm["ttgir"])
    warps = [int(count) for count in re.findall(r"partition\d+\(.*?\) num_warps\((\d+)\)", compiled.asm["ttgir"])]
    assert found and warps
    asked = [int(registers) for registers in found[1].split(",")]
    # the workers' warps fill whole groups together; the default partition has what is left
    workers = sum(count * registers for count, registers in zip(warps, asked, strict=True))
    default = config_of(case)["num_warps"]
    padding = binary.num_warps - default - sum(warps)
    pool = binary.registers * binary.num_warps
    assert 0 <= padding < GROUP_WARPS
    assert workers + 24 * default + min(asked) * padding <= pool
    assert all(24 <= registers <= 256 and registers % 8 == 0 for registers in asked)


@every
def test_its_instructions_are_those_meant(case: Case) -> None:
    binary, _ = built(case)
    text = listing(binary.cubin_path)
    assert "HGMMA" in text and not re.search(r"\bHMMA", text)
    assert "UTMALDG" in text and "SYNCS" in text and "USETMAXREG" in text
    assert "LDGSTS" not in text
    assert "UTMASTG" in text, "results leave by TMA"
    reduce = config_of(case).get("REDUCE")
    assert ("UTMAREDG" in text) == (reduce == "tma")
    assert (WIDE_SUM in text) == (reduce == "vector")
    assert not re.search(rf"\b(?:RED|REDG|ATOMG)\.(?!{WIDE_SUM.partition('.')[2]})", text), (
        "nothing is summed a word at a time"
    )


@every
def test_no_product_waits_for_the_one_before(case: Case, tmp_path: Path) -> None:
    """ptxas says so (C7510 to C7514) where it has to serialise wgmma: then the kernel is lost."""
    from triton.backends.nvidia import compiler as backend

    _, compiled = built(case)
    source = tmp_path / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    # as Triton calls it: what 3.9 added changes what is serialised
    level = ["--regAllocOptLevel=2"] if "--regAllocOptLevel=2" in inspect.getsource(backend) else []
    said = subprocess.run(
        [backend.get_ptxas(90).path, "-v", *level, "--gpu-name=sm_90a", str(source), "-o", str(tmp_path / "kernel.cubin")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert not re.findall(r"C75\d\d", said.stderr + said.stdout)


@pytest.mark.parametrize("name", sorted(OVERLAPPING.keys() & NAMED.keys()))
def test_exponentials_run_beside_a_product_where_that_is_claimed(name: str) -> None:
    """Between an HGMMA and the wait for it stand most of the MUFU.EX2 of the main loop."""
    variant, (dim, changes) = NAMED[name], OVERLAPPING[name]
    spec = bf16(dim, dim, causal=False)
    config = {**variant.space.default(spec, 90), **changes}
    assert limits.before_compile(variant, spec, config, H200) is None
    binary = compiler.build(variant, spec, config, 90)
    loops = [loop for loop in sass.counts(binary.cubin_path) if loop.mufu]
    main = min(loops, key=lambda loop: loop.products)
    mufu = sass.PHASE.index("mufu")
    beside = sum(phase[mufu] for phase in main.phases if phase[0] != 0)
    assert beside >= 0.8 * main.mufu, main.phases
