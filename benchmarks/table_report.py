"""The page of ``fa2tune report`` for exhaustive tables. Needs no GPU.

    python benchmarks/table_report.py benchmarks/tables/*.gz --out tables.html

It shows what every value of every dimension costs, what fails and why, and the model against the measurement of every
config.
"""

from __future__ import annotations

from pathlib import Path

import click
import tables
from model_fit import measured
from optuna.trial import TrialState, create_trial

from fa2tune.compiling import registry
from fa2tune.predicting import model
from fa2tune.report.contents import render
from fa2tune.report.sources import Sources, StoredSearch, Trial
from fa2tune.rows.row import MEASURED
from fa2tune.rows.store import write_text
from fa2tune.tuning.search.candidates import Point, distributions, point


def search(table: tables.Table) -> StoredSearch:
    """A table as a study that tried everything."""
    predicted: dict[Point, float] = {}
    if any(built.loops for built in table.binaries.values()):  # what the model goes by
        data = measured(table)
        predicted = dict(zip(map(point, data.configs), data.predicted_us(model.CALIBRATION).tolist(), strict=True))
    space = distributions(registry.portable_of(table.key.kernel).space)
    trials = []
    for built in table.binaries.values():
        for value in table.header["values"]:
            config = table.config(built, value)
            where = point(config)
            time_us = table.times.get(where)
            state = TrialState.PRUNED if time_us is None else TrialState.COMPLETE
            frozen = create_trial(state=state, value=time_us, params=config, distributions=space)
            trials.append(
                Trial(config, time_us, table.statuses.get(where, ""), built.why, predicted.get(where), None, frozen)
            )
    return StoredSearch(table.key, tables.stem(table.key), MEASURED, trials, (), exhaustive=True)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("tables.html"), show_default=True)
def main(paths: tuple[Path, ...], out: Path) -> None:
    try:
        found = [search(tables.load(path)) for path in paths]
    except (ValueError, KeyError) as error:
        raise click.ClickException(str(error)) from error
    name = f"{len(found)} exhaustive table{'s' * (len(found) > 1)}"
    write_text(out, render(Sources(name, (), found, files={path.name: path for path in paths})))
    click.echo(
        f"{out}: {sum(len(one.trials) for one in found)} configs of {len(found)} keys, {out.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
