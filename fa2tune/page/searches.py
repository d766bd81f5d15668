"""Drawings of the searches: best so far, which dimensions matter, what each of their values came to, what became of whom."""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from markupsafe import Markup

from fa2tune.bench import report
from fa2tune.measuring.samples import quantile
from fa2tune.page import facts
from fa2tune.page.charts import colour, tokens
from fa2tune.page.sources import Search
from fa2tune.page.svg import Band, Linear, Log, Panel, legend

#: Timed trials below which nothing is said of a study's dimensions.
LEAST_TRIALS = 10
#: The share of a study's trials that count as good, when asked which dimensions make them so.
GOOD = 0.25
#: Slower than the best by more is drawn at the edge.
MOST_BEHIND = 3.0
MOST_BEHIND_OF_ALL = 12.0  #: the same for slices through every legal config
#: A pause between two trials that is longer than this was between two runs.
PAUSE = timedelta(minutes=10)


@dataclass(frozen=True)
class Family:
    """The searches of one variant of a kernel, dtype, head dim and mask: one a length."""

    title: str
    searches: Sequence[Search]
    tokens: str


def families(searches: Iterable[Search]) -> list[Family]:
    groups: dict[tuple[object, ...], list[Search]] = {}
    for search in sorted(searches, key=lambda s: facts.order(s.key)):
        groups.setdefault((*facts.order(search.key)[:-1], search.variant), []).append(search)
    found = []
    for members in groups.values():
        key = members[0].key
        dims = f"{key.head_dim}" if key.head_dim == key.head_dim_v else f"{key.head_dim}/{key.head_dim_v}"
        title = f"{members[0].searched} {key.dtype} {dims} {report.mask_name(key.causal)}"
        about = " ".join(word for word in tokens(key).split() if not word.startswith("len:"))
        found.append(Family(title, members, about))
    return found


# ---- best so far


def working_seconds(searches: Iterable[Search]) -> Callable[[datetime], float]:
    """Seconds of work up to a moment, since the first trial of all was filed: pauses between runs taken out."""
    moments = sorted({trial.filed for search in searches for trial in search.trials if trial.filed})
    spent: dict[datetime, float] = {}
    total = 0.0
    for before, moment in zip([moments[0], *moments], moments, strict=False) if moments else ():
        gap = moment - before
        total += gap.total_seconds() if gap <= PAUSE else 0.0
        spent[moment] = total
    return lambda moment: spent[moment]


def best_so_far(search: Search) -> list[tuple[int, datetime | None, float]]:
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


def progress(found: Sequence[Family], by_time: bool) -> Markup:
    """A panel per family: best so far over the final best, a line a length, against trials or seconds of work."""
    seconds = working_seconds(search for family in found for search in family.searches)
    curves = [(f, [(s, best_so_far(s)) for s in f.searches if s.timed]) for f in found]
    panels = []
    for family, lines in curves:
        points: list[tuple[Search, list[tuple[float, float]]]] = []
        for search, steps in lines:
            if by_time:
                points.append((search, [(seconds(when), ratio) for _, when, ratio in steps if when]))
            else:
                points.append((search, [(float(count), ratio) for count, _, ratio in steps]))
        ends = [x for _, line in points for x, _ in line]
        if not ends:
            continue
        panel = Panel(300, 170, family.title, left=34, bottom=32)
        panel.add(f'<g data-f="{Markup.escape(family.tokens)}">')
        first = 0.0 if not by_time else min(ends)
        x = Linear(first, max(*ends, first + 1.0), panel.left, panel.right)
        top = min(MOST_BEHIND, max(1.1, *(ratio for _, line in points for _, ratio in line)))
        y = Log(1.0, top * 1.02, panel.bottom, panel.top)
        panel.axis_y(y, [t for t in (1, 1.1, 1.25, 1.5, 2, 3) if t <= top], lambda v: f"{v:g}")
        panel.axis_x([(x(t), f"{t:g}") for t in x.ticks(4)], "seconds" if by_time else "candidates")
        for search, line in points:
            stairs: list[tuple[float, float]] = []
            for at, ratio in line:
                if stairs:
                    stairs.append((x(at), stairs[-1][1]))
                stairs.append((x(at), y(min(ratio, top))))
            length = search.key.bucket
            best = min(time for *_, time in search.timed)
            reached = next(f"{at:.0f}" for at, ratio in line if ratio <= 1.02)
            unit = "s" if by_time else "candidates"
            tip = f"{family.title} {report.length_name(length)}: best {best:.1f} us; within 2 % after {reached} {unit}"
            panel.line(stairs, f"len len-{length}", tip, f"len:{length}")
        panel.add("</g>")
        panels.append(Markup('<div data-f="{}">{}</div>').format(family.tokens, panel.render()))
    lengths = sorted({s.key.bucket for f in found for s in f.searches})
    names = {report.length_name(length): f"line len len-{length}" for length in lengths}
    return legend(names) + Markup('<div class="panels small">{}</div>').format(Markup("").join(panels))


def regret(searches: Sequence[Search]) -> Markup:
    """All searches at once: median and worst decile of best so far over the final best, against candidates filed."""
    curves = [best_so_far(search) for search in searches if len(search.timed) >= 2]
    if len(curves) < 3:
        return Markup("")
    most = max(len(search.trials) for search in searches)
    lines: dict[str, list[tuple[float, float]]] = {"median": [], "worst decile": []}
    for count in range(1, most + 1):
        now = [min((r for n, _, r in steps if n <= count), default=MOST_BEHIND) for steps in curves]
        lines["median"].append((count, quantile(now, 0.5)))
        lines["worst decile"].append((count, quantile(now, 0.9)))
    panel = Panel(640, 240, left=42, top=20)
    x = Linear(0, most, panel.left, panel.right)
    top = min(MOST_BEHIND, max(1.1, *(ratio for _, ratio in lines["worst decile"])))
    y = Log(1.0, top * 1.01, panel.bottom, panel.top)
    panel.axis_y(y, [t for t in (1, 1.02, 1.05, 1.1, 1.25, 1.5, 2, 3) if t <= top and (t != 1.02 or top < 1.4)],
                 lambda v: f"{v:g}", "best so far / final best")  # fmt: skip
    panel.axis_x([(x(t), f"{t:g}") for t in x.ticks(8)], "candidates of a key")
    for name, line in lines.items():
        panel.line([(x(n), y(min(ratio, top))) for n, ratio in line], "a-1" if name == "median" else "a-2")
        for n, ratio in line:
            panel.dot(
                x(n), y(min(ratio, top)), "a-1" if name == "median" else "a-2", f"{name}: {ratio:.3f} after {n}", size=2
            )
    return legend({f"median of {len(curves)} searches": "line a-1", "worst decile": "line a-2"}) + panel.render()


# ---- which dimensions matter


def importances(searches: Iterable[Search]) -> dict[tuple[str, int], dict[str, float]]:
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
    drawing: Markup
    tokens: str


def slices(searches: Sequence[Search], shares: Mapping[tuple[str, int], Mapping[str, float]]) -> list[Slices]:
    """Per kernel and head dim a panel a dimension, the most important first: times over the best of their key."""
    groups: dict[tuple[str, int], list[Search]] = {}
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
        names = sorted(points, key=lambda name: (-known.get(name, 0.0), name))
        usual = max(quantile(ratios, 0.75) for values in points.values() for ratios in values.values())
        top = min(MOST_BEHIND_OF_ALL, max(MOST_BEHIND, usual))
        drawn = [_slice(name, points[name], known.get(name), kernel, top) for name in names if len(points[name]) > 1]
        count = sum(len(search.timed) for search in mine)
        drawing = Markup('<div class="panels tiny">{}</div>').format(Markup("").join(drawn))
        found.append(Slices(kernel, dim, len(mine), count, drawing, f"dim:{dim} kernel:{kernel}"))
    return found


def _slice(name: str, values: Mapping[Any, Sequence[float]], share: float | None, kernel: str, top: float) -> Markup:
    """One dimension: per value the best, the middle half and the median of times over the best of their key."""
    ordered = sorted(values, key=lambda value: (isinstance(value, str), value))
    panel = Panel(230, 170, name + ("" if share is None else f"  {share:.0%}"), left=32, bottom=20)
    x = Band(ordered, panel.left, panel.right)
    y = Log(1.0, top, panel.bottom, panel.top)
    panel.axis_y(
        y, [t for t in (1, 1.25, 1.5, 2, 3, 5, 8, 12) if t <= top and (t != 1.25 or top < 4)], lambda v: f"{v:g}"
    )
    panel.axis_x([(x.at(value), str(value)) for value in ordered])
    half = min(9.0, x.step * 0.32)
    for value in ordered:
        ratios = sorted(values[value])
        low, quarter, middle, more = (
            y(min(top, end)) for end in (ratios[0], *(quantile(ratios, q) for q in (0.25, 0.5, 0.75)))
        )
        at = x.at(value)
        tip = f"{name} {value}: {len(ratios)} trials, best {ratios[0]:.2f}, median {quantile(ratios, 0.5):.2f} x the key's best"
        panel.rule(at, low, at, quarter, f"whisker {colour(kernel)}")
        panel.bar(at - half, more, 2 * half, max(1.0, quarter - more), f"box {colour(kernel)}", tip)
        panel.rule(at - half, middle, at + half, middle, "median")
        panel.dot(at, low, colour(kernel), tip, size=2.6)
    return panel.render()


# ---- fates


def fates(found: Sequence[Family]) -> Markup:
    """A bar per family: candidates that were timed, and the others by what became of them."""
    counts: dict[str, Counter[str]] = {}
    for family in found:
        mine = counts.setdefault(family.title, Counter())
        ends: dict[tuple[Any, ...], str] = {}
        for search in family.searches:
            wrong = [dict(config) for config, _ in search.wrong]
            for trial in search.trials:
                point = tuple(sorted(trial.config.items()))
                fate = "wrong_result" if trial.config in wrong else trial.fate
                ends[point] = fate or ends.get(point, "")
        mine.update(fate or "timed" for fate in ends.values())
    kinds = ["timed", *sorted({fate for mine in counts.values() for fate in mine} - {"timed"})]
    classes = {kind: "f-timed" if kind == "timed" else f"f-{place % 6}" for place, kind in enumerate(kinds)}
    most = max((sum(mine.values()) for mine in counts.values()), default=1)
    rows = []
    for family in found:
        mine = counts[family.title]
        panel = Panel(640, 18, label=family.title, left=0, right=0, top=2, bottom=2)
        x, at = Linear(0, most, 0, 600), 0.0
        for kind in kinds:
            if mine[kind]:
                tip = f"{family.title}: {kind} {mine[kind]} of {sum(mine.values())}"
                panel.bar(at, 3, x(mine[kind]) - 1, 12, classes[kind], tip)
                at += x(mine[kind])
        panel.text(at + 4, 13, str(sum(mine.values())), "", "tick")
        rows.append(
            Markup('<tr data-f="{}"><th scope="row">{}</th><td>{}</td></tr>').format(
                family.tokens, family.title, panel.render()
            )
        )
    return legend(classes) + Markup('<table class="bars">{}</table>').format(Markup("").join(rows))


@dataclass(frozen=True)
class Failure:
    """A reason in full, and how often it was met."""

    fate: str
    why: str
    times: int
    example: str  #: key and config of one of them
    tokens: str


def failures(searches: Iterable[Search], most: int = 120) -> list[Failure]:
    """What candidates without a time died of, the same words counted together, the commonest fates first."""
    from fa2tune.tuning.books import describe

    met: dict[tuple[str, str], tuple[int, str, str]] = {}
    seen: set[tuple[object, ...]] = set()
    for search in searches:
        family = (*facts.order(search.key)[:-1], search.variant)
        ended = [(t.fate, t.why, t.config) for t in search.trials if t.fate]
        ended += [("wrong_result", why, config) for config, why in search.wrong]
        for fate, why, config in ended:
            once = (family, fate, tuple(sorted(config.items())))
            if once in seen:  # the same end at every length
                continue
            seen.add(once)
            where = f"{search.searched} {search.key.dtype} {search.key.head_dim} {report.mask_name(search.key.causal)}"
            about = " ".join(word for word in tokens(search.key).split() if not word.startswith("len:"))
            times, example, kept = met.get((fate, why), (0, f"{where}: {describe(config)}", about))
            met[fate, why] = times + 1, example, kept
    common = Counter[str]()
    for (fate, _), (times, *_) in met.items():
        common[fate] += times
    ordered = sorted(met.items(), key=lambda item: (-common[item[0][0]], item[0][0], -item[1][0], item[0][1]))
    return [Failure(fate, why, times, example, about) for (fate, why), (times, example, about) in ordered[:most]]
