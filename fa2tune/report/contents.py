"""What the report shows: what the sources hold, put into the template."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fa2tune import __version__
from fa2tune.bench import tables
from fa2tune.report import charts, compared, document, facts, searchcharts, searches, served
from fa2tune.report.charts import BEST_OF_KEYS, PICKS, Chart, ChartRecord
from fa2tune.report.facts import KERNEL_ORDER, KERNEL_TITLES, Standing, TimedPrediction
from fa2tune.report.sources import Sources, StoredSearch
from fa2tune.rows import pruned, record
from fa2tune.rows.row import PORTED, PREDICTED, Row
from fa2tune.spec.key import TuningKey
from fa2tune.spec.problem import DTYPES

#: What a reader can narrow the page to: token prefix (charts.tokens) -> title.
FILTERS = {"gpu": "GPU", "dim": "head dim", "dtype": "dtype", "mask": "mask", "kernel": "kernel", "len": "length"}


@dataclass(frozen=True)
class Headline:
    """One headline figure."""

    figure: str
    what: str
    more: str = ""


@dataclass(frozen=True)
class Line:
    """One row in the table of winners."""

    standing: Standing
    config: str
    gain: str
    tokens: str
    length: str
    mask: str
    kernel: str
    number: int  #: its place in the details
    first: bool  #: of its kernel, dtype and mask


@dataclass(frozen=True)
class Block:
    """The winners of one GPU and head dim, and what to say of them in a line."""

    title: str
    says: Sequence[str]
    lines: Sequence[Line]
    keys: int
    tokens: str


@dataclass(frozen=True)
class Gathered:
    """What follows from the sources, computed once."""

    sources: Sources
    standings: Sequence[Standing]
    ordered: Sequence[StoredSearch]  #: searches in an order that means something: no exhaustive tables
    groups: Sequence[searches.SearchGroup]  #: of these
    shares: Mapping[tuple[str, int], Mapping[str, float]]  #: searches.importances
    slices: Sequence[searches.Slices]
    pairs: Sequence[TimedPrediction]
    both: Sequence[compared.Compared]  #: empty where there is no other cache

    @classmethod
    def of(cls, sources: Sources) -> Gathered:
        ordered = [search for search in sources.searches if not search.exhaustive]
        shares = searches.importances(sources.searches)
        return cls(
            sources, facts.standings(sources.rows), ordered, searches.groups(ordered), shares,
            searches.slices(sources.searches, shares), pairs_of(sources.searches),
            compared.compare(sources.rows, sources.others) if sources.others else [],
        )  # fmt: skip

    @property
    def other(self) -> str:
        """The file that is compared with."""
        return str(self.sources.files.get("compared with", "the other file"))


def render(sources: Sources) -> str:
    """The page as HTML. It asks for nothing from elsewhere, and its content security policy allows nothing else."""
    found = Gathered.of(sources)
    data = _data(found)
    drawn = _charts(found, data)
    embedded = {
        "charts": charts.embedded(drawn), "data": {name: document.columnar(records) for name, records in data.items()},
        "picks": picks(data), "details": details(found.standings),
        "served": served.served(found.standings) if found.standings else None,
        "gpus": {f"{s.row.key.gpu}@{s.row.key.sm_count}": charts.catalogue_entry(s.row.key) for s in found.standings},
    }  # fmt: skip
    return document.assemble(_view(found) | {"charts": {chart.id: chart for chart in drawn}}, embedded)


def _data(found: Gathered) -> dict[str, Sequence[ChartRecord]]:
    """The data sets that charts are drawn from."""
    sources = found.sources
    return {
        BEST_OF_KEYS: charts.key_records(found.standings), "peers": charts.peer_records(sources.bench) if sources.bench else [],
        "pairs": charts.pair_records(found.pairs), "compared": charts.compared_records(found.both),
        "progress": searches.progress(found.groups), "convergence": searches.convergence(found.ordered),
        "outcomes": searches.outcomes(searches.groups(sources.searches)),
        **{f"slices-{number}": one.records for number, one in enumerate(found.slices)},
    }  # fmt: skip


def _charts(found: Gathered, data: Mapping[str, Sequence[ChartRecord]]) -> list[Chart]:
    """Every chart that the sources allow."""
    bench, timed = found.sources.bench, sum(len(search.timed) >= 2 for search in found.ordered)
    drawn = [
        charts.gains(found.standings), charts.speeds(found.standings), charts.roofline(found.standings),
        charts.peers(bench) if bench else None,
        charts.compared(data["compared"], [c.key for c in found.both if c.ratio], found.other),
        searchcharts.convergence(data["convergence"], timed), searchcharts.progress(data["progress"], by_time=False),
        searchcharts.progress(data["progress"], by_time=True), searchcharts.outcomes(data["outcomes"]),
        *(searchcharts.slices(number, one) for number, one in enumerate(found.slices)), charts.predictions(data["pairs"]),
    ]  # fmt: skip
    return [chart for chart in drawn if chart]


def picks(data: Mapping[str, Sequence[ChartRecord]]) -> dict[str, Any]:
    """Field -> its title and [(value, label)] in the order of the page."""
    places: dict[str, Any] = {"kernel": lambda k: facts.place(KERNEL_ORDER, k)}
    found = {}
    for name, title in PICKS.items():
        values = list(dict.fromkeys(record[name] for records in data.values() for record in records if name in record))
        ordered = sorted(values, key=places[name]) if name in places else values
        labels = [KERNEL_TITLES.get(value, value) if name == "kernel" else value for value in ordered]
        found[name] = {"title": title, "values": list(zip(ordered, labels, strict=True))}
    return found


def _view(found: Gathered) -> dict[str, Any]:
    """What the template shows."""
    sources, standings = found.sources, found.standings
    keys = {s.row.key for s in standings} | {search.key for search in sources.searches}
    return {
        "title": _title(keys), "name": sources.title, "files": {kind: str(path) for kind, path in sources.files.items()},
        "notes": sources.notes, "version": __version__, "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "digest": record.digest(sources.rows) if sources.rows else "", "count": len(sources.rows),
        "tiles": tiles(standings, sources.searches), "filters": filters(keys), "blocks": blocks(standings),
        "of_peak": of_peak(standings), "bench_setting": tables.setting(sources.bench) if sources.bench else "",
        "objections": tables.objections(sources.bench) if sources.bench else [],
        "sentences": sentences(sources.bench) if sources.bench else [], "groups": found.groups,
        "measured": any(search.obtained != PREDICTED for search in sources.searches),
        "importances": importance_table(found.shares), "slices": found.slices, "least_trials": searches.LEAST_TRIALS,
        "good": searches.GOOD, "failures": searches.failures(sources.searches), "pruned": pruned_table(sources.rows),
        "pairs": found.pairs, "origins": facts.origins(sources.rows),
        "only_predicted": all(s.row.obtained == PREDICTED for s in standings), "compared": compared_lines(found.both),
        "ported": ported_note(standings),
        "compared_counts": compared.counts(found.both), "other": found.other,
    }  # fmt: skip


def ported_note(standings: Sequence[Standing]) -> str:
    """What the figures of ported rows are; "": there are none."""
    found = [s.row for s in standings if s.row.obtained == PORTED]
    if not found:
        return ""
    targets, hosts = (sorted({*names}) for names in ([r.key.gpu for r in found], [r.obtained_on for r in found]))
    return (
        f"{len(found)} of the rows are ported to {', '.join(targets)}: they were timed as sm_80 code on {', '.join(hosts)}, so "
        "their times and TFLOP/s are that GPU's."
    )


def sentences(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(section, its averages in words) of results of the benchmark."""
    found = []
    for dtype, pass_, kind in tables.sections(data):
        said = tables.sentence(tables.records(data, kind, dtype=dtype, **{"pass": pass_}))
        found.append((tables.title_of(dtype, pass_, kind), said))
    return [(title, said) for title, said in found if said]


def _title(keys: Iterable[TuningKey]) -> str:
    names = sorted({charts.catalogue_entry(key) for key in keys})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- the head


def tiles(standings: Sequence[Standing], found: Sequence[StoredSearch]) -> list[Headline]:
    """What a reader wants to know first."""
    best = [s for s in standings if s.best]
    shown = (
        [Headline(str(len(best)), "tuning keys", f"{len(standings)} rows: a key may have several kinds")]
        if best
        else []
    )
    for kernel, name in (("fwd", "forward"), ("bwd", "whole backward")):
        mine = [s for s in best if s.row.key.kernel == kernel and s.row.tflops]
        if not mine:
            continue
        top = max(mine, key=lambda s: s.row.tflops or 0.0)
        share = "" if top.share is None else f", {top.share:.0%} of peak"
        shown.append(
            Headline(
                f"{top.row.tflops:.0f}",
                f"TFLOP/s {name}, at best",
                charts.title_of(top.row.key).split(" ", 1)[1] + share,
            )
        )
        gain = facts.mean_gain(mine)
        if gain is not None:
            most = max(s.row.gain or 0.0 for s in mine)
            shown.append(
                Headline(f"{gain:.3f} x", f"{name} over the portable default", f"geometric mean; at most {most:.2f}")
            )
    with_interval = [s for s in best if s.row.gain_low is not None]
    if with_interval:
        kept = sum(s.keeps_default for s in with_interval)
        shown.append(
            Headline(
                str(kept),
                "keys not faster than the portable default",
                f"beyond the 95 % interval, of {len(with_interval)}",
            )
        )
    near = [s.nearness for s in standings if s.nearness is not None]
    if near:
        shown.append(
            Headline(
                f"{max(near):.2f}", "largest error as a share of its bound", f"median {statistics.median(near):.2f}"
            )
        )
    if found:
        trials = sum(len(search.trials) for search in found)
        failed = sum(1 for search in found for trial in search.trials if trial.status)
        shown.append(
            Headline(f"{trials}", "trials recorded", f"{len(found)} keys searched; {failed} trials without a time")
        )
    return shown


def filters(keys: Iterable[TuningKey]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, [(token, label)]) of every choice that there is more than one of."""
    ordered = sorted(keys, key=facts.order)
    choices: dict[str, list[str]] = {prefix: [] for prefix in FILTERS}
    for key in ordered:
        for token in charts.tokens(key).split():
            prefix, _, value = token.partition(":")
            if value not in choices[prefix]:
                choices[prefix].append(value)
    places: dict[str, Any] = {
        "len": int, "dim": int, "kernel": lambda k: facts.place(KERNEL_ORDER, k), "dtype": lambda d: facts.place(DTYPES, d),
        "mask": str, "gpu": str,
    }  # fmt: skip
    shown = []
    for prefix, title in FILTERS.items():
        values = sorted(choices[prefix], key=places[prefix])
        if len(values) > 1:
            labels = [tables.length_name(int(value)) if prefix == "len" else value for value in values]
            shown.append((title, [(f"{prefix}:{value}", label) for value, label in zip(values, labels, strict=True)]))
    return shown


# ---- winners


def blocks(standings: Sequence[Standing]) -> list[Block]:
    groups: dict[tuple[str, int, int, int], list[tuple[int, Standing]]] = {}
    for number, s in enumerate(standings):
        key = s.row.key
        groups.setdefault((key.gpu, key.sm_count, key.head_dim, key.head_dim_v), []).append((number, s))
    many = len({group[:2] for group in groups}) > 1
    found = []
    for (gpu, sms, dim, dim_v), members in groups.items():
        title = f"head dim {dim}" if dim == dim_v else f"head dim {dim}, V {dim_v}"
        if many:
            title += f", {gpu} ({sms} SMs)"
        mine = [s for _, s in members]
        best = [s for s in mine if s.best]
        about = " ".join(w for w in charts.tokens(mine[0].row.key).split() if w.startswith(("gpu:", "dim:")))
        lines: list[Line] = []
        last: tuple[Any, ...] = ()
        for number, s in members:
            group = s.row.key.kernel, s.row.key.dtype, s.row.key.precision, s.row.key.kind
            lines.append(_line(s, number, group != last))
            last = group
        found.append(Block(title, list(_says(best)), lines, len(best), about))
    return found


def _says(best: Sequence[Standing]) -> Iterable[str]:
    for kernel, name in (("fwd", "forward"), ("bwd", "backward")):
        mine = [s for s in best if s.row.key.kernel == kernel and s.row.tflops]
        if mine:
            top = max(mine, key=lambda s: s.row.tflops or 0.0)
            gain = facts.mean_gain(mine)
            share = "" if top.share is None else f" ({top.share:.0%})"
            over = "" if gain is None else f", {gain:.3f} x portable default"
            yield f"{name} up to {top.row.tflops:.0f} TFLOP/s{share}{over}"


def _line(s: Standing, number: int, first: bool) -> Line:
    key = s.row.key
    return Line(
        s, facts.config_text(s.row), facts.gain_text(s.row),
        charts.tokens(key) + ("" if s.best else " other"), tables.length_name(key.bucket), key.kind,
        key.kernel, number, first,
    )  # fmt: skip


def details(standings: Sequence[Standing]) -> dict[str, Any]:
    """What a row says when it is opened: per row [[number of a title, text]]. Titles are listed once."""
    titles: dict[str, int] = {}
    entries = [[(titles.setdefault(title, len(titles)), text) for title, text in _detail(s)] for s in standings]
    shown = [
        {"tflops": s.row.tflops, "evidence": s.row.obtained, "on": s.row.obtained_on, "dim": s.row.key.head_dim,
         "dtype": s.row.key.dtype, "len": s.row.key.bucket, "title": charts.title_of(s.row.key)}
        for s in standings
    ]  # fmt: skip
    return {"titles": list(titles), "rows": entries, "facts": document.columnar(shown)}


def _detail(s: Standing) -> Iterable[tuple[str, str]]:
    row, key = s.row, s.row.key
    figure = facts.figure
    yield "key", f"{charts.title_of(key)} on {key.gpu} ({key.sm_count} SMs, sm_{key.arch}), precision {key.precision}"
    if row.config:
        yield "config", ", ".join(f"{name} = {value}" for name, value in row.config.items())
    problem = facts.workload(row)
    yield "workload", f"batch {problem.batch}, {problem.heads_q} query heads, {problem.heads_kv} key and value heads"
    if row.time_us is not None:
        spread = ""
        if row.time_low_us is not None and row.time_high_us is not None:
            spread = f" (10 % to 90 %: {figure(row.time_low_us, 5)} to {figure(row.time_high_us, 5)})"
        count = f", {row.samples} samples" if row.samples else ""
        yield (
            "time",
            f"{figure(row.time_us, 5)} us{spread}{count}; portable default {figure(row.default_time_us, 5) or 'unknown'} us",
        )
    if s.lead is not None:
        yield "lead", f"{s.lead:.3f} times as fast as the portable winner"
    if row.barred:
        yield "not served", f"this row {row.barred}"
    if row.errors:
        said = []
        for tensor, entry in row.errors.items():
            parts = [
                f"{n} {_loose(entry.get(n))} of {_loose(entry.get(f'{n}_allowed'))}"
                for n in ("max", "rms")
                if n in entry
            ]
            said.append(f"{tensor}: {', '.join(parts)}")
        yield "errors", "; ".join(said)
    if row.registers is not None:
        shared = "unknown" if row.shared_bytes is None else f"{row.shared_bytes} B"
        yield (
            "binary",
            f"{row.registers} registers, {row.spills} spilled words a thread; {shared} of shared memory a block",
        )
    if row.tried:
        yield "tried", f"{row.tried} candidates compiled"
    if row.pruned:
        yield "pruned", pruned.counted(row.pruned)
    clock = "" if row.clock_mhz is None else f" at {row.clock_mhz} MHz"
    watched = "" if row.throttled is None else f", {row.throttled} throttled launches rejected"
    power = "" if row.power_limit_w is None else f", {row.power_limit_w} W"
    on = f" on {row.obtained_on}" if row.obtained_on else ""
    yield "evidence", f"{row.obtained}{on}{clock}{power}{watched}, {row.created or 'time unknown'}"
    yield (
        "made with",
        f"Triton {row.triton}, torch {row.torch}, driver {row.driver or 'none'}, kernel {row.kernel_hash}",
    )


def _loose(value: Any) -> str:
    return f"{value:.2e}" if isinstance(value, float) else str(value)


# ---- share of the peak, dimensions, what was pruned, predictions


def of_peak(standings: Sequence[Standing]) -> dict[str, Any]:
    """Columns (head dims), and per kernel (lowest, median, highest) share of the peak in each."""
    groups: dict[str, dict[int, list[float]]] = {}
    for s in standings:
        if s.best and s.share is not None:
            groups.setdefault(s.row.key.kernel, {}).setdefault(s.row.key.head_dim, []).append(s.share)
    kernels = sorted(groups, key=lambda k: facts.place(KERNEL_ORDER, k))
    dims = sorted({dim for mine in groups.values() for dim in mine})

    def cell(shares: Sequence[float] | None) -> tuple[float, float, float] | None:
        return (min(shares), statistics.median(shares), max(shares)) if shares else None

    return {"dims": dims, "rows": [(KERNEL_TITLES.get(k, k), [cell(groups[k].get(d)) for d in dims]) for k in kernels]}


def importance_table(shares: Mapping[tuple[str, int], Mapping[str, float]]) -> dict[str, Any]:
    """Columns (kernel, head dim) and rows (dimension, shares), the dimensions that matter most first."""
    columns = sorted(shares, key=lambda c: (c[1], facts.place(KERNEL_ORDER, c[0])))
    names = {name for entry in shares.values() for name in entry}
    ranked = sorted(names, key=lambda name: (-sum(entry.get(name, 0.0) for entry in shares.values()), name))
    return {"columns": columns, "rows": [(name, [shares[column].get(name) for column in columns]) for name in ranked]}


def pruned_table(rows: Sequence[Row]) -> dict[str, Any]:
    """Columns (kernel, head dim); per stage the reasons with their counts and words."""
    found = facts.pruned(rows)
    columns = sorted({c for p in found for c in p.counts}, key=lambda c: (c[1], facts.place(KERNEL_ORDER, c[0])))
    most: dict[str, int] = {}
    stages: dict[str, list[tuple[str, str, list[int]]]] = {}
    for p in found:
        cells = [p.counts.get(column, 0) for column in columns]
        most[p.stage] = max(most.get(p.stage, 1), *cells)
        stages.setdefault(p.stage, []).append((pruned.words(p.reason), p.why, cells))
    return {"columns": columns, "stages": stages, "most": most}


def pairs_of(found: Iterable[StoredSearch]) -> list[TimedPrediction]:
    """Trials that were predicted, then measured."""
    from fa2tune.rows.describe import describe

    return [
        TimedPrediction(search.key, describe(trial.config), trial.predicted_us, time)
        for search in found
        if search.obtained != PREDICTED
        for _, trial, time in search.timed
        if trial.predicted_us
    ]


# ---- two caches


@dataclass(frozen=True)
class Difference:
    """One key in the table of two caches."""

    key: TuningKey
    tokens: str
    state: str
    ratio: float | None
    here: Row | None
    there: Row | None
    configs: str


def compared_lines(both: Sequence[compared.Compared]) -> list[Difference]:
    """The keys of two files, the largest loss first, those without a ratio last."""
    found = []
    for one in both:
        named = " / ".join(facts.config_text(row) if row else "-" for row in (one.here, one.there))
        configs = "same config" if one.same_config else named
        found.append(Difference(one.key, charts.tokens(one.key), one.state, one.ratio, one.here, one.there, configs))
    return sorted(found, key=lambda line: (line.ratio is None, line.ratio or 0.0, facts.order(line.key)))
