"""How much of the tuned speed the documented default configs reach, key by key, and in the geometric mean.

    python benchmarks/default_vs_tuned.py cache/h200.sqlite            # from the evidence in the rows
    python benchmarks/default_vs_tuned.py cache/h200.sqlite --measure  # both configs timed again, interleaved, on this GPU

The share is tuned time / default time: 1 where tuning gained nothing. With --measure, whole backwards (kernel "bwd") are
left out: their kernels are measured one by one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from fa2tune.problem import BACKWARD, TuningKey
from fa2tune.reader import CacheFileError, read
from fa2tune.row import PREDICTED, Row


def fastest(rows: Iterable[Row]) -> list[Row]:
    """The row that would serve each key, among those that were timed: the fastest of its variants, in the order of keys."""
    best: dict[TuningKey, Row] = {}
    for row in rows:
        time = row.time_us
        if time is not None and row.obtained != PREDICTED:
            held = best.get(row.key)
            if held is None or held.time_us is None or time < held.time_us:
                best[row.key] = row
    return [best[key] for key in sorted(best)]


def share_by_evidence(row: Row) -> float | None:
    """From the interleaved pairs that the tuner took; None if the row holds none."""
    return None if not row.gain else 1.0 / row.gain


def share_by_measuring(row: Row) -> float:
    """Both configs again, interleaved, at the key's workload on the current GPU. RuntimeError if one cannot be launched."""
    from fa2tune import measure
    from fa2tune.compiler import variant_named

    default = variant_named(row.key.kernel).space.default(row.key.specialization(), row.key.arch)
    if dict(default) == dict(row.config):
        return 1.0
    race = measure.race(row.key, [default, row.config], "proof")
    if race.failures:
        raise RuntimeError(f"{row.key}: {race.failures}")
    default_times, tuned_times = race.times
    return statistics.median(t / d for d, t in zip(default_times, tuned_times, strict=False))


def table(shares: Mapping[TuningKey, float]) -> str:
    """One line per key, one per kernel, one for all: geometric means."""
    lines = []
    by_kernel: dict[str, list[float]] = {}
    for key, share in shares.items():
        mask = "causal" if key.causal else "full"
        lines.append(
            f"{key.gpu}  {key.kernel:9}{key.dtype}  head dim {key.head_dim:<4}{mask:7}{key.bucket:6}  {share:.3f}"
        )
        by_kernel.setdefault(key.kernel, []).append(share)
    for kernel, found in by_kernel.items():
        lines.append(
            f"{kernel}: geometric mean {statistics.geometric_mean(found):.3f} over {len(found)} keys, worst {min(found):.3f}"
        )
    mean = statistics.geometric_mean(shares.values())
    return "\n".join([*lines, f"default / tuned speed, geometric mean over {len(shares)} keys: {mean:.3f}"])


@click.command()
@click.argument("cache", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--measure", "again", is_flag=True, help="Time both configs on this GPU instead of reading the evidence.")
def main(cache: Path, again: bool) -> None:
    """Speed of the default configs as a share of the tuned ones in CACHE."""
    try:
        rows = fastest(read(cache))
    except CacheFileError as error:
        raise click.ClickException(str(error)) from None
    shares: dict[TuningKey, float] = {}
    if again:
        from fa2tune import gpus

        here = gpus.present()
        if here is None:
            raise click.ClickException("--measure needs a CUDA GPU that torch can use")
        rows = [row for row in rows if (row.key.gpu, row.key.sm_count) == (here.name, here.sm_count)]
        shares = {row.key: share_by_measuring(row) for row in rows if row.key.kernel != BACKWARD}
    else:
        shares = {row.key: share for row in rows if (share := share_by_evidence(row)) is not None}
    if not shares:
        raise click.ClickException(f"{cache} holds no timed row to compare" + (" for this GPU" if again else ""))
    click.echo(table(shares))


if __name__ == "__main__":
    main()
