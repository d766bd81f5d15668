"""What it costs to be served by a row that was tuned for something else: the measured cost of each step of the lookup.

    python benchmarks/lookup_cost.py cache/h200.sqlite more.sqlite --out cache/lookup_cost.json [--headdim 64]
    python benchmarks/lookup_cost.py --out cache/lookup_cost.json --page docs/lookup.md      # the table; needs no GPU

For every key of this GPU that the files hold a measured row for (forward and whole backward), the rows that would serve
if that one were missing are found by the dispatcher's own lookup: of the next buckets up and down, of those further
off, of the other 16-bit dtype, of other head dims that pad alike, of portable kernels alone (tensors that TMA cannot
address), and the documented default. All of them race at the key's workload, interleaved on a warm GPU with a cold L2.
The cost is time over that of the key's own row, less 1, the median over rounds; where both name one config it is 0.
--page writes the table from --out between its markers, --markdown prints it. Other GPUs' rows cannot be measured on one GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import marked

from fa2tune.fleet import lookup_cost
from fa2tune.measuring.samples import ratios
from fa2tune.rows import lookup
from fa2tune.rows.reader import CacheFileError, Layer, read
from fa2tune.rows.row import MEASURED, Row
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import BACKWARD, SPLIT, STRATEGIES

Served = Mapping[str, Any]  #: what measure.race takes: a config, or a strategy and its configs
OWN = "own row"
SCRIPT, PART = "lookup_cost", "lookup"


def served(key: TuningKey, rows: Sequence[Row], portable: bool = False) -> Served | None:
    """What the dispatcher would launch for this key if these rows were all there are; None: its default."""
    from fa2tune import gpus
    from fa2tune.calling.choosing import Chooser
    from fa2tune.calling.kinds import PORTABLE_ROWS, Kind, kinds_of

    problem = replace(key.workload(), tma=not portable)
    chooser = Chooser(problem, gpus.named(key.gpu), [Layer("named", Path("rows"), tuple(rows))])

    def found(kernel: str, kind: Kind | None) -> lookup.Answer | None:
        return chooser.find(kernel, PORTABLE_ROWS if portable else kind)[0]

    if key.kernel != BACKWARD:
        answer = found(key.kernel, None)
        return answer and answer.row.config
    whole, _ = chooser.find_backward(False)
    if whole is None:
        return None
    kinds = kinds_of(whole.row)  # may name no kernel: then each chooses by itself
    answers = {kernel: found(kernel, kinds.get(kernel)) for kernel in STRATEGIES[whole.row.strategy]}
    configs = {kernel: answer.row.config for kernel, answer in answers.items() if answer is not None}
    return {"strategy": whole.row.strategy, "configs": configs} if len(configs) == len(answers) else None


def _of(key: TuningKey, rows: Sequence[Row]) -> list[Row]:
    """Those of every kernel for a key's problem."""
    return [row for row in rows if row.key.with_(kernel=key.kernel) == key]


def default(key: TuningKey) -> Served:
    from fa2tune import gpus
    from fa2tune.calling.defaults import default_config

    problem, gpu = key.workload(), gpus.named(key.gpu)
    if key.kernel != BACKWARD:
        return default_config(key.kernel, problem, gpu)
    return {"strategy": SPLIT, "configs": {one: default_config(one, problem, gpu) for one in STRATEGIES[SPLIT]}}


def contenders(key: TuningKey, rows: Sequence[Row]) -> Iterator[tuple[str, Served]]:
    """(step of the lookup, what it serves), the key's own first."""
    own = served(key, _of(key, rows))
    if own is None:
        return
    yield OWN, own
    others = {row.key for row in rows if row.key.kernel == key.kernel}
    for other in sorted(others):
        step = lookup_cost.step_between(key, other)
        answer = served(key, _of(other, rows)) if step else None
        if step and answer is not None:
            yield step, answer
    without_tma = served(key, _of(key, rows), portable=True)
    if without_tma is not None:
        yield lookup_cost.WITHOUT_TMA, without_tma
    yield lookup_cost.DEFAULT, default(key)


def costs(key: TuningKey, rows: Sequence[Row]) -> list[dict[str, Any]]:
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
        "causal": key.mask == "causal",
        "bucket": key.bucket,
    }
    return [
        {**name, "step": step, "cost": statistics.median(ratios(times[distinct.index(what)], times[0])) - 1.0}
        for step, what in lined_up if step != OWN
    ]  # fmt: skip


def _saved(out: Path) -> dict[str, Any]:
    if not out.exists():
        return {"environment": {}, "cases": []}
    held: dict[str, Any] = json.loads(out.read_text())
    return held


def table(held: Mapping[str, Any]) -> str:
    """Markdown: where the cases were measured, then the table."""
    at, cases = held["environment"], held["cases"]
    dtypes, dims = (", ".join(str(one) for one in sorted({case[of] for case in cases})) for of in ("dtype", "head_dim"))
    where = f"{at['gpu']}, driver {at['driver']}, torch {at['torch']}, Triton {at['triton']}, {at['date'][:10]}"
    return f"{where}, {dtypes}, head dims {dims}.\n\n{lookup_cost.markdown(lookup_cost.summary(cases))}"


def _measure(caches: Sequence[Path], out: Path, head_dims: Sequence[int], dtype: str, seconds: float) -> None:
    import time

    from fa2tune import gpus
    from fa2tune.bench.gpu import BenchGpu

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
    held["environment"] = BenchGpu().environment()
    until = time.monotonic() + seconds
    for key in keys:
        if (key.kernel, key.dtype, key.head_dim, key.mask == "causal", key.bucket) in done or time.monotonic() > until:
            continue
        held["cases"] += costs(key, rows)
        out.write_text(json.dumps(held, indent=1) + "\n")  # after each key: a run may be cut off
        click.echo(f"{key.kernel} {key.dtype} {key.head_dim} {key.mask} {key.bucket}: done")


@click.command(help=__doc__)
@click.argument("caches", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON; keys it holds are kept."
)
@click.option("--headdim", "head_dims", type=int, multiple=True, help="[default: all]")
@click.option("--dtype", type=click.Choice(("bf16", "fp16")), default="bf16", show_default=True)
@click.option("--seconds", type=float, default=3600.0, show_default=True, help="No new key after so long.")
@click.option("--markdown", is_flag=True, help="Print the table of --out.")
@marked.page_option
def main(
    caches: tuple[Path, ...],
    out: Path,
    head_dims: tuple[int, ...],
    dtype: str,
    seconds: float,
    markdown: bool,
    page: Path | None,
) -> None:
    if caches:
        _measure(caches, out, head_dims, dtype, seconds)
    elif not (markdown or page):
        raise click.UsageError("nothing to do: name cache files, --page or --markdown")
    if markdown:
        click.echo(lookup_cost.markdown(lookup_cost.summary(_saved(out)["cases"])))
    if page:
        marked.publish(page, PART, SCRIPT, table(_saved(out)))


if __name__ == "__main__":
    main()
