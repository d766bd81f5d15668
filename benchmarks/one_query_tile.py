"""Drawn backwards whose queries fit in one tile: what was recorded, and what one pass over K and V takes at the least.

    python benchmarks/one_query_tile.py benchmarks/calls/random_calls_*.json.gz

The pass reads K and V and writes dK and dV once, with Q, dO and dQ on the chip, and computes the five products of each block of
64 keys for a tile of 128 queries. The bounds are those of an H200's memory and tensor cores at their published rates, which are
never reached.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import workloads
from dense_backwards import posed

from fa2tune import gpus
from fa2tune.spec.problem import ITEMSIZE, Problem

#: Queries of the tile, keys of a block, and keys for each query, at least, of calls that count as of few queries.
TILE, BLOCK, MORE = 128, 64, 4
H200 = gpus.named("h200")


class Bounds(NamedTuple):
    """Microseconds."""

    memory: float
    products: float


def bounds(problem: Problem) -> Bounds:
    heads, columns = problem.batch * problem.heads_q, problem.head_dim + problem.head_dim_v
    moved = 2 * heads * problem.seqlen_k * columns * ITEMSIZE[problem.dtype]
    keys = math.ceil(problem.seqlen_k / BLOCK) * BLOCK
    wide, wide_v = (math.ceil(dim / 16) * 16 for dim in (problem.head_dim, problem.head_dim_v))
    operations = 2 * heads * TILE * keys * (3 * wide + 2 * wide_v)
    return Bounds(1e-3 * moved / H200.hbm_gbs, 1e-6 * operations / H200.tensor_tflops)


def fitting(records: Sequence[Path]) -> Iterator[tuple[Problem, Mapping[str, Any]]]:
    """(call, what was recorded of its backward), of those with a key head for each query head."""
    for path in records:
        for call in json.loads(gzip.decompress(path.read_bytes())).get("calls", {}).values():
            problem = posed(call)
            fits = problem.group == 1 and problem.seqlen_q <= TILE and problem.seqlen_k >= MORE * problem.seqlen_q
            if fits and call.get("bwd", {}).get("ratio") is not None:
                yield problem, call["bwd"]


def table(records: Sequence[Path]) -> Iterator[str]:
    yield "| call | fa2tune, us | best peer | memory's bound | products' |"
    yield "|---|--:|--:|--:|--:|"
    found = list(fitting(records))
    for problem, run in sorted(found, key=lambda one: one[1]["ratio"]):
        least, best = bounds(problem), run["best_peer"]
        cells = (run["us"]["fa2tune"], f"{run['us'][best]} ({best})", f"{least.memory:.0f}", f"{least.products:.0f}")
        yield f"| {workloads.described(problem)} | {' | '.join(map(str, cells))} |"
    shares = [run["us"]["fa2tune"] / max(bounds(problem)) for problem, run in found]
    if shares:
        mean = math.exp(sum(map(math.log, shares)) / len(shares))
        yield ""
        yield f"{len(shares)} calls; fa2tune takes {mean:.1f} times the larger bound (geometric mean)."


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.argument("records", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(records: tuple[Path, ...]) -> None:
    click.echo("\n".join(table(records)))


if __name__ == "__main__":
    main()
