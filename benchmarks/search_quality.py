"""How good a config each searcher finds, and how soon: replays on exhaustive tables (benchmarks/tables). Needs no GPU.

    python benchmarks/search_quality.py --out DIR [--seeds 30] [--jobs 16] [TABLE ...]

A replay is the tuner's own search, fed from a table. A compile takes its recorded seconds of one core; as many run at a
time as there are cores. The GPU times compiled candidates, eight at a time. The time that the search sees is the median of
five samples drawn from the recorded ones, over the default's in the same rounds. The score is the true time of the best
candidate that would reach the finals.

Searchers: ``ours`` (fa2tune's default, guided.py, without cache rows), ``ours blind`` (without the default config, which
stems from a sweep of this GPU: the model alone), ``ours warm`` (with the winners in cache/h200.sqlite of the same kernel,
head dim and mask at other lengths), Optuna's ``tpe``, ``gp``, ``cmaes`` and ``random`` on the legal points, and ``list``: a
dozen configs as users of triton.autotune write them, compiled one by one. All but ``ours blind`` and ``list`` try the
default config first.

The model's constants were fitted on such tables; here each key is searched with constants fitted without it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: small matrices, one process a core
import bisect
import heapq
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import tables

from fa2tune import gpus
from fa2tune.compiling import registry
from fa2tune.predicting import prior
from fa2tune.rows import reader
from fa2tune.rows.row import Row
from fa2tune.sharing.storage import Storage
from fa2tune.sharing.study_writer import StudyWriter
from fa2tune.spec.problem import Config
from fa2tune.tuning.search.candidates import Field, Point, UnseenSampler, point
from fa2tune.tuning.search.guided import hopeful
from fa2tune.tuning.search.proposals import Search, winners
from fa2tune.tuning.search.study import KeyStudy, TrialOutcome
from fa2tune.tuning.select import finalists

ROWS = Path(__file__).parent.parent / "cache" / "h200.sqlite"
SEARCHERS = ("ours", "ours blind", "ours warm", "tpe", "gp", "cmaes", "random", "list")
OURS = SEARCHERS[:3]
SHARE, WITHIN = 0.10, 0.02  #: the bar: after so much of the space, so far from the exhaustive best
MOST = 200  #: trials of a replay: ends before a tenth of a large space
CORES = 16
AHEAD = 1  #: proposals in progress per core, as in tuner.py
HEAT = 8
#: seconds of the GPU's process per candidate besides its samples: loading, first launch, its share of the anchor's samples
SETUP_S, SAMPLES, FLUSH_S = 0.02, 7, 1e-4
AUTOTUNE_S = 0.15  #: triton.autotune's warm-up and repetitions of one config
CACHED_S, UNKNOWN_COMPILE_S = (
    0.1,
    0.5,
)  #: a shorter compile came out of the compiler's cache: the median takes its place
GP_TRIALS = 48  #: of Optuna's GP, which takes a second a proposal by then


@dataclass
class Trace:
    """One replay: after each measured config, when that was and how good the best-looking one really is."""

    seconds: list[float] = field(default_factory=list)
    regret: list[float] = field(default_factory=list)  #: true time / the exhaustive best's - 1; inf before the first

    def at(self, trials: int) -> float:
        """Loss after so many trials: true time / the exhaustive best's - 1."""
        return self.regret[min(trials, len(self.regret)) - 1] if self.regret else float("inf")

    def within(self, regret: float) -> int | None:
        """Trials until the loss is at most that, for good."""
        late = [number for number, value in enumerate(self.regret, 1) if value > regret]
        first = (late[-1] if late else 0) + 1
        return first if first <= len(self.regret) else None


class Oracle:
    """A table, asked one config at a time."""

    def __init__(self, table: tables.Table, seed: int) -> None:
        self.table = table
        self.rng = random.Random(seed)
        self.best_us = min(table.times.values())
        self.compiled: set[Point] = set()

    def compile_s(self, config: Config) -> float:
        """Seconds of one core; none for a binary that was compiled before."""
        built = self.table.built(config)
        assert built is not None
        where = point(built.config)
        if where in self.compiled:
            return 0.0
        self.compiled.add(where)
        return built.compile_s if built.compile_s > CACHED_S else UNKNOWN_COMPILE_S

    def outcome(self, config: Config) -> TrialOutcome:
        where = point(config)
        status = self.table.statuses.get(where)
        if status:
            return TrialOutcome(config, None, status, status)
        built = self.table.built(config)
        assert built is not None
        ratios = self.table.ratios(built.runs[config[self.table.runtime]])
        seen = statistics.median(self.rng.choice(ratios) for _ in range(min(5, len(ratios))))
        return TrialOutcome(config, seen * self.table.anchor_us)

    def regret(self, finalists: Iterable[TrialOutcome]) -> float:
        """Loss of the one that the finals, which take a hundred samples, would select."""
        times = [self.table.times[point(outcome.config)] for outcome in finalists]
        return min(times, default=float("inf")) / self.best_us - 1


def replay(oracle: Oracle, propose: Callable[[], Config | None], file: Callable[[TrialOutcome], None], trials: int,
           cores: int = CORES) -> Trace:  # fmt: skip
    """Run a search against the clock of a machine with so many cores and one GPU, up to so many configs."""
    trace = Trace()
    free = [0.0] * cores  # when each core is
    compiling: list[tuple[float, int, Config]] = []
    ready: list[Config] = []
    now, gpu_free, number = 0.0, 0.0, 0
    racing: list[Config] = []
    ranked: list[TrialOutcome] = []
    while len(trace.regret) < trials:
        while len(compiling) < AHEAD * cores and (config := propose()) is not None:
            begin = max(now, heapq.heappop(free))
            end = begin + oracle.compile_s(config)
            heapq.heappush(free, end)
            number += 1
            heapq.heappush(compiling, (end, number, config))
        if not racing and ready:
            racing, ready = ready[:HEAT], ready[HEAT:]
            timed = [oracle.table.times.get(point(c)) for c in racing]
            gpu_free = now + sum(SETUP_S + SAMPLES * (us * 1e-6 + FLUSH_S) for us in timed if us is not None)
        upcoming = [compiling[0][0]] if compiling else []
        upcoming += [gpu_free] if racing else []
        if not upcoming:
            break
        now = min(upcoming)
        if racing and gpu_free <= now:
            for config in racing:
                outcome = oracle.outcome(config)
                file(outcome)
                if outcome.time_us is not None:
                    bisect.insort(ranked, outcome, key=lambda outcome: outcome.time_us)
                trace.seconds.append(now)
                trace.regret.append(oracle.regret(finalists.finalists(ranked)))
            racing = []
        while compiling and compiling[0][0] <= now:
            ready.append(heapq.heappop(compiling)[2])
    return trace


# --- the searchers


def estimates_of(table: tables.Table, configs: Sequence[Config], calibration: Any) -> list[float]:
    """The model's times, by constants that have not seen this key."""
    key = table.key
    variant = registry.portable_of(key.kernel)
    more = {} if calibration is None else {"calibration": calibration}
    return prior.estimates(variant, key.specialization(), configs, gpus.named(key.gpu), key.workload(), **more)


def elsewhere(table: tables.Table, rows: Iterable[Row]) -> list[Config]:
    """What the tuner would take from a cache that does not know this length (in any dtype)."""
    key = table.key
    return winners([row for row in rows if row.key.bucket != key.bucket], key.kernel, key.specialization(), key.arch)


def listed(table: tables.Table) -> list[Config]:
    """What users write: block sizes of 64 and 128, 4 or 8 warps, 2 or 3 stages; tensor descriptors, as in Triton's tutorial."""
    fixed = {"LOADS": "descriptor", "MASKED": "last", "maxnreg": 0, table.runtime: 1}
    configs = [
        {**fixed, "BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        for m in (64, 128)
        for n in (64, 128)
        for warps, stages in ((4, 2), (4, 3), (8, 3))
    ]
    return [config for config in configs if point(config) in table.times or point(config) in table.statuses]


def search(table: tables.Table, searcher: str, seed: int, trials: int, calibration: Any = None,
           rows: Iterable[Row] = (), cores: int = CORES) -> Trace:  # fmt: skip
    """One replay of one searcher."""
    oracle = Oracle(table, seed)
    if searcher == "list":
        return autotune(oracle, listed(table))
    variant = registry.portable_of(table.key.kernel)
    configs: list[Config] = [dict(where) for where in sorted([*table.times, *table.statuses], key=repr)]
    writer = StudyWriter(Storage())
    if searcher.startswith("ours"):
        allowed = {point(config) for config in configs}
        guesses = estimates_of(table, configs, calibration)
        kept = hopeful([guesses], [config["LOADS"] for config in configs])
        configs, guesses = [configs[i] for i in kept], [guesses[i] for i in kept]
        space = Field(variant.space, configs, {table.runtime})
        study = KeyStudy(
            table.key,
            "",
            UnseenSampler("guided", space, seed, trials, guesses, None if "blind" in searcher else table.default),
            writer,
        )
        seeds = {"ours": [table.default], "ours blind": []}.get(searcher)
        if seeds is None:
            seeds = [table.default, *elsewhere(table, rows)]
        ours = Search(space, allowed, [study], len(table.binaries), seeds)

        def file(outcome: TrialOutcome) -> None:
            study.tell(outcome)
            ours.filed(outcome.config)

        trace = replay(oracle, ours.propose, file, trials, cores)
    else:
        trials = min(trials, GP_TRIALS) if searcher == "gp" else trials
        study = KeyStudy(table.key, "", UnseenSampler(searcher, Field(variant.space, configs), seed, trials), writer)
        under_way: set[Point] = set()

        def propose() -> Config | None:
            config = study.ask(under_way) if under_way else table.default
            if config is not None:
                under_way.add(point(config))
            return config

        trace = replay(oracle, propose, study.tell, trials, cores)
    writer.close()
    return trace


def autotune(oracle: Oracle, configs: Sequence[Config]) -> Trace:
    """One after the other, compiled when its turn comes."""
    trace, now, best = Trace(), 0.0, TrialOutcome({})
    for config in configs:
        now += oracle.compile_s(config) + AUTOTUNE_S
        outcome = oracle.outcome(config)
        if outcome.time_us is not None and outcome.time_us < (best.time_us or float("inf")):
            best = outcome
        trace.seconds.append(now)
        trace.regret.append(oracle.regret([best] if best.config else []))
    return trace


# --- many of them


@dataclass(frozen=True)
class Job:
    """What one process replays: a searcher on a table, with some seeds."""

    path: Path
    searcher: str
    seeds: tuple[int, ...]
    trials: int
    calibration: Any


def steps(trace: Trace) -> list[list[float | None]]:
    """(trials, seconds, loss) where the loss changed, and the end."""
    found: list[list[float | None]] = []
    for number, (seconds, regret) in enumerate(zip(trace.seconds, trace.regret, strict=True), 1):
        value = None if regret == float("inf") else round(regret, 5)
        if not found or found[-1][2] != value or number == len(trace.regret):
            found.append([number, round(seconds, 2), value])
    return found


def work(job: Job) -> list[list[list[float | None]]]:
    table = tables.load(job.path)
    rows = reader.read(ROWS) if "warm" in job.searcher else []
    return [steps(search(table, job.searcher, seed, job.trials, job.calibration, rows)) for seed in job.seeds]


def calibrations(paths: Sequence[Path]) -> dict[Path, Any]:
    """Per table, the model's constants fitted to the others."""
    import model_fit

    data = {path: model_fit.measured(tables.load(path)) for path in paths}
    if len(data) < 2:
        return dict.fromkeys(paths)
    return {path: model_fit.fit([data[other] for other in paths if other != path]) for path in paths}


def regret_at(replayed: Sequence[Sequence[float | None]], place: int, limit: float) -> float:
    """Of one replay's steps, at so many trials (place 0) or seconds (place 1)."""
    reached = [step[2] for step in replayed if (step[place] or 0.0) <= limit]
    return float("inf") if not reached or reached[-1] is None else reached[-1]


def trials_to(replayed: Sequence[Sequence[float | None]], regret: float) -> float:
    """Trials until the loss is at most that and stays there."""
    first = float("inf")
    for number, _, value in reversed(replayed):
        if value is None or value > regret:
            break
        first = number or 0.0
    return first


def describe(key: Any) -> str:
    return f"{key.kernel} {key.dtype} {key.head_dim} {key.mask} {key.bucket}"


def budget_of(points: int, most: int) -> int:
    return min(most, int(SHARE * points))


def summary(found: Mapping[str, Any]) -> str:
    """Markdown: per key and searcher the loss at three budgets, and whether the target is met."""
    lines = [
        f"Replays end after {found['most']} configs or a tenth of the space, Optuna's GP after {GP_TRIALS}. Behind the best: "
        "the true time of the config that the finals would select by then.", "",
    ]  # fmt: skip
    for name, key in found["keys"].items():
        tenth = int(SHARE * key["points"])
        lines += [
            f"### {name}", "",
            f"{key['points']} legal configs, {key['binaries']} binaries, {key['within']} configs within "
            f"{WITHIN:.0%} of the best; the default is {key['default']:.1%} behind. A tenth: {tenth} configs.", "",
            "| searcher | seeds | behind the best after 25: median (worst decile) | after 100 | at its end "
            "| trials until within 2 %: median (worst decile) | seconds to its end |",
            "|---|--:|--:|--:|--:|--:|--:|",
        ]  # fmt: skip
        for searcher in SEARCHERS:
            replays = key["replays"].get(searcher)
            if not replays:
                continue
            cells = []
            for limit in (25, 100, budget_of(key["points"], found["most"])):
                values = [regret_at(replay, 0, limit) for replay in replays]
                cells.append(f"{_percent(statistics.median(values))} ({_percent(worst(values))})")
            reach = [trials_to(replay, WITHIN) for replay in replays]
            cells.append(f"{_count(statistics.median(reach))} ({_count(worst(reach))})")
            cells.append(f"{statistics.median(replay[-1][1] for replay in replays):.0f}")
            lines.append(f"| {searcher} | {len(replays)} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def worst(values: Sequence[float]) -> float:
    """The ninth decile, not interpolated: a replay that was."""
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]


def _percent(value: float) -> str:
    return "none ran" if value == float("inf") else f"{100 * value:.1f} %"


def _count(value: float) -> str:
    return "never" if value == float("inf") else f"{value:.0f}"


def bar(found: Mapping[str, Any], searcher: str = "ours") -> list[str]:
    """Keys where a searcher misses it: within 2 % after a tenth of the space at most, in the median and in the worst decile."""
    missed = []
    for name, key in found["keys"].items():
        limit = budget_of(key["points"], found["most"])
        values = [regret_at(replay, 0, limit) for replay in key["replays"].get(searcher, ())]
        if not values or statistics.median(values) > WITHIN or worst(values) > WITHIN:
            missed.append(name)
    return missed


def plot(found: Mapping[str, Any], path: Path, place: int) -> None:
    """Median loss and its upper decile against trials (place 0) or seconds (place 1), a panel a key."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(found["keys"])
    columns = min(3, len(names))
    figure, axes = pyplot.subplots(
        -(-len(names) // columns), columns, figsize=(5.2 * columns, 3.6 * -(-len(names) // columns)), squeeze=False
    )
    colours = dict(zip(SEARCHERS, ("#c1121f", "#e07a5f", "#7f4f24", "#1d5fa8", "#6a4c93", "#2a9d8f", "#8d99ae", "#333333"),
                       strict=True))  # fmt: skip
    floor, ceiling = 0.1, 100.0
    for axis, name in zip(axes.flat, names, strict=False):
        key = found["keys"][name]
        for searcher, replays in sorted(key["replays"].items(), key=lambda item: -SEARCHERS.index(item[0])):
            end = max(step[place] for replay in replays for step in replay[-1:])
            start = 1 if place == 0 else 0.3
            grid = [start * (end / start) ** (i / 150) for i in range(151)] if end > start else [end]
            values = [[100 * regret_at(replay, place, x) for replay in replays] for x in grid]
            shown = [min(ceiling, max(floor, statistics.median(v))) for v in values]
            upper = [min(ceiling, max(floor, worst(v))) for v in values]
            width = 2.2 if searcher == "ours" else 1.3
            axis.plot(grid, shown, color=colours[searcher], lw=width, label=searcher, drawstyle="steps-post")
            if searcher in ("ours", "ours blind", "tpe", "random"):
                axis.fill_between(grid, shown, upper, color=colours[searcher], alpha=0.12, step="post", lw=0)
        axis.axhline(100 * WITHIN, color="black", lw=0.8, ls=":")
        if place == 0:
            axis.axvline(SHARE * key["points"], color="black", lw=0.8, ls="--")
        axis.set(xscale="log", yscale="log", ylim=(floor, ceiling), title=f"{name} ({key['points']} configs)")
        axis.set_yticks([0.1, 1, 10, 100], ["0.1 %", "1 %", "10 %", "100 %"])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.grid(alpha=0.25, which="both", lw=0.4)
    for axis in axes[-1]:
        axis.set_xlabel("configs measured" if place == 0 else "seconds, 16 cores and one H200 (replayed)")
    for row in axes:
        row[0].set_ylabel("behind the exhaustive best")
    handles = [(line, text) for text in SEARCHERS for axis in axes.flat[:1]
               for line, label in zip(*axis.get_legend_handles_labels(), strict=True) if label == text]  # fmt: skip
    figure.legend(*zip(*handles, strict=True), loc="lower center", ncol=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--seeds", type=int, default=30, show_default=True)
@click.option("--jobs", type=int, default=len(os.sched_getaffinity(0)), show_default="all cores")
@click.option("--most", type=int, default=MOST, show_default=True, help="Configs a replay measures, at most.")
@click.option("--searcher", "chosen", type=click.Choice(SEARCHERS), multiple=True, help="Only these; the others stay.")
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
def main(out: Path, seeds: int, jobs: int, most: int, chosen: tuple[str, ...], paths: tuple[Path, ...]) -> None:
    """Replay searchers on tables; write replays.json, summary.md and two plots."""
    paths = paths or tuple(sorted(tables.FOLDER.glob(f"*{tables.SUFFIX}")))
    out.mkdir(parents=True, exist_ok=True)
    results = out / "replays.json"
    found = json.loads(results.read_text()) if results.exists() else {"keys": {}}
    found |= {"most": most, "cores": CORES, "heat": HEAT, "ahead": AHEAD}
    constants = calibrations(paths)
    todo: list[Job] = []
    for path in paths:
        table = tables.load(path)
        points = len(table.times) + len(table.statuses)
        best = min(table.times.values())
        about = found["keys"].setdefault(describe(table.key), {"replays": {}})
        about |= {
            "points": points, "binaries": len(table.binaries), "path": path.name,
            "within": sum(time_us <= best * (1 + WITHIN) for time_us in table.times.values()),
            "default": table.times[point(table.default)] / best - 1,
        }  # fmt: skip
        for searcher in chosen or SEARCHERS:
            todo += [
                Job(
                    path, searcher, tuple(range(first, min(first + 5, seeds))), budget_of(points, most), constants[path]
                )
                for first in range(0, seeds, 5)
            ]
            about["replays"][searcher] = []
    names = {path: describe(tables.load(path).key) for path in paths}
    begun = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for number, (job, replays) in enumerate(zip(todo, pool.imap(work, todo), strict=True), 1):
            found["keys"][names[job.path]]["replays"][job.searcher] += replays
            click.echo(f"\r{number}/{len(todo)}, {time.monotonic() - begun:.0f} s", nl=False, err=True)
    click.echo(err=True)
    results.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    (out / "summary.md").write_text(summary(found) + "\n")
    plot(found, out / "by_trials.png", 0)
    plot(found, out / "by_seconds.png", 1)
    for searcher in (name for name in OURS if all(name in key["replays"] for key in found["keys"].values())):
        missed = bar(found, searcher)
        click.echo(f"{searcher}: within {WITHIN:.0%} after a tenth, median and worst decile: " +
                   ("missed on " + ", ".join(missed) if missed else "on every key"))  # fmt: skip


if __name__ == "__main__":
    main()
