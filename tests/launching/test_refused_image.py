"""Machine code of a file that the driver does not take: the kernel is compiled instead, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fa2tune.compiling import binaries, compiler, registry
from fa2tune.compiling.compiler import NoTritonError
from fa2tune.launching import cuda, launch, precompiled
from fa2tune.launching.cuda import CudaError
from fa2tune.launching.image import Image
from fa2tune.spec.problem import Specialization

SPEC = Specialization("bf16", 64, 64, "causal")
FORWARD = registry.portable_of("fwd")
CONFIG = FORWARD.space.default(SPEC, 80) | {"LOADS": "pointer"}
BINARY = compiler.binary_config(FORWARD, CONFIG)
POINT = tuple(sorted(BINARY.items()))
IN_FILE = Image("of_a_file", b"what no driver takes", 0, 4, 1, False, False, ())
COMPILED = Image("compiled", b"what Triton made", 0, 4, 1, False, False, ())
OLD_DRIVER = "CUDA error 222 while loading of_a_file: the provided PTX was compiled with an unsupported toolchain"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A trusted file with this kernel, whose image the driver refuses. Nothing is compiled."""
    path = tmp_path / "sm_80.kernels"
    code, about = precompiled.code_of(FORWARD, SPEC, BINARY, 80), precompiled.about(FORWARD, SPEC, BINARY, 80)
    new = binaries.New(code, about, precompiled.launch_of(IN_FILE), IN_FILE.cubin)
    binaries.save(path, binaries.file_bytes({precompiled.file_key(code, about["triton"]): new}, {}))
    monkeypatch.setenv("FA2TUNE_KERNELS", str(path))
    monkeypatch.setattr(cuda, "may_load", lambda: True)
    monkeypatch.setattr(launch, "arch_of", lambda device: 80)
    monkeypatch.setattr(launch, "Function", loaded)
    monkeypatch.setattr(launch, "image_of", lambda made: COMPILED)
    monkeypatch.setattr(compiler, "compile_kernel", lambda *asked: None)
    monkeypatch.setattr(precompiled, "_refused", {})
    binaries.forget()
    yield path
    binaries.forget()


def loaded(image: Image, kinds: Any, device: int, origin: str) -> tuple[Image, str]:
    if image == IN_FILE:
        raise CudaError(OLD_DRIVER, 222)
    return image, origin


def load() -> Any:
    return launch.load.__wrapped__(FORWARD, SPEC, POINT, 0)


def test_it_is_compiled_and_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fa2tune"):
        image, origin = load()
    assert image == COMPILED and origin == f"compiled: {path}: {OLD_DRIVER}"
    assert caplog.messages == [f"fwd kernels of {path} are not used: {OLD_DRIVER}"]


def test_explain_says_so_from_then_on(path: Path) -> None:
    assert precompiled.find(FORWARD, SPEC, BINARY, 80)[0] == IN_FILE
    load()
    assert precompiled.find(FORWARD, SPEC, BINARY, 80) == (None, f"{path}: {OLD_DRIVER}")


def test_memory_that_runs_out_says_nothing_of_the_code(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(image: Image, *rest: Any) -> Any:
        if image == IN_FILE:
            raise CudaError("CUDA error 2 while loading of_a_file: out of memory", cuda.OUT_OF_MEMORY)
        return image

    monkeypatch.setattr(launch, "Function", full)
    assert load() == COMPILED
    assert precompiled.find(FORWARD, SPEC, BINARY, 80)[0] == IN_FILE


def test_without_a_triton_the_error_names_kernel_and_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*asked: Any) -> Any:
        raise NoTritonError(ModuleNotFoundError("No module named 'triton'"), "fwd")

    monkeypatch.setattr(compiler, "compile_kernel", none)
    with pytest.raises(NoTritonError) as error:
        load()
    said = str(error.value)
    assert said.startswith(
        f"fa2tune has no machine code of fwd for bf16, head dim 64, mask causal, sm_80 ({path}: {OLD_DRIVER})"
    )


def test_too_little_shared_memory_is_told_without_a_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "triton.runtime.errors", None)
    found = cuda._out_of_resources(200_000, 100_000, "shared memory")
    assert isinstance(found, compiler.CompileError) and "needed 200000, this GPU has 100000" in str(found)
