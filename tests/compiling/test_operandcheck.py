"""The operand check: addresses of tensor-core operands that are not computed on every path."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from fa2tune import gpus, logs
from fa2tune.compiling import compiler, limits, operandcheck, registry, sass
from fa2tune.search_spaces.portable import fwd_split
from fa2tune.spec import maskfile
from fa2tune.spec.extent import RAGGED
from fa2tune.spec.problem import Specialization
from fa2tune.spec.variant import DESCRIPTOR
from fa2tune.tuning.search import compile_check

FOUND = (operandcheck.UnsoundOperand(0x90, 33, ("nothing",)),)

PRODUCT = "HGMMA.64x128x16.F32 R24, gdesc[UR32], R24"
#: both of what an address is: its low word and, with the carry, its high one
WORKED_OUT = ("UIADD3 UR32, UP0, UR8, 0x2, URZ", "UIADD3.X UR33, UR9, 0x40000040, URZ, UP0, !UPT")
BEFORE = ("R2UR UR8, R0", "UMOV UR9, URZ", "UMOV UR34, 0x10", "UMOV UR35, 0x40000040")


def listing(*lines: str, table: tuple[int, ...] = ()) -> str:
    """A disassembly as nvdisasm writes it, of instructions and labels, and of a table of addresses."""
    address, found = 0, ['\t.section .text.kernel,"ax",@progbits']
    for line in lines:
        if line.endswith(":"):
            found.append(line)
        else:
            found.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    data = ", ".join(f"0x{byte:02x}" for entry in table for byte in entry.to_bytes(4, "little"))
    return "\n".join([*found, "\t.section .nv.constant2.kernel", *([f"        .byte {data}"] if table else [])])


def registers(*lines: str, table: tuple[int, ...] = ()) -> set[int]:
    return {one.register for one in operandcheck.unsound(listing(*lines, table=table))}


def test_an_address_from_the_way_into_a_loop_that_may_be_passed_by() -> None:
    """What ptxas 12.8 made of two loops over one tile."""
    assert registers(
        *BEFORE, "@!P0 BRA `(.L_x_6)", *WORKED_OUT, ".L_x_9:", PRODUCT, "@P1 BRA `(.L_x_9)", ".L_x_6:", PRODUCT, "EXIT"
    ) == {32, 33}


def test_a_value_of_long_before() -> None:
    stale = ("S2UR UR33, SR_CgaCtaId", "UMOV UR32, 0x400")
    found = operandcheck.unsound(listing(*BEFORE, *stale, "@P0 BRA `(.L_x_1)", *WORKED_OUT, ".L_x_1:", PRODUCT, "EXIT"))
    assert [one.register for one in found] == [33]
    assert str(found[0]) == (
        "HGMMA at 0x90 takes UR33 from S2UR UR33, SR_CgaCtaId or UIADD3.X UR33, UR9, 0x40000040, URZ, UP0, !UPT"
    )


@pytest.mark.parametrize("other", ["UIMAD UR8, UR4, UR5, URZ", "ULDC UR8, c[0x0][0x3d0]"])
def test_a_value_that_is_no_address(other: str) -> None:
    """A product, an argument of the kernel: what ptxas 12.8 took for V's addresses in a portable forward."""
    assert registers(other, *BEFORE[1:], *WORKED_OUT, PRODUCT, "EXIT") == {8}
    with_a_base = "UIMAD UR8, UR4, 0x400, UR5"
    assert not registers(with_a_base, *BEFORE[1:], *WORKED_OUT, PRODUCT, "EXIT")
    high = ("UIMAD UR9, UR4, UR5, URZ", *BEFORE[2:])
    assert not registers(BEFORE[0], *high, *WORKED_OUT, PRODUCT, "EXIT")  # the high word holds no address


def test_it_is_followed_over_copies_and_offsets() -> None:
    more = (
        "UIADD3 UR16, UP0, UR32, 0x2, URZ",
        "UIADD3.X UR17, UR33, URZ, URZ, UP0, !UPT",
        "UMOV UR18, UR34",
        "UMOV UR19, UR35",
    )
    product = "HGMMA.64x128x16.F32 R24, gdesc[UR16], R24, gsb0"
    assert registers(*BEFORE, "@P0 BRA `(.L_x_1)", *WORKED_OUT, ".L_x_1:", *more, product, "EXIT") == {32, 33}


@pytest.mark.parametrize(
    "lines",
    [
        (*BEFORE, *WORKED_OUT, ".L_x_1:", PRODUCT, "@P0 BRA `(.L_x_1)", PRODUCT, "EXIT"),
        # each way works it out
        (*BEFORE, "@P0 BRA `(.L_x_1)", *WORKED_OUT, "BRA `(.L_x_2)", ".L_x_1:", *WORKED_OUT, ".L_x_2:", PRODUCT, "EXIT"),
        # kept in a register of the threads, and fetched again
        (*BEFORE, *WORKED_OUT, "MOV R9, UR33", ".L_x_1:", PRODUCT, "S2UR UR33, SR_CgaCtaId", "R2UR UR33, R9",
         "@P0 BRA `(.L_x_1)", "EXIT"),
        # the way past it ends
        (*BEFORE, "@P0 BRA `(.L_x_1)", *WORKED_OUT, PRODUCT, "EXIT", ".L_x_1:", "EXIT"),
        # under one predicate and its contrary
        (*BEFORE, *(f"@{p} {one}" for p in ("UP1", "!UP1") for one in WORKED_OUT), PRODUCT, "EXIT"),
        # the same over a special register, and a sum with one
        (*BEFORE, "S2UR UR32, SR_CTAID.X", *(f"@{p} {one}" for p in ("UP1", "!UP1") for one in WORKED_OUT), PRODUCT, "EXIT"),
        ("S2UR UR8, SR_CTAID.X", *BEFORE[1:], *WORKED_OUT, PRODUCT, "EXIT"),
        # registers hold A, so the first two of the descriptor say nothing
        ("UMOV UR34, 0x10", "UMOV UR35, 0x40000040", "HGMMA.64x64x16.F32 R88, R148, gdesc[UR32].tnspB, R88", "EXIT"),
        ("UMOV UR34, 0x10", "UMOV UR35, 0x40000040", "HGMMA.64x64x16.F32 R88, R148.reuse, gdesc[UR32].tnspB, R88", "EXIT"),
        # a jump that cannot be followed: nothing is said
        (PRODUCT, "CALL.REL.NOINC `(.L_x_1)", ".L_x_1:", "EXIT"),
        ("HMMA.16816.F32 R4, R4, R8, R4", "EXIT"),
    ],
)  # fmt: skip
def test_sound_code(lines: tuple[str, ...]) -> None:
    assert not registers(*lines)


@pytest.mark.parametrize("jump", ["BRX R4 -0x50", "BRXU UR6 -0x50"])
def test_jumps_by_table(jump: str) -> None:
    """A partition that the table names, behind an exit that nothing passes."""
    code = [*BEFORE, jump, "EXIT", PRODUCT, "EXIT"]
    assert registers(*code, table=(6 * 16,)) == {32, 33}
    assert not registers(*code, table=(5 * 16,))
    assert not registers(*code)  # no table: it cannot be followed


@pytest.mark.parametrize(
    ("dtype", "causal", "rescale", "rows", "numbered"),
    [
        ("fp16", False, "never", 128, True),  # a value of long before
        ("fp16", False, "never", 192, False),  # none at all
        ("bf16", True, "never", 192, True),  # three loops
        ("bf16", True, "lazy", 128, True),
        ("fp16", True, "now", 128, False),
    ],
)
def test_the_forward_that_showed_it(dtype: str, causal: bool, rescale: str, rows: int, numbered: bool) -> None:
    """Several loops over Q in shared memory, with two Q tiles; under a mask since P is carried as words."""
    variant = registry.variant_named("sm90/fwd")
    spec = Specialization(dtype, 64, 64, "causal" if causal else "full")
    config = {
        **variant.space.default(spec, 90),
        "RESCALE": rescale,
        "Q_STAGES": 2,
        "BLOCK_M": rows,
        "NUMBERED": numbered,
    }
    h200 = gpus.named("h200")
    assert limits.before_compile(variant, spec, config, h200) is None
    binary = compiler.build(variant, spec, config, 90)
    assert operandcheck.check(binary) == ()


#: Masks that rows of another serve, so that no search compiles them, where a tile's blocks are counted from the first key.
#: Those whose file has no hooks for Gluon are not computed by this kernel.
SERVED = [
    name for name in maskfile.names() if name not in maskfile.ROW_MASKS and not maskfile.mask_named(name).left
    and registry.refused_mask(registry.variant_named("sm90/fwd"), Specialization("bf16", 64, 64, name)) is None
]  # fmt: skip


@pytest.mark.parametrize("mask", SERVED)
def test_masks_that_rows_of_another_serve(mask: str) -> None:
    """Two Q tiles of 128 rows in shared memory, as a row of head dim 64 names them: where the blocks of a tile are known to be
    1 or more, the address of one loop reaches another."""
    variant = registry.variant_named("sm90/fwd")
    spec = Specialization("bf16", 64, 64, mask)
    config = {
        **variant.space.default(spec, 90),
        "BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 3, "Q_STAGES": 2, "PINGPONG": True, "NUMBERED": True, "RESCALE": "lazy",
        "Q_IN_REGISTERS": False, "O_THROUGH": "own", "maxnreg": 0,
    }  # fmt: skip
    assert limits.before_compile(variant, spec, config, gpus.named("h200")) is None
    assert operandcheck.check(compiler.build(variant, spec, config, 90)) == ()


@pytest.mark.parametrize("dims", [(104, 32), (112, 24), (256, 16), (32, 128)], ids=str)
def test_portable_forwards_whose_k_and_v_are_swizzled_differently(dims: tuple[int, int]) -> None:
    """In one stage, where V takes the place of K, V's addresses were wrong."""
    spec = Specialization("bf16", *dims, "full")
    portable = registry.portable_of("fwd")
    wanted = [(portable, portable.space.default(spec, 90))]
    split = registry.variant_named("portable/fwd_split")
    wanted += [(split, fwd_split.config_of(spec, 90, True, rows, 1)) for rows in fwd_split.tiles(spec, 90)]
    for variant, config in wanted:
        assert config["LOADS"] == DESCRIPTOR
        assert operandcheck.check(compiler.build(variant, spec, config, 90)) == (), config


@pytest.mark.parametrize("mask", ["full", "causal", "band"])
@pytest.mark.parametrize("dims", [(64, 16), (64, 32), (128, 16), (120, 24)], ids=str)
def test_default_forwards_by_pointer_whose_v_is_narrow(dims: tuple[int, int], mask: str) -> None:
    """Of tensors that TMA cannot address: nothing else would serve them."""
    spec = Specialization("fp16", *dims, mask, aligned=False)
    portable, split = registry.portable_of("fwd"), registry.variant_named("portable/fwd_split")
    assert operandcheck.check(compiler.build(portable, spec, portable.space.default(spec, 90), 90)) == ()
    for rows in fwd_split.tiles(spec, 90) if mask == "full" else ():
        config = fwd_split.config_of(spec, 90, False, rows, 4)
        assert operandcheck.check(compiler.build(split, spec, config, 90)) == (), config


def test_the_packed_forward_that_showed_it() -> None:
    """Where the blocks of a tile were known to be 1 or more: two Q tiles of 128 rows, three loops."""
    variant = registry.variant_named("sm90/fwd")
    spec = Specialization("fp16", 64, 64, "causal", extent=RAGGED)
    config = {**variant.space.default(spec, 90), "BLOCK_M": 128, "Q_STAGES": 2}
    assert variant.space.broken(config, spec, 90) is None
    assert operandcheck.check(compiler.build(variant, spec, config, 90)) == ()


def test_a_candidate_that_shows_it_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    found = operandcheck.UnsoundOperand(0x90, 33, ("nothing", "UMOV UR33, URZ"))
    monkeypatch.setattr(operandcheck, "check", lambda binary: (found,))
    variant = registry.portable_of("fwd")
    spec = Specialization("bf16", 64, 64, "full")
    result = compile_check.compile_check("fwd", spec, variant.space.default(spec, 80), gpus.named("a100-sxm-80gb"))
    assert result.status == "miscompiled" and "HGMMA at 0x90 takes UR33 from nothing or UMOV UR33, URZ" in result.why


@pytest.mark.parametrize(
    "spec",
    [
        Specialization("bf16", 64, 64, "causal_top_left"),
        Specialization("bf16", 64, 64, "causal", extent=RAGGED),
        Specialization("bf16", 64, 64, "causal"),  # a row's mask: yet another Triton makes other code of it
    ],
    ids=str,
)
def test_what_is_compiled_for_a_launch_is_checked(monkeypatch: pytest.MonkeyPatch, spec: Specialization) -> None:
    """Unsound code is a CompileError, which a call answers with a portable row."""
    variant = registry.variant_named("sm90/fwd")
    compiled = SimpleNamespace(metadata_group={"k.json": "k.json", "k.cubin": "a/k.cubin"})
    asked: list[str] = []
    monkeypatch.setattr(compiler, "compile_kernel", lambda *_: compiled)
    monkeypatch.setattr(operandcheck, "_check", lambda path: asked.append(path) or ())
    assert operandcheck.compile_kernel(variant, spec, {}, 90) is compiled and asked == ["a/k.cubin"]
    assert operandcheck.compile_kernel(registry.portable_of("fwd"), spec, {}, 90) is compiled and len(asked) == 2
    assert operandcheck.compile_kernel(variant, spec, {}, 100) is compiled and len(asked) == 2
    monkeypatch.setattr(operandcheck, "_check", lambda _: FOUND)
    with pytest.raises(compiler.CompileError, match="is miscompiled: HGMMA at 0x90 takes UR33 from nothing"):
        operandcheck.compile_kernel(variant, spec, {}, 90)


@pytest.fixture
def cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for machine code, in a folder of Triton's cache; compiling makes it."""
    path = tmp_path / "k.cubin"
    path.write_bytes(b"code")
    monkeypatch.setattr(compiler, "compile_kernel", lambda *_: SimpleNamespace(metadata_group={path.name: path}))
    logs.warn_once.cache_clear()
    return path


def launched(mask: str = "band") -> None:
    operandcheck.compile_kernel(registry.variant_named("sm90/fwd"), Specialization("bf16", 64, 64, mask), {}, 90)


def failing(command: list[str], **_: object) -> object:
    raise subprocess.CalledProcessError(255, command, stderr="nvdisasm fatal: not for this architecture\n")


@pytest.mark.parametrize("there", [False, True])
def test_without_a_disassembler_code_runs_unchecked_and_one_warning_says_so(
    cubin: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, there: bool
) -> None:
    """None at all, or one that does not know the code."""
    if there:
        monkeypatch.setattr(subprocess, "run", failing)
    else:
        monkeypatch.setattr(shutil, "which", lambda _: None)
    for number in range(2):
        cubin.write_bytes(b"%d" % number)
        operandcheck._check.cache_clear()
        launched()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "without the check for operands at wrong addresses" in record.message
    said = (
        "ended with status 255: nvdisasm fatal: not for this"
        if there
        else "nvdisasm is missing (looked at TRITON_NVDISASM"
    )
    assert said in record.message
    assert [*cubin.parent.iterdir()] == [cubin]


def test_a_verdict_is_stored_beside_the_code(cubin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of this code, and of this check."""
    runs: list[str] = []
    found = [FOUND]
    monkeypatch.setattr(sass, "disassembly", lambda path: runs.append(path) or "")
    monkeypatch.setattr(operandcheck, "unsound", lambda listing: found[0])

    def verdict() -> tuple[operandcheck.UnsoundOperand, ...]:
        operandcheck._check.cache_clear()  # as another process
        return operandcheck._check(str(cubin))

    assert verdict() == verdict() == FOUND and len(runs) == 1
    found[0] = ()
    assert verdict() == FOUND and len(runs) == 1
    with pytest.raises(compiler.CompileError):
        launched()
    monkeypatch.setattr(operandcheck, "_version", lambda: "of another check")
    assert verdict() == verdict() == () and len(runs) == 2
    cubin.write_bytes(b"other code")
    assert verdict() == verdict() == () and len(runs) == 3
    for damaged in (
        "",
        "[",
        "{}",
        "7",
        json.dumps(["of another check", hashlib.sha256(b"other code").hexdigest(), [3]]),
    ):
        cubin.with_suffix(".operands").write_text(damaged)
        assert verdict() == ()
    assert len(runs) == 8


def test_a_folder_that_cannot_be_written_costs_time_only(cubin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "disassembly", lambda path: "")
    cubin.with_suffix(".operands").mkdir()
    operandcheck._check.cache_clear()
    assert operandcheck._check(str(cubin)) == ()


def test_tools_are_found_where_triton_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variable, its wheel, and then PATH."""
    named, on_path, triton_ = tmp_path / "named", tmp_path / "bin" / "nvdisasm", tmp_path / "triton"
    wheel = triton_ / "backends" / "nvidia" / "bin" / "nvdisasm"
    for path in (named, on_path, wheel):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)
    monkeypatch.setattr("triton.__file__", str(triton_ / "__init__.py"))
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setenv("TRITON_NVDISASM_PATH", str(named))
    assert compiler.tool("nvdisasm") == str(named)
    monkeypatch.setenv("TRITON_NVDISASM_PATH", str(tmp_path / "missing"))
    assert compiler.tool("nvdisasm") == str(wheel)
    wheel.unlink()
    assert compiler.tool("nvdisasm") == str(on_path)
    on_path.unlink()
    with pytest.raises(FileNotFoundError, match=r"nvdisasm is missing \(looked at TRITON_NVDISASM_PATH, in "):
        compiler.tool("nvdisasm")
