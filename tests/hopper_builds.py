"""Binaries for tests/test_hopper.py, compiled by as many processes as there are cores: one after the other they are most of
what the suite takes."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa2tune.compiling import compiler
from fa2tune.compiling.compiler import Binary
from fa2tune.problem import Specialization

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
        return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([^;]+?)\s*;", self.listing, re.MULTILINE)


def _build(asked: Asked, folder: str) -> Built:
    """In a process of the pool, in a cache of its own: only where Triton does call ptxas can it be heard."""
    name, spec, settings = asked
    os.environ |= {"TRITON_CACHE_DIR": tempfile.mkdtemp(dir=folder), "TRITON_DUMP_PTXAS_LOG": "1"}
    with redirect_stdout(io.StringIO()) as said:
        binary = compiler.build(compiler.variant_named(name), spec, dict(settings), 90)
    command = [compiler.tool("nvdisasm"), "--print-code", "--no-dataflow", binary.cubin_path]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Built(binary, said.getvalue(), Path(binary.cubin_path).with_suffix(".ttgir").read_text(), listing)


@contextmanager
def builder(expected: Sequence[Asked]) -> Iterator[Callable[[Asked], Built]]:
    """What is asked for, each compiled once. ``expected``: in the order in which it will be; what comes next is compiled
    meanwhile."""
    workers = len(os.sched_getaffinity(0))
    places = {asked: place for place, asked in enumerate(expected)}
    jobs: dict[Asked, Future[Built]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
    ):

        def built(asked: Asked) -> Built:
            place = places[asked]
            for near in expected[place : place + 2 * workers]:
                if near not in jobs:
                    jobs[near] = pool.submit(_build, near, folder)
            return jobs[asked].result()

        yield built
        pool.shutdown(cancel_futures=True)
