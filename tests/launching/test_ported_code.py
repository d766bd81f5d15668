"""Code of GPUs without wgmma on another one: which may stand for which, what is assembled, whose rows calls get. No GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fa2tune import gpus
from fa2tune.calling import dispatch
from fa2tune.compiling import compiler
from fa2tune.compiling.registry import variant_named
from fa2tune.launching import launch, ported
from fa2tune.launching.image import Image
from fa2tune.spec.problem import Specialization

SPEC = Specialization("bf16", 64, 64, "full")


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that goes back to its GPU's own code."""
    monkeypatch.setattr(ported, "_running", 0)
    monkeypatch.setattr(ported, "_for", None)
    dispatch.gpu_of.cache_clear()
    yield
    dispatch.gpu_of.cache_clear()


@pytest.mark.parametrize(
    ("name", "here", "can"),
    [("a100", 90, True), ("a10", 90, True), ("l4", 90, True), ("rtx-5090", 90, True), ("h100", 90, False), ("b200", 90, False),
     ("a100", 80, False), ("a100", 100, False)],
)  # fmt: skip
def test_which_gpu_stands_for_which(name: str, here: int, can: bool) -> None:
    assert ported.can_stand_for(gpus.named(name).arch, here) == can


def _arch(cubin: bytes) -> int:
    """Of an ELF header: which sm."""
    (flags,) = struct.unpack_from("<I", cubin, 48)
    return flags & 0xFF if flags & 0xFF else flags >> 8 & 0xFF


def test_the_same_ptx_is_assembled_for_the_host_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = variant_named("sm80/bwd_finish")
    config = variant.space.default(SPEC, 80)
    compiled = compiler.compile_kernel(variant, SPEC, config, ported.CODE)
    code = ported.assembled(compiled, 90)
    assert code.startswith(b"\x7fELF")
    assert (_arch(code), _arch(compiled.asm["cubin"])) == (90, 80)

    def fails(*asked: object, **more: object) -> None:
        raise AssertionError("assembled once more")

    ported._assembler()
    monkeypatch.setattr("subprocess.run", fails)
    assert ported.assembled(compiled, 90) == code


def test_what_ptxas_refuses_is_a_compile_error() -> None:
    ptx = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry kernel() { nonsense; }\n"
    with pytest.raises(compiler.CompileError, match="ptxas refuses the PTX of sm_80 for sm_90"):
        ported.assembled(SimpleNamespace(asm={"ptx": ptx}), 90)


def test_a_process_that_has_begun_runs_its_code_and_gets_its_rows(apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "capability_of", lambda index: 90)
    assert (ported.running(), launch.arch_of(0), ported.running_for()) == (0, 90, None)
    ported.begin(gpus.named("rtx-4090"))
    assert launch.arch_of(0) == 80
    assert dispatch.gpu_of(0).name == "rtx-4090"


@pytest.mark.parametrize(
    ("name", "shared", "warps", "blocks"),
    [("a100", 64, 4, 2), ("a100", 96, 4, 1), ("a100", 30, 4, 5), ("a10", 48, 4, 2), ("a10", 90, 8, 1), ("a10", 8, 16, 3),
     ("a100", 0, 8, 8)],
)  # fmt: skip
def test_as_many_blocks_on_a_multiprocessor(name: str, shared: int, warps: int, blocks: int) -> None:
    """Shared memory in KiB; an H200 would hold more."""
    other, here = gpus.named(name), gpus.named("h200")
    image = Image("kernel", b"", shared * 1024, warps, 1, False, False, ())
    found = ported.crowded(image, other, here)
    assert image.shared <= found.shared <= here.shared_per_block
    assert here.shared_per_sm // (found.shared + ported.RESERVED) == blocks


def test_what_is_loaded_is_what_was_assembled(apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Function:
        def __init__(self, image: launch.Image, *rest: object) -> None:
            loaded.append((image.cubin, rest))

    monkeypatch.setattr(launch, "Function", Function)
    monkeypatch.setattr(launch, "capability_of", lambda index: 90)
    monkeypatch.setattr(launch.cuda, "may_load", lambda: True)
    monkeypatch.setattr(launch.precompiled, "find", lambda *asked: pytest.fail("looked for the GPU's own code"))
    ported.begin()
    variant = variant_named("sm80/bwd_finish")
    config = tuple(sorted(variant.space.default(SPEC, 80).items()))
    launch.load.__wrapped__(variant, SPEC, config, 0)
    ((cubin, _),) = loaded
    assert _arch(cubin) == 90
