"""A plugin of pytest that compiles what the tests of this folder launch, without a GPU, into Triton's cache.

    PYTHONPATH=tests:tests/gpu TRITON_CACHE_DIR=DIR python -O -m pytest --assert=plain -p compile_ahead tests/gpu

Most of these tests' time is compiling, which needs no GPU. ``AHEAD=DIR .ci/gpu`` begins with what is compiled so, by the same
Python, Triton and sources. Without assertions (-O) a test comes to its end here, whatever it computes. What its processes
launch is compiled where they run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from benchmark_scripts import script

from fa2tune.compiling import compiler, registry

no_gpu, ahead = script("no_gpu"), script("ahead")
_stand_in = no_gpu.gpu()


class Compilers:
    """In place of ``hopper_cases.compilers``: takes what is to be compiled for launched."""

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, _compile: Any, name: str, spec: Any, config: Any, _arch: int) -> Future[str]:
        variant = registry.variant_named(name)
        no_gpu.launched[variant, spec, tuple(sorted(compiler.binary_config(variant, config).items()))] = None
        done = Future[str]()
        done.set_result("")
        return done


def pytest_configure() -> None:
    if __debug__:
        raise pytest.UsageError("compile_ahead: run python -O, else assertions end tests early")
    _stand_in.__enter__()


def pytest_report_header() -> str:
    return "compile_ahead: against a stand-in for a GPU; that tests pass means nothing"


def pytest_collection_modifyitems() -> None:
    for module in list(sys.modules.values()):
        if getattr(vars(module).get("compilers"), "__module__", "") == "hopper_cases":
            module.compilers = Compilers  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with no_gpu.tensors():
        return (yield)


def pytest_sessionfinish() -> None:
    _stand_in.__exit__(None, None, None)
    ahead.compile_all(no_gpu.launched, no_gpu.GPU)
    print("compile_ahead: no test was checked")
