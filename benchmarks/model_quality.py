"""How well the analytic model ranks configs, on exhaustive tables (see tables.py). Needs no GPU and compiles nothing.

    python benchmarks/model_quality.py benchmarks/tables/*.gz [--fit] [--json FILE] [--by DIMENSION ...]

Per key: Spearman's rank correlation over all configs and over the measured best quarter, and the loss against the best
config (`regret_1`, `regret_5`) of the model's first choice and of the best of its first five. Given for the constants in
model.py ("shipped"), for constants fitted without the key ("left out"), and for constants fitted on the other pass, forward or
backward ("other pass"). "guessed" is the same for the estimates that prior.py makes without a compile; then the share of
the legal space below a multiple of its lowest estimate, and the distance of the best measured config in it from the best of
all. --fit prints constants fitted to all tables, for model.Calibration. --by: mean logarithmic error by the values of a
dimension.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import tables
from model_fit import FITTED, Measured, fit, measured, quality

from fa2tune.compiling import registry
from fa2tune.predicting import model, prior
from fa2tune.tuning.search.candidates import legal

COLUMNS = ("n", "spearman", "spearman_best", "regret_1", "regret_5", "level")
BARS = {"spearman": 0.8, "spearman_best": 0.5, "regret_5": 0.05}  #: what is asked of each key

CUTS = (1.5, 2.0)  #: times prior.py's smallest estimate

Figures = dict[str, dict[str, float]]


def name(data: Measured) -> str:
    key = data.key
    return f"{key.kernel} {key.dtype} {key.head_dim} {key.mask} {key.bucket}"


def figures_of(data: Sequence[Measured], constants: model.Calibration) -> Figures:
    return {name(one): quality(one.times_us, one.predicted_us(constants)) for one in data}


def left_out(data: Sequence[Measured]) -> Figures:
    """Every key by constants fitted without it."""
    found: Figures = {}
    for one in data:
        found |= figures_of([one], fit([other for other in data if other is not one]))
    return found


def other_pass(data: Sequence[Measured]) -> Figures:
    """Backward keys by constants of the forward alone, and forward keys by those of the backward."""
    found: Figures = {}
    forward = [one for one in data if one.key.kernel == "fwd"]
    backward = [one for one in data if one.key.kernel != "fwd"]
    if forward and backward:
        found |= figures_of(backward, fit(forward))
        found |= figures_of(forward, fit(backward))
    return found


def guessed(data: Sequence[Measured]) -> Figures:
    """Every key by prior.py."""
    found: Figures = {}
    for one in data:
        variant, spec = registry.portable_of(one.key.kernel), one.key.specialization()
        problem = one.key.workload()
        everything = legal(variant, spec, one.gpu).configs
        space = np.array(prior.estimates(variant, spec, everything, one.gpu, problem))
        times = np.array(prior.estimates(variant, spec, one.configs, one.gpu, problem))
        found[name(one)] = quality(one.times_us, times)
        for cut in CUTS:
            left = times <= cut * space.min()
            found[name(one)][f"kept_{cut}"] = float((space <= cut * space.min()).mean())
            found[name(one)][f"lost_{cut}"] = float(one.times_us[left].min() / one.times_us.min() - 1)
    return found


def show_cuts(figures: Figures) -> None:
    columns = [f"{word}_{cut}" for cut in CUTS for word in ("kept", "lost")]
    click.echo(f"{'':34}" + "".join(f"{column:>15}" for column in columns))
    for key, row in figures.items():
        click.echo(f"{key:34}" + "".join(f"{row[column]:15.3f}" for column in columns))


def show(title: str, figures: Figures) -> None:
    click.echo(f"\n{title:34}" + "".join(f"{column:>15}" for column in COLUMNS))
    for key, row in figures.items():
        cells = (f"{row[c]:15.0f}" if c == "n" else f"{row[c]:15.3f}" for c in COLUMNS)
        missed = [c for c, bar in BARS.items() if (row[c] > bar if c.startswith("regret") else not row[c] >= bar)]
        click.echo(f"{key:34}" + "".join(cells) + (f"  misses {', '.join(missed)}" if missed else ""))
    for word, which in (("median", statistics.median), ("worst", None)):
        cells = []
        for column in COLUMNS[1:]:
            known = [row[column] for row in figures.values() if not math.isnan(row[column])]
            worst = max if column.startswith("regret") else min
            cells.append(f"{(which or worst)(known) if known else math.nan:15.3f}")
        click.echo(f"{word:49}" + "".join(cells))


def errors_by(data: Sequence[Measured], constants: model.Calibration, dimension: str) -> None:
    """Where the model errs: mean logarithm of predicted / measured time, a key's level taken off."""
    for one in data:
        error = np.log(one.predicted_us(constants) / one.times_us)
        error -= np.median(error)
        near = one.times_us < np.quantile(one.times_us, 0.25)
        cells = []
        for value in sorted({config[dimension] for config in one.configs}, key=str):
            here = np.array([config[dimension] == value for config in one.configs])
            mean, mean_near = (error[mask].mean() if mask.any() else math.nan for mask in (here, here & near))
            cells.append(f"{value}: {mean:+.2f} ({mean_near:+.2f})")
        click.echo(f"{name(one):34}{dimension:16}" + "  ".join(cells))


@click.command(help=__doc__)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--fit", "refit", is_flag=True, help="Print constants fitted to all tables.")
@click.option("--quick", is_flag=True, help="The shipped constants alone, nothing fitted.")
@click.option("--by", multiple=True, help="Mean error by the values of this dimension (in brackets: best quarter).")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path))
def main(paths: tuple[Path, ...], refit: bool, quick: bool, by: tuple[str, ...], out: Path | None) -> None:
    data = [measured(tables.load(path)) for path in paths]
    constants = model.CALIBRATION
    found = {"shipped": figures_of(data, constants)}
    show("shipped constants", found["shipped"])
    found["guessed"] = guessed(data)
    show("guessed, not compiled", found["guessed"])
    show_cuts(found["guessed"])
    if refit:
        constants = fit(data)
        found["fitted"] = figures_of(data, constants)
        show("fitted to all of them", found["fitted"])
        click.echo("\nfor model.Calibration:")
        for constant in FITTED:
            click.echo(f"    {constant}: float = {getattr(constants, constant):.3g}")
    if not quick and len(data) > 1:
        found["left_out"] = left_out(data)
        show("each by constants fitted without it", found["left_out"])
        found["other_pass"] = other_pass(data)
        show("fitted on the other pass", found["other_pass"])
    for dimension in by:
        errors_by(data, constants, dimension)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
