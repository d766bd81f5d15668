"""Times calls whose products have as many columns as their head dims, next to products of whole tiles.

    python benchmarks/ahead.py benchmarks/trimmed_products.py                  # first: every binary, on all cores; no GPU
    python benchmarks/trimmed_products.py --out FILE [--seconds 200]           # resumes from the file
    python benchmarks/trimmed_products.py --padded --out FILE                  # backwards in two parts, next to one part
    python benchmarks/trimmed_products.py --table FILE                         # a file, as text

Calls of head dims that compiling/trimmed.py is for; with --padded of head dims that have parts instead. Tensors, checks and
races are those of benchmarks/workloads.py. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import side_by_side
import workloads

from fa2tune.calling import dispatch
from fa2tune.launching import launch
from fa2tune.search_spaces.lib import hopper
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import BACKWARD, Problem

WHOLE, PADDED = "whole tiles", "one part"
HEAD_DIMS = (104, 112, 120, 168, 176, 184, 200, 208, 216, 224, 232, 240, 248)


def calls() -> dict[str, Problem]:
    found = [
        Problem("bf16", 3, 20, 10, 2872, 2872, dim, dim, mask)
        for dim, mask in itertools.product(HEAD_DIMS, (FULL, CAUSAL))
    ]
    for dim, dim_v in ((224, 88), (192, 104), (104, 128), (256, 208)):
        found.append(Problem("bf16", 4, 16, 16, 1500, 1500, dim, dim_v, FULL))
    for dim in (104, 176, 208, 224):
        found.append(Problem("bf16", 4, 28, 28, 700, 700, dim, dim, FULL))
        found.append(Problem("bf16", 2, 6, 6, 300, 300, dim, dim, CAUSAL))
        found.append(Problem("bf16", 2, 2, 2, 628, 7765, dim, dim, FULL))
        found.append(Problem("bf16", 2, 16, 2, 330, 330, dim, dim, FULL))
    return {workloads.described(problem): problem for problem in found}


def calls_in_parts() -> dict[str, Problem]:
    """Of head dims that two powers of two hold in fewer columns than one."""
    found = []
    for dim, mask in itertools.product((72, 80, 88, 96), (FULL, CAUSAL)):
        found.append(Problem("bf16", 3, 20, 10, 2872, 2872, dim, dim, mask))
        found.append(Problem("bf16", 4, 28, 28, 700, 700, dim, dim, mask))
        found.append(Problem("bf16", 3, 21, 21, 264, 264, dim, dim, mask))
        found.append(Problem("bf16", 10, 5, 5, 3973, 3973, dim, dim, mask))
    return {workloads.described(problem): problem for problem in found}


def attention(problem: Problem, trim: bool, padded: bool = False) -> side_by_side.Attention:
    """Public calls of such products. What is captured of the other ones before stays as it is."""
    import fa2tune

    for module in (hopper, bwd_fused):
        module.trimmed = _trimmed if trim else lambda *_, **__: {}  # type: ignore[attr-defined]
    bwd_fused.has_parts = (lambda _: False) if padded else _has_parts
    getattr(launch.load, "cache_clear", bool)()  # benchmarks/ahead.py has a stand-in for it
    dispatch.reload()
    return functools.partial(fa2tune.attention, mask=problem.mask, layout="bshd")


_trimmed, _has_parts = hopper.trimmed, bwd_fused.has_parts
PEERS = {
    side_by_side.SUBJECT: side_by_side.Peer(functools.partial(attention, trim=True)),
    WHOLE: side_by_side.Peer(functools.partial(attention, trim=False)),
}
PEERS_IN_PARTS = {
    side_by_side.SUBJECT: side_by_side.Peer(functools.partial(attention, trim=True)),
    PADDED: side_by_side.Peer(functools.partial(attention, trim=True, padded=True)),
}


def shares(found: Mapping[str, Any]) -> dict[str, float]:
    """Pass -> time over that of the other form."""
    us = {pass_: found.get(pass_, {}).get("us", {}) for pass_ in ("fwd", BACKWARD)}
    return {
        pass_: one[side_by_side.SUBJECT] / next(us for name, us in one.items() if name != side_by_side.SUBJECT)
        for pass_, one in us.items()
        if len(one) == len(PEERS)
    }


def line(name: str, found: Mapping[str, Any]) -> str:
    said = [
        f"{pass_} {found[pass_]['us'][side_by_side.SUBJECT]} us, {share:.3f}" for pass_, share in shares(found).items()
    ]
    return f"{name}: {'; '.join(said)} {found['missing'] or ''}".rstrip()


def means(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for pass_ in ("fwd", BACKWARD):
        all_ = [shares(one)[pass_] for one in found.values() if pass_ in shares(one)]
        if all_:
            mean = math.exp(statistics.fmean(map(math.log, all_)))
            yield f"{pass_}: {len(all_)} calls, {mean:.3f} of the time (geometric mean), {min(all_):.2f} to {max(all_):.2f}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@side_by_side.share_option
@click.option("--seconds", type=float, default=200.0, show_default=True, help="Begins no call after so long.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON; its calls are not measured again.")
@click.option(
    "--padded", is_flag=True, help="Backwards of head dims in two parts, next to one part; forwards are the same."
)
@click.option("--table", "shown", type=click.Path(exists=True, path_type=Path), help="Print this file's times.")
def main(share: slice, seconds: float, out: Path | None, padded: bool, shown: Path | None) -> None:
    if shown is not None:
        found = json.loads(shown.read_text("utf-8"))["calls"]
        click.echo("\n".join([*(line(name, one) for name, one in found.items()), *means(found)]))
        return
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})
    asked, peers = (calls_in_parts(), PEERS_IN_PARTS) if padded else (calls(), PEERS)
    measured = functools.partial(workloads.measure, peers=peers)
    side_by_side.fill(record, side_by_side.in_share(asked, share), measured, seconds, out, line)


if __name__ == "__main__":
    main()
