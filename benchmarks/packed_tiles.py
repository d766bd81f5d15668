"""Estimates of packed forwards next to what was recorded: by the lengths that were drawn, and by those that the host takes.

    python benchmarks/packed_tiles.py            # the table of docs/experiments/packed-tiles.md
    python benchmarks/packed_tiles.py --fit      # constants of packed_schedule, from all records but the one held out
    python benchmarks/packed_tiles.py --changed  # calls of the drawings whose choice is another one now
    python benchmarks/packed_tiles.py --ahead    # what packed_choices.py --drawing 4 is expected to time
    python benchmarks/packed_tiles.py --raced    # how far the choice is behind the best form of each raced call

The records: benchmarks/calls/random_packings_2.json to _4 with the forms that served them (packed_served.json; the Chooser of
the commit that each was drawn by), and the forms that packed_choices.json, _3 and _4 raced. random_packings_4 and
packed_choices_4 are held out. Left out are 256 columns of Q and V, and three groups in records before 2026-11-27, whose loops
spilled. Needs no GPU.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
from packed_choices import ALL_TILES, candidates, masks, packings, posed
from random_packings import Packing

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.calling.schedules import (
    few_tiles,
    packed_grouped_schedule,
    packed_lengths,
    packed_schedule,
    window_schedule,
)
from fa2tune.launching import key_splits
from fa2tune.spec.problem import Config, Problem

CALLS = Path(__file__).parent / "calls"
HELD_OUT, SPILLED = ("_4", "raced 4"), ("_2", "raced")
MOST_COLUMNS = 256
H200 = gpus.named("h200")
#: Constants that --fit moves: (name, key of a dictionary).
FITTED = (("ORDER_US", None), ("SECOND_Q_US", None), ("HIDDEN", 1), ("HIDDEN", 2), ("MEMORY_RATE", None))


@dataclass(frozen=True)
class Sample:
    record: str
    name: str
    packing: Packing
    config: Config
    us: float

    @property
    def problem(self) -> Problem:
        return posed(self.packing)

    @property
    def windowed(self) -> bool:
        return window_schedule.is_window(self.problem)


def drawing(which: str) -> dict[str, tuple[Packing, Mapping[str, Any]]]:
    found = json.loads((CALLS / f"random_packings{which}.json").read_text("utf-8"))["calls"]
    return {
        name: (
            Packing(
                tuple(one["of_q"]), tuple(one["of_k"]), one["heads_q"], one["heads_kv"], one["head_dim"],
                masks(one["mask"]),
            ),
            one,
        )
        for name, one in found.items()
        if "fwd" in one
    }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Race:
    record: str
    name: str
    packing: Packing
    us: Mapping[tuple[Any, ...], float]  #: by ``form``
    timed: tuple[tuple[Config, float], ...]  #: but for tiles of several heads


def form(config: Config) -> tuple[Any, ...]:
    """Of a config of either kernel, what was raced as one."""
    if key_splits.is_grouped(config):
        return config["BLOCK_M"], config["BLOCK_N"], config["MEMBERS"]
    return *window_schedule.form(config), config["RESCALE"], config.get("HEADS_PER_WAVE", 0)


def _forms() -> Mapping[str, Any]:
    return dict(json.loads((CALLS / "packed_served.json").read_text("utf-8")))


def _config(of: Iterable[Any]) -> Config:
    return dict(zip(_forms()["fields"], of, strict=True))


def _raced_in_third(name: str, packing: Packing) -> dict[str, list[Any]]:
    few, forms = packed_schedule.for_few_tiles(posed(packing).specialization, H200.arch), _forms()
    served = forms["served"]["_3"][name.split()[0]]
    small = served if few is None else [few[field] for field in forms["fields"]]
    return {"small tiles": small, "small tiles, chosen": small, "chosen": served}


@cache
def races() -> tuple[Race, ...]:
    """Of every raced call."""
    forms, found = _forms(), []
    drawn = {which: drawing(which) for which in ("", "_3")}
    tiled = {name: one[0] for name, one in packings(ALL_TILES).items()}
    for record, which in (("raced", ""), ("raced 3", "_3"), ("raced 4", "_4")):
        for name, one in json.loads((CALLS / f"packed_choices{which}.json").read_text("utf-8"))["calls"].items():
            packing = tiled[name] if record == "raced 4" else drawn[which][name][0]
            known = {"raced": lambda name, _: forms["raced"][name.split()[0]], "raced 3": _raced_in_third}
            labels = known.get(record, lambda name, _: forms["raced 4"][name])(name, packing)
            us: dict[tuple[Any, ...], float] = {}
            timed = []
            for label, time in one["us"].get("fwd", {}).items():
                if several := re.match(r"grouped M(\d+) N(\d+) of (\d+) heads", label):
                    place: tuple[Any, ...] = tuple(map(int, several.groups()))
                else:
                    band = re.search(r"bands of (\d+) heads", label)
                    config = {**_config(labels[label]), "HEADS_PER_WAVE": int(band.group(1)) if band else 0}
                    place = form(config)
                    timed.append((config, time))
                us[place] = min(time, us.get(place, time))
            found.append(Race(record, name, packing, us, tuple(timed)))
    return tuple(found)


def chosen(problem: Problem) -> Config:
    """What serves a forward, tiles of several heads too."""
    choice = choosing.Chooser(problem, H200).choose("fwd")
    return packed_grouped_schedule.config_of(problem, choice.config, H200, choice.row) or choice.config


def losses() -> dict[Race, float]:
    """How many times as long the choice took as the best form, where both were raced."""
    found = ((race, form(chosen(posed(race.packing)))) for race in races())
    return {race: race.us[own] / min(race.us.values()) for race, own in found if own in race.us and len(race.us) > 1}


@cache
def samples() -> tuple[Sample, ...]:
    found = []
    for which, served in _forms()["served"].items():
        for name, (packing, one) in drawing(which).items():
            us = one["fwd"]["us"]["fa2tune"]
            found.append(Sample(which, name, packing, _config(served[name.split()[0]]), us))
    for race in races():
        found += [Sample(race.record, race.name, race.packing, *one) for one in race.timed]
    return tuple(one for one in found if _counts(one))


def _counts(one: Sample) -> bool:
    spilled = one.config["BLOCK_M"] == 192 and one.record in SPILLED
    return few_tiles.columns(one.problem, one.config) <= MOST_COLUMNS and not spilled


@contextmanager
def lengths_of(packing: Packing) -> Iterator[None]:
    """The estimate by the lengths that were drawn."""
    counted = Counter(pair for pair in zip(packing.of_q, packing.of_k, strict=True) if pair[0])
    queries, keys = np.array(list(counted)).T
    known = queries, keys, np.array(list(counted.values()), float)
    packed_schedule.visited.cache_clear()
    with mock.patch.object(packed_lengths, "kinds", lambda _: known):
        yield
    packed_schedule.visited.cache_clear()


def error(one: Sample, drawn: bool) -> float:
    """Logarithm of estimated over recorded."""
    if drawn:
        with lengths_of(one.packing):
            return error(one, False)
    us = packed_schedule.expected_us(one.problem, one.config, H200)
    assert us is not None
    return math.log(us / one.us)


def rms(errors: Iterable[float]) -> float:
    found = list(errors)
    return math.sqrt(sum(one**2 for one in found) / len(found)) if found else math.nan


def _get(name: str, key: Any) -> float:
    value = getattr(packed_schedule, name)
    return float(value if key is None else value[key])


def _set(name: str, key: Any, value: float) -> None:
    if key is None:
        setattr(packed_schedule, name, value)
    else:
        getattr(packed_schedule, name)[key] = value


def fit() -> None:
    """One constant at a time, by ever smaller steps; errors above 0.1 count by their size and not its square."""
    known = [one for one in samples() if one.record not in HELD_OUT]

    def loss() -> float:
        return sum(math.hypot(1.0, error(one, True) / 0.1) - 1 for one in known)

    least, step = loss(), 0.16
    while step > 0.01:
        before = least
        for name, key in FITTED:
            for factor in (1 + step, 1 / (1 + step)):
                was = _get(name, key)
                _set(name, key, was * factor)
                now = loss()
                least = now if now < least else least
                if now > least:
                    _set(name, key, was)
        step = step / 2 if least > 0.999 * before else step
    for name, key in FITTED:
        click.echo(f"{name}{'' if key is None else f'[{key}]'}: {_get(name, key):.3f}")


def changed() -> Iterator[str]:
    served = {(one.record, one.name): one for one in samples()}
    for which in ("_2", "_3", "_4"):
        for name, (packing, call) in drawing(which).items():
            if (one := served.get((which, name))) is None:
                continue
            config = choosing.Chooser(one.problem, H200).choose("fwd").config
            forms = [window_schedule.form(each) for each in (one.config, config)]
            if forms[0] == forms[1] and not config["HEADS_PER_WAVE"]:
                continue
            with lengths_of(packing):
                us = [packed_schedule.expected_us(one.problem, each, H200) or 0.0 for each in (one.config, config)]
            peer = call["fwd"]["us"]["fa2tune"] * (call["fwd"]["ratio"] or math.nan)
            band = f", bands of {config['HEADS_PER_WAVE']} heads" if config["HEADS_PER_WAVE"] else ""
            yield (
                f"{which} {name}: recorded {one.us}, peer {peer:.1f}; {forms[0]} {us[0]:.1f}, now {forms[1]} {us[1]:.1f}{band}"
            )


def ahead() -> Iterator[str]:
    """Of each call of TILES: microseconds by candidate, by the lengths that were drawn."""
    for name, (packing, call) in packings(ALL_TILES).items():
        problem = posed(packing)
        named = candidates(problem, H200, ALL_TILES)["fwd"]
        said = []
        with lengths_of(packing):
            for label, (choice, _) in named.items():
                config, grouped = choice.config, key_splits.is_grouped(choice.config)
                estimate = packed_grouped_schedule.grouped_us if grouped else packed_schedule.expected_us
                said.append(f"{label} {estimate(problem, config, H200):.1f}")
        us = call["fwd"]["us"]
        peer = min(time for which, time in us.items() if which != "fa2tune")
        yield f"{name}: drawn {us['fa2tune']}, peer {peer}; {'; '.join(said)}"


def raced() -> Iterator[str]:
    """Of the choice next to the best form of each race, the worst first."""
    found = losses()
    for record in dict.fromkeys(race.record for race in found):
        of = [loss - 1 for race, loss in found.items() if race.record == record]
        yield f"{record}: {len(of)} calls, {100 * sum(of) / len(of):.1f} % behind, at worst {100 * max(of):.0f} %"
    of = [loss - 1 for loss in found.values()]
    yield f"all: {len(of)} of {len(races())} calls, {100 * sum(of) / len(of):.1f} % behind, at worst {100 * max(of):.0f} %"
    for race, loss in sorted(found.items(), key=lambda one: -one[1]):
        if loss > 1.02:
            best = min(race.us, key=lambda place: race.us[place])
            own = form(chosen(posed(race.packing)))
            yield f"  {loss:.3f} {race.record} {race.name}: {own} {race.us[own]}, {best} {race.us[best]}"


def table() -> Iterator[str]:
    for held in (False, True):
        known = [one for one in samples() if (one.record in HELD_OUT) == held]
        for windowed in (False, True):
            these = [one for one in known if one.windowed == windowed]
            off = [rms(error(one, drawn) for one in these) for drawn in (True, False)]
            yield (
                f"{'held out' if held else 'fitted'}, {'windows' if windowed else 'other masks'}: {len(these)}, "
                f"{off[0]:.3f} by the lengths drawn, {off[1]:.3f} by those taken"
            )
    for one in sorted(samples(), key=lambda one: -abs(error(one, True)))[:8]:
        yield f"  {error(one, True):+.2f} {one.record} {one.name}, {window_schedule.form(one.config)}, {one.us}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--fit", "fitting", is_flag=True)
@click.option("--changed", "differ", is_flag=True)
@click.option("--ahead", "predicted", is_flag=True)
@click.option("--raced", "behind", is_flag=True)
def main(fitting: bool, differ: bool, predicted: bool, behind: bool) -> None:
    if fitting:
        fit()
    for line in changed() if differ else ahead() if predicted else raced() if behind else table():
        click.echo(line)


if __name__ == "__main__":
    main()
