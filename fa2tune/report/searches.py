"""What the page says of searches: best time so far, which dimensions matter, times by value, what became of the candidates.

Everything here is a number or a text; ``searchcharts`` has the charts of it."""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from fa2tune.measuring.samples import quantile
from fa2tune.report import facts
from fa2tune.report.charts import ChartRecord, dims_of, record_of, tokens
from fa2tune.report.sources import StoredSearch
from fa2tune.rows import pruned

#: Timed trials below which nothing is said of a study's dimensions.
LEAST_TRIALS = 10
#: The share of a study's trials that count as good, when asked which dimensions make them so.
GOOD = 0.25
#: A pause between two trials that is longer than this was between two runs.
PAUSE = timedelta(minutes=10)
#: Reasons that the page lists.
MOST_REASONS = 120


@dataclass(frozen=True)
class SearchGroup:
    """The searches of one variant of a kernel, dtype, head dim and mask: one a length."""

    title: str
    searches: Sequence[StoredSearch]
    tokens: str


def groups(searches: Iterable[StoredSearch]) -> list[SearchGroup]:
    groups: dict[tuple[object, ...], list[StoredSearch]] = {}
    for search in sorted(searches, key=lambda s: facts.order(s.key)):
        groups.setdefault((*facts.order(search.key)[:-1], search.variant), []).append(search)
    found = []
    for members in groups.values():
        key = members[0].key
        title = f"{members[0].searched} {key.dtype} {dims_of(key)} {key.kind}"
        about = " ".join(word for word in tokens(key).split() if not word.startswith("len:"))
        found.append(SearchGroup(title, members, about))
    return found


# ---- best so far


def working_seconds(searches: Iterable[StoredSearch]) -> Callable[[datetime], float]:
    """Seconds of work up to a moment, since the first trial of all was filed: pauses between runs taken out."""
    moments = sorted({trial.filed for search in searches for trial in search.trials if trial.filed})
    spent: dict[datetime, float] = {}
    total = 0.0
    for before, moment in zip([moments[0], *moments], moments, strict=False) if moments else ():
        gap = moment - before
        total += gap.total_seconds() if gap <= PAUSE else 0.0
        spent[moment] = total
    return lambda moment: spent[moment]


def best_so_far(search: StoredSearch) -> list[tuple[int, datetime | None, float]]:
    """(trials filed, when, best time over the final best) each time there is a new best, and at the end."""
    timed = search.timed
    if not timed:
        return []
    final = min(time for *_, time in timed)
    steps: list[tuple[int, datetime | None, float]] = []
    best = float("inf")
    for place, trial, time in timed:
        if time < best:
            best = time
            steps.append((place + 1, trial.filed, best / final))
    return [*steps, (len(search.trials), search.trials[-1].filed, 1.0)]


def progress(found: Sequence[SearchGroup]) -> list[ChartRecord]:
    """Each search's best so far over its final best, by candidates and by seconds of work; the panels are groups."""
    seconds = working_seconds(search for group in found for search in group.searches)
    records = []
    for group in found:
        for search in group.searches:
            of = {**record_of(search.key), "panel": group.title}
            for count, when, ratio in best_so_far(search):
                records.append({**of, "count": count, "seconds": seconds(when) if when else None, "ratio": ratio})
    return records


def convergence(searches: Sequence[StoredSearch]) -> list[ChartRecord]:
    """All searches at once: median and 90 % quantile of best so far over the final best, against candidates; [] for fewer than
    three searches. A search that has no time yet counts with its slowest."""
    curves = [best_so_far(search) for search in searches if len(search.timed) >= 2]
    if len(curves) < 3:
        return []
    records = []
    for count in range(1, max(len(search.trials) for search in searches) + 1):
        now = [min((r for n, _, r in steps if n <= count), default=steps[0][2]) for steps in curves]
        for name, share in (("median", 0.5), ("90 % quantile", 0.9)):
            records.append({"line": name, "count": count, "ratio": quantile(now, share)})
    return records


# ---- which dimensions matter


def importances(searches: Iterable[StoredSearch]) -> dict[tuple[str, int], dict[str, float]]:
    """(kernel, head dim) -> dimension -> share, averaged over its studies that have enough timed trials: which dimensions tell
    the good trials from the others, by Optuna's PED-ANOVA."""
    import optuna

    gathered: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        for search in searches:
            timed = [trial for _, trial, _ in search.timed]
            if len(timed) < LEAST_TRIALS or len({trial.time_us for trial in timed}) < 3:
                continue
            study = optuna.create_study(direction="minimize")
            study.add_trials([trial.frozen for trial in timed])
            evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=GOOD)
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
            gathered.setdefault((search.searched, search.key.head_dim), []).append(shares)
    found = {}
    for group, several in gathered.items():
        names = {name for shares in several for name in shares}
        means = {name: statistics.fmean(shares.get(name, 0.0) for shares in several) for name in names}
        found[group] = dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))
    return found


@dataclass(frozen=True)
class Slices:
    """What each value of each dimension came to, for one kernel and head dim."""

    kernel: str
    head_dim: int
    studies: int
    trials: int
    dimensions: Sequence[str]  #: the most important first, each with its importance where that is known
    records: Sequence[ChartRecord]  #: one for each value of each dimension
    tokens: str


def slices(searches: Sequence[StoredSearch], shares: Mapping[tuple[str, int], Mapping[str, float]]) -> list[Slices]:
    """Per kernel and head dim and dimension: times over the best of their key, by value."""
    groups: dict[tuple[str, int], list[StoredSearch]] = {}
    for search in sorted(searches, key=lambda s: facts.order(s.key)):
        if search.timed:
            groups.setdefault((search.searched, search.key.head_dim), []).append(search)
    found = []
    for (kernel, dim), mine in groups.items():
        points: dict[str, dict[Any, list[float]]] = {}
        for search in mine:
            best = min(time for *_, time in search.timed)
            for _, trial, time in search.timed:
                for name, value in trial.config.items():
                    points.setdefault(name, {}).setdefault(value, []).append(time / best)
        known = shares.get((kernel, dim), {})
        names = sorted((n for n in points if len(points[n]) > 1), key=lambda name: (-known.get(name, 0.0), name))
        titles = {name: f"{name}, {known[name]:.0%}" if name in known else name for name in names}
        records = [record for name in names for record in _slice(titles[name], points[name])]
        count = sum(len(search.timed) for search in mine)
        found.append(
            Slices(
                kernel, dim, len(mine), count, list(titles.values()), records, f"dim:{dim} kernel:{mine[0].key.kernel}"
            )
        )
    return found


def _slice(title: str, values: Mapping[Any, Sequence[float]]) -> list[ChartRecord]:
    """One dimension: per value the best, the quartiles and the median of times over the best of their key."""
    records = []
    for place, value in enumerate(sorted(values, key=lambda value: (isinstance(value, str), value))):
        ratios = values[value]
        low, middle, high = (quantile(ratios, share) for share in (0.25, 0.5, 0.75))
        records.append({"panel": title, "value": str(value), "order": place, "count": len(ratios), "best": min(ratios),
                        "low": low, "median": middle, "high": high})  # fmt: skip
    return records


# ---- what became of the candidates

TIMED = "timed"


def outcomes(found: Sequence[SearchGroup]) -> list[ChartRecord]:
    """Per group how many candidates were timed, and how many met each other end; at its worst length."""
    records = []
    for group in found:
        ends: dict[tuple[Any, ...], str] = {}
        for search in group.searches:
            wrong = [dict(config) for config, _ in search.wrong]
            for trial in search.trials:
                point = tuple(sorted(trial.config.items()))
                status = "wrong_result" if trial.config in wrong else trial.status
                ends[point] = status or ends.get(point, "")
        of = {name: value for name, value in record_of(group.searches[0].key).items() if name not in ("len", "length")}
        for outcome, times in sorted(Counter(status or TIMED for status in ends.values()).items()):
            records.append(
                {**of, "group": group.title, "outcome": pruned.words(outcome), "count": times, "all": len(ends)}
            )
    kinds = [TIMED, *sorted({record["outcome"] for record in records} - {TIMED})]
    return [{**record, "place": kinds.index(record["outcome"])} for record in records]


@dataclass(frozen=True)
class FailureLine:
    """A reason in full, and how often it was met."""

    status: str
    why: str
    times: int
    example: str  #: key and config of one of them
    tokens: str


def failures(searches: Iterable[StoredSearch]) -> list[FailureLine]:
    """Why candidates have no time, equal reasons counted together, the most frequent outcome first; at most MOST_REASONS."""
    from fa2tune.rows.describe import describe

    met: dict[tuple[str, str], tuple[int, str, str]] = {}
    seen: set[tuple[object, ...]] = set()
    for search in searches:
        group = (*facts.order(search.key)[:-1], search.variant)
        ended = [(t.status, t.why, t.config) for t in search.trials if t.status]
        ended += [("wrong_result", why, config) for config, why in search.wrong]
        for status, why, config in ended:
            once = (group, status, tuple(sorted(config.items())))
            if once in seen:  # the same end at every length
                continue
            seen.add(once)
            where = f"{search.searched} {search.key.dtype} {search.key.head_dim} {search.key.kind}"
            about = " ".join(word for word in tokens(search.key).split() if not word.startswith("len:"))
            times, example, kept = met.get((status, why), (0, f"{where}: {describe(config)}", about))
            met[status, why] = times + 1, example, kept
    common = Counter[str]()
    for (status, _), (times, *_) in met.items():
        common[status] += times
    ordered = sorted(met.items(), key=lambda item: (-common[item[0][0]], item[0][0], -item[1][0], item[0][1]))
    return [
        FailureLine(pruned.words(status), why, times, example, about)
        for (status, why), (times, example, about) in ordered[:MOST_REASONS]
    ]
