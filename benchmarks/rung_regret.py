"""What it costs to be served by a row that was tuned for something else: the measured regret of each rung of the lookup ladder.

    python benchmarks/rung_regret.py cache/h200.sqlite more.sqlite --out docs/bench/rung_regret.json [--headdim 64] [--markdown]

For every key of this GPU that the files hold a measured row for (forward and whole backward), the rows that would serve
if that one were missing are found by the dispatcher's own lookup: of the next buckets up and down, of those further
off, of the other 16-bit dtype, of other head dims that pad alike, of portable kernels alone (tensors that TMA cannot
address), and the documented default. All of them race at the key's workload, interleaved on a warm card with a cold L2.
Regret is time over that of the key's own row, less 1, the median over rounds; where both name one config it is 0.
--markdown prints the README's table from --out and needs no GPU. Other GPUs' rows cannot be judged on one GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fa2tune import lookup
from fa2tune.problem import BACKWARD, TuningKey, padded_head_dim
from fa2tune.reader import CacheFileError, Layer, read
from fa2tune.row import MEASURED, Row
from fa2tune.samples import quantile, ratios

Served = Mapping[str, Any]  #: what measure.race takes: a config, or a road and its configs
#: Rung -> which row keys it may be served by, beside a key of ours
Rung = Callable[[TuningKey, TuningKey], bool]


def _same(key: TuningKey, row: TuningKey, *but: str) -> bool:
    names = ("dtype", "bucket", "head_dim", "head_dim_v", "causal", "precision", "gpu", "sm_count")
    return all(getattr(key, name) == getattr(row, name) for name in names if name not in but)


def _apart(key: TuningKey, row: TuningKey) -> float:
    return max(key.bucket / row.bucket, row.bucket / key.bucket)


RUNGS: Mapping[str, Rung] = {
    "bucket: next shorter": lambda key, row: _same(key, row, "bucket") and key.bucket == 2 * row.bucket,
    "bucket: next longer": lambda key, row: _same(key, row, "bucket") and row.bucket == 2 * key.bucket,
    "bucket: 4 times off": lambda key, row: _same(key, row, "bucket") and _apart(key, row) == 4,
    "bucket: 8 times off and more": lambda key, row: _same(key, row, "bucket") and _apart(key, row) >= 8,
    "other 16-bit dtype": lambda key, row: _same(key, row, "dtype") and key.dtype != row.dtype,
    "same padded head dim": lambda key, row: (
        _same(key, row, "head_dim", "head_dim_v") and key.head_dim != row.head_dim
        and padded_head_dim(key.head_dim) == padded_head_dim(row.head_dim)
    ),
}  # fmt: skip
OWN, PORTABLE, DEFAULT = "own row", "portable row of the key", "documented default"


def served(key: TuningKey, rows: Sequence[Row], portable: bool = False) -> Served | None:
    """What the dispatcher would launch for this key if these rows were all there are; None: its default."""
    from fa2tune import dispatch, gpus

    gpu = gpus.named(key.gpu)
    problem = replace(key.workload(), tma=not portable)
    layer = Layer("named", Path("rows"), tuple(rows))

    def found(kernel: str, kind: bool | None) -> lookup.Answer | None:
        why = dispatch.kind_refusal(problem, gpu, False if portable else kind)
        return lookup.find(dispatch.key_of(problem, kernel, gpu), gpu.silicon, [layer], why, dispatch.toolchain())

    if key.kernel != BACKWARD:
        answer = found(key.kernel, None)
        return answer and answer.row.config
    refusal = dispatch.road_refusal(problem, gpu, False, [layer])
    road = lookup.find(key, gpu.silicon, [layer], refusal, dispatch.toolchain())
    if road is None:
        return None
    answers = {kernel: found(kernel, kind) for kernel, kind in dispatch.kinds_of(road.row).items()}
    configs = {kernel: answer.row.config for kernel, answer in answers.items() if answer is not None}
    return {"road": road.row.road, "configs": configs} if len(configs) == len(answers) else None


def default(key: TuningKey) -> Served:
    from fa2tune import dispatch
    from fa2tune.passes import ROADS, SPLIT

    problem = key.workload()
    if key.kernel != BACKWARD:
        return dispatch.default_config(key.kernel, problem, key.arch)
    return {
        "road": SPLIT, "configs": {one: dispatch.default_config(one, problem, key.arch) for one in ROADS[SPLIT]},
    }  # fmt: skip


def contenders(key: TuningKey, rows: Sequence[Row]) -> Iterator[tuple[str, Served]]:
    """(rung, what it serves), the key's own first."""
    own = served(key, [row for row in rows if _same(key, row.key)])
    if own is None:
        return
    yield OWN, own
    for rung, of in RUNGS.items():
        there = [row for row in rows if of(key, row.key)]
        others = {(row.key.dtype, row.key.bucket, row.key.head_dim, row.key.head_dim_v) for row in there}
        for other in sorted(others):
            those = [r for r in there if (r.key.dtype, r.key.bucket, r.key.head_dim, r.key.head_dim_v) == other]
            answer = served(key, those)
            if answer is not None:
                yield rung, answer
    without_tma = served(key, [row for row in rows if _same(key, row.key)], portable=True)
    if without_tma is not None:
        yield PORTABLE, without_tma
    yield DEFAULT, default(key)


def regrets(key: TuningKey, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each row that could stand in. Raises what the race raises."""
    from fa2tune import measure

    lined_up = list(contenders(key, rows))
    distinct: list[Served] = []
    for _, what in lined_up:
        if what not in distinct:
            distinct.append(what)
    if len(distinct) < 2:
        times: list[list[float]] = [[1.0]]
    else:
        race = measure.race(key, distinct, "proof")
        if race.failures:
            raise RuntimeError(f"{key}: {race.failures}")
        times = race.times
    name = {
        "kernel": key.kernel,
        "dtype": key.dtype,
        "head_dim": key.head_dim,
        "causal": key.causal,
        "bucket": key.bucket,
    }
    return [
        {**name, "rung": rung, "regret": statistics.median(ratios(times[distinct.index(what)], times[0])) - 1.0}
        for rung, what in lined_up if rung != OWN
    ]  # fmt: skip


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: per pass and rung how many cases, the median, the worst of ten, the worst."""
    lines = ["| pass | served by | cases | median | worst of ten | worst |", "|---|---|--:|--:|--:|--:|"]
    for kernel, name in (("fwd", "forward"), (BACKWARD, "backward")):
        for rung in (*RUNGS, PORTABLE, DEFAULT):
            values = [one["regret"] for one in found if (one["kernel"], one["rung"]) == (kernel, rung)]
            if values:
                of = (statistics.median(values), quantile(values, 0.9), max(values))
                lines.append(
                    f"| {name} | {rung} | {len(values)} | " + " | ".join(f"{x * 100:.1f} %" for x in of) + " |"
                )
    return "\n".join(lines)


def _saved(out: Path) -> dict[str, Any]:
    if not out.exists():
        return {"environment": {}, "cases": []}
    held: dict[str, Any] = json.loads(out.read_text())
    return held


def _measure(caches: Sequence[Path], out: Path, head_dims: Sequence[int], dtype: str, seconds: float) -> None:
    import time

    from fa2tune import gpus
    from fa2tune.bench_card import Card

    here = gpus.present()
    if here is None:
        raise click.ClickException("needs a CUDA GPU that torch can use")
    try:
        rows = [row for cache in caches for row in read(cache) if row.obtained == MEASURED and row.key.gpu == here.name]
    except CacheFileError as error:
        raise click.ClickException(str(error)) from None
    keys = sorted({row.key for row in rows if row.key.kernel in ("fwd", BACKWARD) and row.key.dtype == dtype})
    keys = [key for key in keys if not head_dims or key.head_dim in head_dims]
    held = _saved(out)
    fields = ("kernel", "dtype", "head_dim", "causal", "bucket")
    done = {tuple(case[name] for name in fields) for case in held["cases"]}
    held["environment"] = Card().environment()
    until = time.monotonic() + seconds
    for key in keys:
        if tuple(getattr(key, name) for name in fields) in done or time.monotonic() > until:
            continue
        held["cases"] += regrets(key, rows)
        out.write_text(json.dumps(held, indent=1) + "\n")  # after each key: a run may be cut off
        click.echo(f"{key.kernel} {key.dtype} {key.head_dim} {'causal' if key.causal else 'full'} {key.bucket}: done")


@click.command(help=__doc__)
@click.argument("caches", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON; keys it holds are kept."
)
@click.option("--headdim", "head_dims", type=int, multiple=True, help="[default: all]")
@click.option("--dtype", type=click.Choice(("bf16", "fp16")), default="bf16", show_default=True)
@click.option("--seconds", type=float, default=3600.0, show_default=True, help="No new key after so long.")
@click.option("--markdown", is_flag=True, help="Print the table of --out.")
def main(
    caches: tuple[Path, ...], out: Path, head_dims: tuple[int, ...], dtype: str, seconds: float, markdown: bool
) -> None:
    if caches:
        _measure(caches, out, head_dims, dtype, seconds)
    elif not markdown:
        raise click.UsageError("nothing to do: name cache files, or --markdown")
    if markdown:
        click.echo(table(_saved(out)["cases"]))


if __name__ == "__main__":
    main()
