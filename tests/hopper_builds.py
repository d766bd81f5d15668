"""Binaries for the Hopper tests of tests/compiling, compiled by as many processes as there are cores: one after the other they
are most of what the suite takes."""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, operandcheck, registry, sass
from fa2tune.compiling.compiler import Binary
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import Variant

TESTED = triton.__version__.startswith("3.6.")  #: whether the compiler is that of constraints.txt
#: Words of a thread of a forward that may be spilled outside of its loops.
MOST_SPILLS = 14
WORKERS = len(os.sched_getaffinity(0))
#: Variant's name, specialization, settings of a config.
Asked = tuple[str, Specialization, tuple[tuple[str, Any], ...]]


@dataclass(frozen=True)
class Built:
    binary: Binary
    said: str  #: by ptxas
    ttgir: str
    listing: str  #: of the machine code

    @property
    def operations(self) -> list[str]:
        """The machine code, in its order, without predicates."""
        found = map(sass.INSTRUCTION.match, self.listing.splitlines())
        return [f"{one[3]} {one[4]}".strip() for one in found if one]


def _build(asked: Asked, folder: str) -> Built:
    """In a process of the pool, in a cache of its own: only where Triton does call ptxas can it be heard."""
    name, spec, settings = asked
    os.environ |= {"TRITON_CACHE_DIR": tempfile.mkdtemp(dir=folder), "TRITON_DUMP_PTXAS_LOG": "1"}
    with redirect_stdout(io.StringIO()) as said:
        binary = compiler.build(registry.variant_named(name), spec, dict(settings), 90)
    command = [compiler.tool("nvdisasm"), "--print-code", "--no-dataflow", binary.cubin_path]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Built(binary, said.getvalue(), Path(binary.cubin_path).with_suffix(".ttgir").read_text(), listing)


@functools.cache
def _pool() -> ProcessPoolExecutor:
    """One for all builders: a process imports torch and Triton, three seconds of a core."""
    return ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"))


def asked_of(variant: Variant, spec: Specialization, config: Config) -> Asked:
    """The binary of a config."""
    return variant.name, spec, tuple(sorted(compiler.binary_config(variant, config).items()))


def chosen(request: pytest.FixtureRequest, parameter: str = "case") -> list[Any]:
    """The cases of this file whose tests run, each once, in their order. Those of the others need no binaries."""
    found: list[Any] = []
    for item in request.session.items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and parameter in values and values[parameter] not in found:
            found.append(values[parameter])
    return found


def of_keys(listing: str, config: Config) -> list[Any]:
    """The loops over key blocks of a forward."""
    return [loop for loop in sass.loops(listing) if loop.mufu >= config["BLOCK_N"] // 2]


def check_limits(found: Built, variant: Variant, spec: Specialization, config: Config, held: int) -> None:
    """A forward's binary fits an H200, whose multiprocessors hold so many programs at least."""
    h200 = gpus.named("h200")
    assert limits.before_compile(variant, spec, config, h200) is None
    assert limits.after_compile(found.binary, h200) is None
    assert limits.blocks_per_sm(found.binary, h200) >= held
    assert not operandcheck.unsound(found.listing)
    if TESTED:
        assert not re.findall(r"C75\d\d", found.said), "products one after the other"


def check_loops_do_not_spill(found: Built, config: Config) -> None:
    """Over keys: a loop for each warpgroup at least."""
    spilled = sorted(loop.local_bytes for loop in of_keys(found.listing, config))
    assert len(spilled) >= config["BLOCK_M"] // 64 and spilled[0] == 0
    if TESTED:
        assert spilled[-1] == 0 and found.binary.spills <= MOST_SPILLS


@contextmanager
def builder(expected: Sequence[Asked]) -> Iterator[Callable[[Asked], Built]]:
    """What is asked for, each compiled once. ``expected``: in the order in which it will be; what comes next is compiled
    meanwhile."""
    places = {asked: place for place, asked in enumerate(expected)}
    jobs: dict[Asked, Future[Built]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def built(asked: Asked) -> Built:
            place = places[asked]
            for near in expected[place : place + 2 * WORKERS]:
                if near not in jobs:
                    jobs[near] = _pool().submit(_build, near, folder)
            return jobs[asked].result()

        yield built
        wait([job for job in jobs.values() if not job.cancel()])  # they write there


_SEVERAL = {"64": 2, "WIDE": 2, "CS2R": 2, "2": 2, "128": 4, "4": 4}


def written_under_way(operations: Sequence[str]) -> tuple[list[str], int]:
    """(Operations that write a register which a product under way may still read, products whose operand in registers is ones
    in bfloat16), in the order of the code."""
    under_way: list[tuple[int, set[int]]] = []  # group, registers
    ones: set[int] = set()  # registers that hold two of them
    groups, of_ones, wrong = 0, 0, list[str]()
    for operation in operations:
        name, _, operands = operation.partition(" ")
        target = re.match(r"\s*(?:U?P[T\d]+, )*R(\d+)\b", operands)
        if target and not name.startswith(("ST", "RED", "R2UR")):
            parts, product = name.split("."), re.match(r"HGMMA\.64x(\d+)x", name)
            size = 1 if "32" in parts else max(_SEVERAL.get(part, 1) for part in parts)
            written = set(range(int(target[1]), int(target[1]) + (int(product[1]) // 2 if product else size)))
            wrong += [operation for _, read in under_way if written & read]
            ones = ones | written if operands.endswith("0x3f803f80") else ones - written
        if name.startswith("HGMMA"):
            if own := re.match(r"\s*R\d+, R(\d+), gdesc", operands):
                read = set(range(int(own[1]), int(own[1]) + 4))
                under_way.append((groups, read))
                of_ones += read <= ones
            groups += "gsb0" in operands
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.rpartition("0x")[2], 16)
            under_way = [one for one in under_way if one[0] >= groups - left]
    return wrong, of_ones
