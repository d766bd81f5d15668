"""Fits few_tiles.DENSE_SHARES, what dense forwards take over the paces of their tiles, to races of drawn calls.

    python benchmarks/few_tiles_fit.py benchmarks/calls/{dense_forwards*,launch_choices_{few,small}*}.json.gz
    python benchmarks/few_tiles_fit.py RECORD... --without benchmarks/calls/dense_forwards_near_3.json.gz  # held out

RECORD: files of benchmarks/dense_forwards.py and launch_choices.py. Only forms of one call are compared with each other, but
for a small share of their common error, as a choice is what the estimate is for. Printed of each record: how much longer the
form takes that is estimated to be the fastest than the fastest one, by the present constants and by the fitted ones: the
geometric mean, and the shares of calls above 3 and 8 %. A penalty holds constants near those of paces alone. What is printed
replaces the constants of few_tiles.py. No GPU.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from dense_forwards import NAMED, YES_NO
from scipy.optimize import least_squares

from fa2tune.calling.schedules import few_tiles
from fa2tune.calling.schedules.few_tiles import DenseShares
from fa2tune.calling.schedules.tile_order import busiest
from fa2tune.search_spaces.lib.hopper import SECTOR
from fa2tune.search_spaces.sm90.fwd import programs
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Config, Problem

MULTIPROCESSORS = 132
FORMS = tuple(few_tiles.PACES)
#: Shares of a form: two of a block, two of a start, two of "never", wider, and apart; of all: launches, NUMBERED, FEW_TURNS.
SHARES, LAUNCHES, FEW, NUMBERED = 8, 3, 6, 2
#: (rows of a tile, head dim) of SECTOR_COSTS.
SECTORS = tuple((rows, dim) for rows, dims in few_tiles.SECTOR_COSTS.items() for dim in dims)
#: Weight of a call's common error; of a constant's distance from none, and of those that were added for what these races show;
#: where errors count less than squared.
COMMON, HELD, HELD_LESS, OUTLIER, STEPS = 0.3, 1.5, 0.3, 0.05, 25
NEUTRAL = {form: DenseShares((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), 0.0, 1.0) for form in FORMS}
NO_TURNS = (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)
WIDER, APART = 6, 7  #: places of these shares; of pairs the first ones are 0, 2 and 4
CALL = re.compile(
    r"(?P<batch>\d+) x (?P<heads_q>\d+)/(?P<heads_kv>\d+) heads, (?P<seqlen_q>\d+) queries, (?P<seqlen_k>\d+) keys, "
    r"head dim (?P<head_dim>\d+)(?:/(?P<head_dim_v>\d+))?, (?P<mask>full|causal)$"
)
SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim")
SAID = {word: name for name, word in YES_NO.items()}


@dataclass(frozen=True)
class Raced:
    """One form of one call."""

    problem: Problem
    config: Config
    us: float

    @property
    def form(self) -> int:
        return FORMS.index((self.config["BLOCK_M"], self.config["BLOCK_N"], self.config["maxnreg"]))


def posed(said: str) -> Problem | None:
    """A call as ``workloads.described`` names it; None: of another mask."""
    if (found := CALL.match(said)) is None:
        return None
    given = found.groupdict()
    mask = FULL if given.pop("mask") == "full" else CAUSAL
    sizes = {name: int(given[name] or given["head_dim"]) for name in given}
    return Problem("bf16", mask=mask, **sizes)


def config_of(label: str) -> Config | None:
    """The config that ``dense_forwards.label`` names; None: of another kernel."""
    words = label.split()
    if len(words) < len(NAMED) or not words[0].isdigit():
        return None
    told = {name: int(word) if word.isdigit() else word for name, word in zip(NAMED, words, strict=False)}
    rest = " ".join(words[len(NAMED) :])
    return {**told, "num_warps": 4, **{name: word in rest for word, name in SAID.items()}}


def posed_and_timed(record: Mapping[str, Any]) -> Iterator[tuple[Problem | None, list[tuple[Config | None, float]]]]:
    """Calls, and (config, microseconds) of their forms, of a record of either script."""
    for call in record.get("calls", {}).values():
        yield posed(call["call"]), [(config_of(label), us) for label, us in call["us"].items()]
    for case in record.get("cases", []):
        shape = case["shape"]
        sizes = {size: shape[size] for size in SIZES}
        forms = [(one["configs"]["fwd"], one["us"]) for one in case["candidates"]]
        yield Problem("bf16", **sizes, head_dim_v=shape["head_dim"], mask=CAUSAL if shape["causal"] else FULL), forms


def raced(record: Mapping[str, Any]) -> Iterator[list[Raced]]:
    """Of each call with two or more of them, the forms that have a pace."""
    for problem, forms in posed_and_timed(record):
        found = list[Raced]()
        for config, us in forms:
            if problem is None or config is None or config.get("V_HALVES"):
                continue
            if few_tiles.expected_us(problem, config, MULTIPROCESSORS) is not None:
                found.append(Raced(problem, config, us))
        if len(found) > 1:
            yield found


def sector(one: Raced) -> int:
    """Which of SECTORS a form is of; -1: of none."""
    dims = {dim for dim in (one.problem.head_dim, one.problem.head_dim_v) if dim % SECTOR}
    rows = one.config["BLOCK_M"]
    known = few_tiles.SECTOR_COSTS[rows]
    worst = max(dims, key=lambda dim: known.get(dim, known[0]), default=None)
    return -1 if worst is None else SECTORS.index((rows, worst if worst in known else 0))


def named(one: Raced) -> bool:
    """Whether a form has named barriers where they cost."""
    return bool(one.config["NUMBERED"]) and not few_tiles.named_barriers_suit(
        one.problem.specialization, FORMS[one.form]
    )


def parted(at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Shares of SECTORS and of launches, NUMBERED and FEW_TURNS."""
    sectors, launch, numbered, few = np.split(at[SHARES * len(FORMS) :], np.cumsum([len(SECTORS), LAUNCHES, NUMBERED]))
    return np.exp(sectors), np.exp(launch), np.exp(numbered), few.reshape(3, 2)


class Calls:
    """Forms of calls, as arrays: what the busiest multiprocessor works through is played once."""

    def __init__(self, calls: list[list[Raced]]) -> None:
        forms = [one for call in calls for one in call]
        self.call = np.repeat(np.arange(len(calls)), [len(call) for call in calls])
        self.of_call = np.bincount(self.call)
        self.form = np.array([one.form for one in forms])
        self.masked = np.array([int(one.problem.mask != FULL) for one in forms])
        self.numbered = np.array([named(one) for one in forms])
        self.never = np.array([one.config["RESCALE"] == "never" for one in forms])
        self.apart = np.array([one.problem.head_dim != one.problem.head_dim_v for one in forms])
        self.log_us = np.log([one.us for one in forms])
        self.sector = np.array([sector(one) for one in forms])
        self.columns = np.array([few_tiles.columns(one.problem, one.config) for one in forms])
        turns = [one.problem.query_tiles(few_tiles.FULL_TILE) * one.problem.heads_q / MULTIPROCESSORS for one in forms]
        self.few_of = np.where(self.masked, 2, [int(one.config["STAGES"] == 3) for one in forms])
        self.few = np.maximum(0.0, 1 - np.log(np.maximum(turns, 1.0)) / np.log(few_tiles.FEW_TURNS_END))
        self.programs = np.array([programs(one.config) for one in forms])
        self.now = np.log([few_tiles.expected_us(one.problem, one.config, MULTIPROCESSORS) for one in forms])  # type: ignore[arg-type]
        self.rest, self.block, self.start, self.blocks, self.tiles = map(
            np.array, zip(*map(self._terms, forms), strict=True)
        )

    @staticmethod
    def _terms(one: Raced) -> tuple[float, float, float, float, float]:
        """Microseconds of a launch beside LAUNCH_US, of a block, of a tile's start and end; and how many blocks and tiles the
        busiest multiprocessor has."""
        names = "DENSE_SHARES", "DENSE_LAUNCH_US", "NUMBERED", "FEW_TURNS", "DENSE_SECTOR_COSTS"
        there = [getattr(few_tiles, name) for name in names]
        neutral = NEUTRAL, few_tiles.LAUNCH_US, (1.0, 1.0), NO_TURNS, few_tiles.SECTOR_COSTS
        for name, value in zip(names, neutral, strict=True):
            setattr(few_tiles, name, value)
        try:
            paces = few_tiles.paces_us(one.problem, one.config)
        finally:
            for name, value in zip(names, there, strict=True):
                setattr(few_tiles, name, value)
        assert paces is not None  # ``raced``
        launch, block, start = paces
        block *= few_tiles.narrow_part_cost(one.problem, one.config, MULTIPROCESSORS)
        played, more = (
            busiest(one.problem, one.config, MULTIPROCESSORS, start / block + behind) for behind in (0.0, 0.05)
        )
        tiles = (more - played) / 0.05
        return (
            launch - few_tiles.LAUNCH_US[programs(one.config)], block, start, played - tiles * start / block, tiles
        )  # fmt: skip

    def logs(self, at: np.ndarray) -> np.ndarray:
        """Logarithms of what forms are estimated to take."""
        of_forms = at[: SHARES * len(FORMS)].reshape(len(FORMS), SHARES)[self.form]
        shares, row = np.exp(of_forms), np.arange(len(self.form))
        sectors, launch, numbered, few = parted(at)
        few = few[self.few_of]
        never = shares[row, 4 + self.masked] * (1 + of_forms[:, WIDER] * np.maximum(0.0, self.columns / 128 - 2))
        never = never * (1 + self.few * (few[:, 0] + few[:, 1] * (self.columns / 128 - 1)))
        block = self.block * shares[row, self.masked] * np.where(self.apart, shares[:, APART], 1.0)
        block = block * np.where(self.never, never, 1.0) * np.append(sectors, 1.0)[self.sector]
        block = block * np.where(self.numbered, numbered[self.masked], 1.0)
        first = np.array([few_tiles.LAUNCH_US[n] for n in (1, 2, 3)]) * launch
        start = self.start * shares[row, 2 + self.masked]
        return np.log(first[self.programs - 1] + self.rest + block * self.blocks + start * self.tiles)

    def errors(self, at: np.ndarray) -> np.ndarray:
        found = self.log_us - self.logs(at)
        common = np.bincount(self.call, found) / self.of_call
        apart = (found - common[self.call]) * 2 / np.sqrt(self.of_call)[self.call]
        return np.concatenate([apart, COMMON * common, self.held * at])

    def fitted(self) -> np.ndarray:
        start = np.zeros(SHARES * len(FORMS) + len(SECTORS) + LAUNCHES + NUMBERED + FEW)
        self.held = np.full(len(start), HELD)
        self.held[WIDER : SHARES * len(FORMS) : SHARES] = HELD_LESS  # wider
        self.held[-FEW:] = HELD_LESS
        return np.asarray(least_squares(self.errors, start, loss="soft_l1", f_scale=OUTLIER, max_nfev=STEPS).x)

    def longer(self, logs: np.ndarray) -> str:
        """Of the forms that are estimated to be the fastest, how much longer they take than the fastest."""
        found = []
        for nth in range(len(self.of_call)):
            forms = np.flatnonzero(self.call == nth)
            found.append(self.log_us[forms[np.argmin(logs[forms])]] - self.log_us[forms].min())
        over = np.exp(found) - 1
        mean = np.exp(np.mean(found)) - 1
        return f"{mean:.4f} ({(over > 0.03).mean():.3f} above 3 %, {(over > 0.08).mean():.3f} above 8 %)"


def constants(at: np.ndarray) -> Iterator[str]:
    """As few_tiles.py has them."""
    for form, found in zip(FORMS, at[: SHARES * len(FORMS)].reshape(len(FORMS), SHARES), strict=True):
        one = [round(float(share), 3) for share in np.exp(found)]
        pairs = ", ".join(str(tuple(one[place : place + 2])) for place in (0, 2, 4))
        yield f"    {form}: DenseShares({pairs}, {round(float(found[WIDER]), 3) + 0.0}, {one[APART]}),"
    sectors, launches, numbered, few = parted(at)
    costs = dict[int, dict[int, float]]()
    for (rows, dim), share in zip(SECTORS, sectors, strict=True):
        costs.setdefault(rows, {})[dim] = round(few_tiles.SECTOR_COSTS[rows][dim] * float(share), 3)
    yield f"DENSE_SECTOR_COSTS = {costs}"
    launch = {n: round(few_tiles.LAUNCH_US[n] * float(share), 2) for n, share in zip((1, 2, 3), launches, strict=True)}
    yield f"DENSE_LAUNCH_US = {launch}"
    yield f"NUMBERED = {tuple(numbered.round(3).tolist())}"
    yield f"FEW_TURNS = {tuple(map(tuple, few.round(3).tolist()))}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.argument("records", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--without", multiple=True, type=click.Path(exists=True, path_type=Path), help="Not fitted to.")
def main(records: tuple[Path, ...], without: tuple[Path, ...]) -> None:
    names = {path.resolve() for path in without}
    paths = dict.fromkeys(path.resolve() for path in records + without)
    read = {path: list(raced(json.loads(gzip.decompress(path.read_bytes())))) for path in paths}
    read = {path: calls for path, calls in read.items() if calls}
    if not read.keys() - names:
        raise click.UsageError("RECORD: nothing is left to fit to")
    at = Calls([call for path, calls in read.items() if path not in names for call in calls]).fitted()
    for path, calls in read.items():
        one = Calls(calls)
        held = ", held out" if path in names else ""
        click.echo(
            f"{path.name}: {len(calls)} calls{held}: present {one.longer(one.now)}, fitted {one.longer(one.logs(at))}"
        )
    click.echo("\n".join(constants(at)))


if __name__ == "__main__":
    main()
