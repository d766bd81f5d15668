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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fa2tune.fleet import regret
from fa2tune.measuring.samples import ratios
from fa2tune.problem import BACKWARD, ROADS, SPLIT, TuningKey
from fa2tune.rows import lookup
from fa2tune.rows.reader import CacheFileError, Layer, read
from fa2tune.rows.row import MEASURED, Row

Served = Mapping[str, Any]  #: what measure.race takes: a config, or a road and its configs
OWN = "own row"


def served(key: TuningKey, rows: Sequence[Row], portable: bool = False) -> Served | None:
    """What the dispatcher would launch for this key if these rows were all there are; None: its default."""
    from fa2tune import gpus
    from fa2tune.calling import dispatch
    from fa2tune.launching.passes import ROADS

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
    kinds = dispatch.kinds_of(road.row)  # may name no kernel: then each chooses by itself
    answers = {kernel: found(kernel, kinds.get(kernel)) for kernel in ROADS[road.row.road]}
    configs = {kernel: answer.row.config for kernel, answer in answers.items() if answer is not None}
    return {"road": road.row.road, "configs": configs} if len(configs) == len(answers) else None


def _of(key: TuningKey, rows: Sequence[Row]) -> list[Row]:
    """Those of every kernel for a key's problem."""
    return [row for row in rows if row.key.with_(kernel=key.kernel) == key]


def default(key: TuningKey) -> Served:
    from fa2tune import gpus
    from fa2tune.calling.defaults import default_config

    problem, gpu = key.workload(), gpus.named(key.gpu)
    if key.kernel != BACKWARD:
        return default_config(key.kernel, problem, gpu)
    return {"road": SPLIT, "configs": {one: default_config(one, problem, gpu) for one in ROADS[SPLIT]}}


def contenders(key: TuningKey, rows: Sequence[Row]) -> Iterator[tuple[str, Served]]:
    """(rung, what it serves), the key's own first."""
    own = served(key, _of(key, rows))
    if own is None:
        return
    yield OWN, own
    others = {row.key for row in rows if row.key.kernel == key.kernel}
    for other in sorted(others):
        rung = regret.rung_between(key, other)
        answer = served(key, _of(other, rows)) if rung else None
        if rung and answer is not None:
            yield rung, answer
    without_tma = served(key, _of(key, rows), portable=True)
    if without_tma is not None:
        yield regret.PORTABLE, without_tma
    yield regret.DEFAULT, default(key)


def regrets(key: TuningKey, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each row that could stand in. Raises what the race raises."""
    from fa2tune.measuring import measure

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


def _saved(out: Path) -> dict[str, Any]:
    if not out.exists():
        return {"environment": {}, "cases": []}
    held: dict[str, Any] = json.loads(out.read_text())
    return held


def _measure(caches: Sequence[Path], out: Path, head_dims: Sequence[int], dtype: str, seconds: float) -> None:
    import time

    from fa2tune import gpus
    from fa2tune.bench.card import Card

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
        click.echo(regret.markdown(regret.summary(_saved(out)["cases"])))


if __name__ == "__main__":
    main()
