"""Races two Tritons on the benchmark grid: shipped machine code under a newer one against a compile by the rows' own.

    python benchmarks/triton_grid.py FOLDER --newer FOLDER_OF_TRITON --out FILE [--seconds 180]

FOLDER is that of release_check.py, whose step make has run: FOLDER/site is the package with its machine code. 16k tokens,
hidden size 2048: lengths 512 to 16k, head dims 64, 128 and 256, both masks, forward and backward, bf16. Two processes on one
GPU; each cell is timed in turns, one process at a time, in new memory and a new CUDA graph again and again, since the place of
tensors in memory changes times by a percent. The ratio is that of the medians: compiled by the installed Triton over shipped
machine code. A cell below --goal is timed again, as often as --again says, and all of its turns count. The cells in FILE are
kept, so a run that ends early is continued.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from release_check import about, environment

TOKENS, HIDDEN = 16384, 2048
CELLS = [
    (dim, mask, length, direction)
    for direction in ("forward", "backward")
    for dim in (64, 128, 256)
    for mask in ("full", "causal")
    for length in (512, 1024, 2048, 4096, 8192, 16384)
]
GRAPH_SECONDS = 0.0012  #: of one replay
#: Pause before a turn, in replays: a GPU that works all the time is at its power limit, and its clock wanders by 5 %.
PAUSE = 5
BURSTS = 6  #: turns in the same memory
MOST_SPACERS = 48  #: of 2 MB each, so that tensors lie in other pages every time
GOAL = 0.99


class Cell:
    """One call of the grid as a CUDA graph, in a child."""

    def __init__(self, dim: int, mask: str, length: int, direction: str) -> None:
        import torch

        import fa2tune
        from fa2tune.measuring import timing

        self.torch, self.attention, self.timing = torch, fa2tune.attention, timing
        self.shape = (TOKENS // length, HIDDEN // dim, length, dim)
        self.causal, self.backward = mask == "causal", direction == "backward"
        self.launches, self.seconds = 0, GRAPH_SECONDS

    def fresh(self) -> None:
        """New tensors, a new graph."""
        torch = self.torch
        self.graph = self.kept = self.spacers = None
        torch.cuda.empty_cache()
        count = random.randrange(MOST_SPACERS)
        self.spacers = [torch.empty(2 << 20, device="cuda", dtype=torch.int8) for _ in range(count)]
        q, k, v, do = (torch.randn(self.shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        inputs = [one.requires_grad_(self.backward) for one in (q, k, v)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            o = self.attention(*inputs, causal=self.causal)

            def call() -> Any:
                if self.backward:
                    return torch.autograd.grad(o, inputs, do, retain_graph=True)
                return self.attention(*inputs, causal=self.causal)

            call()
            stream.synchronize()
            if not self.launches:
                once = self.timing.in_a_row(call, 3) / 1e6  # on this stream
                self.launches = max(1, round(GRAPH_SECONDS / once))
                self.seconds = once * self.launches
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                for _ in range(self.launches):
                    out = call()
        self.kept = inputs, do, o, out
        torch.cuda.synchronize()

    def timed(self) -> float:
        """Microseconds a call, of the second of two replays."""
        time.sleep(PAUSE * self.seconds)
        self.graph.replay()
        return self.timing.in_a_row(self.graph.replay, 1) / self.launches


def child() -> None:
    """Answers a line of JSON with one. What is loaded into the GPU is identified by its hash."""
    import gc
    import hashlib

    from fa2tune.launching import launch

    gc.freeze()  # torch, which a collection at each capture would look through

    loaded = list[str]()
    original = launch.Function

    def recorded(image: Any, kinds: Any, device_index: int, origin: str) -> Any:
        where = "compiled" if origin.startswith("compiled") else "shipped"
        loaded.append(f"{where} {image.name} {hashlib.sha256(image.cubin).hexdigest()[:16]}")
        return original(image, kinds, device_index, origin)

    launch.Function = recorded  # type: ignore[misc, assignment]
    cell: Cell | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer: Any = None
            if asked[0] == "cell":
                cell = None  # frees its memory
                cell = Cell(*asked[1])
            elif asked[0] == "fresh" and cell is not None:
                cell.fresh()
                answer, loaded[:] = list(loaded), []
            elif asked[0] == "time" and cell is not None:
                answer = cell.timed()
            print("ANSWER " + json.dumps([True, answer]), flush=True)
        except Exception as error:  # for the parent to judge
            print("ANSWER " + json.dumps([False, f"{type(error).__name__}: {error}"]), flush=True)


class Process:
    """A child that times cells."""

    def __init__(self, name: str, env: dict[str, str]) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--child"]
        self.name = name
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.loaded = list[str]()

    def ask(self, *what: Any) -> None:
        into: IO[str] = self.process.stdin  # type: ignore[assignment]
        into.write(json.dumps(what) + "\n")
        into.flush()

    def answer(self) -> Any:
        out: IO[str] = self.process.stdout  # type: ignore[assignment]
        for line in out:
            if line.startswith("ANSWER "):
                fine, found = json.loads(line[7:])
                if not fine:
                    raise RuntimeError(f"{self.name}: {found}")
                return found
        raise RuntimeError(f"{self.name}: the process ended with {self.process.wait()}")

    def end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def turns(both: tuple[Process, Process], count: int, found: tuple[list[float], list[float]]) -> None:
    """In new memory ``count`` times, BURSTS turns each, forth and back, so that what drifts evenly cancels."""
    for _ in range(count):
        for one in both:
            one.ask("fresh")
        for one in both:
            one.loaded += one.answer()
        for turn in range(BURSTS):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                both[which].ask("time")
                found[which].append(both[which].answer())


def ratio(cell: dict[str, Any]) -> float:
    return statistics.median(cell["compiled_us"]) / statistics.median(cell["shipped_us"])


def version_of(folder: Path) -> str:
    match = re.search(r"^__version__ = ['\"](.+)['\"]", (folder / "triton" / "__init__.py").read_text(), re.MULTILINE)
    return match[1] if match else "unknown"


def code(cells: dict[str, Any], which: str) -> dict[str, str]:
    """Kernel and hash of its machine code -> "compiled" or "shipped", of all that a process has loaded."""
    lines = [line for cell in cells.values() for line in cell["loaded"][which]]
    return {line.partition(" ")[2]: line.partition(" ")[0] for line in lines}


def table(cells: dict[str, Any]) -> None:
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    print(f"{'time compiled by 3.6 / shipped under the newer':46}" + "".join(f"{length:>8}" for length in lengths))
    for direction in ("forward", "backward"):
        for dim in (64, 128, 256):
            for mask in ("full", "causal"):
                names = [f"{direction} {dim} {mask} {length}" for length in lengths]
                shown = [f"{ratio(cells[name]):8.3f}" if name in cells else f"{'-':>8}" for name in names]
                print(f"{direction:10}{dim:>5} {mask:30}" + "".join(shown))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--newer", type=Path, help="a folder with a Triton, for PYTHONPATH")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0, help="no cell is begun later")
    parser.add_argument("--turns", type=int, default=5, help=f"times new memory is taken, for {BURSTS} turns each")
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--again", type=int, default=3)
    parser.add_argument("--load", action="store_true", help="load the file under the installed Triton, too: no compile")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child()
        return 0
    if asked.folder is None or asked.out is None or asked.newer is None:
        parser.error("give FOLDER, --newer and --out")
    began, folder = time.monotonic(), asked.folder.resolve()
    site = folder / "site"
    if not list((site / "fa2tune" / "cache").glob("*.kernels")):
        parser.error(f"{site} has no machine code: run release_check.py {folder} --steps make")
    record = json.loads(asked.out.read_text()) if asked.out.exists() else {"cells": {}}
    record |= {"about": about(), "newer": version_of(asked.newer)}
    cells = record["cells"]
    off = {} if asked.load else {"FA2TUNE_KERNELS": "off", "TRITON_CACHE_DIR": str(folder / "triton-made")}
    both = (
        Process("compiled", environment(folder, site, **off)),
        Process("shipped", environment(folder, site, asked.newer)),
    )
    try:
        for cell in CELLS:
            name = " ".join([cell[3], *map(str, cell[:3])])
            if name in cells or time.monotonic() - began > asked.seconds:
                continue
            for one in both:
                one.loaded = []
                one.ask("cell", cell)
            for one in both:
                one.answer()
            times: tuple[list[float], list[float]] = [], []
            for _ in range(1 + asked.again):
                turns(both, asked.turns, times)
                found = {"compiled_us": times[0], "shipped_us": times[1]}
                if ratio(found) >= asked.goal:
                    break
            loaded = {one.name: sorted(set(one.loaded)) for one in both}
            rounded = {which: [round(t, 2) for t in values] for which, values in found.items()}
            cells[name] = {**rounded, "loaded": loaded}
            asked.out.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        for one in both:
            one.end()
    table(cells)
    ratios = {name: ratio(found) for name, found in cells.items()}
    if ratios:
        least = min(ratios, key=lambda name: ratios[name])
        print(f"{len(ratios)} of {len(CELLS)} cells in {time.monotonic() - began:.0f} s of this run")
        print(f"median {statistics.median(ratios.values()):.4f}, least {ratios[least]:.4f} ({least})")
        print(
            f"below {asked.goal}: {', '.join(sorted(name for name in ratios if ratios[name] < asked.goal)) or 'none'}"
        )
        compiled, shipped = code(cells, "compiled"), code(cells, "shipped")
        print(f"machine code: {len(compiled.keys() & shipped.keys())} binaries the same", end="")
        print(
            f", {len(compiled.keys() ^ shipped.keys())} in one process only: {sorted(compiled.keys() ^ shipped.keys())}"
        )
        print(
            f"compiled under the newer Triton: {[name for name, how in shipped.items() if how == 'compiled'] or 'nothing'}"
        )
    return 0 if len(ratios) == len(CELLS) and min(ratios.values()) >= asked.goal else 1


if __name__ == "__main__":
    sys.exit(main())
