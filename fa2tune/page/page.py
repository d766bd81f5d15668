"""The page itself: what the sources hold, put into the template."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from markupsafe import Markup

from fa2tune import __version__
from fa2tune.bench import report
from fa2tune.page import charts, facts, searches
from fa2tune.page.charts import Pair
from fa2tune.page.facts import KERNEL_ORDER, KERNEL_TITLES, Standing
from fa2tune.page.sources import Search, Sources
from fa2tune.problem import DTYPES, TuningKey
from fa2tune.rows import record
from fa2tune.rows.row import PREDICTED, Row

#: What a reader can narrow the page to: token prefix (charts.tokens) -> title.
FILTERS = {"gpu": "GPU", "dim": "head dim", "dtype": "dtype", "mask": "mask", "kernel": "kernel", "len": "length"}


@dataclass(frozen=True)
class Tile:
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
    mark: Markup
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
    several: bool  #: whether any key has more rows than its best


@dataclass(frozen=True)
class Roofline:
    title: str
    drawing: Markup


def render(sources: Sources) -> str:
    """The page as HTML, nothing in it asking for anything from elsewhere."""
    import jinja2

    folder = resources.files("fa2tune.page")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["figure"] = charts.figure
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    inline = {name: Markup(folder.joinpath(f"page.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}
    return template.render(**_view(sources), **inline)


def _view(sources: Sources) -> dict[str, Any]:
    standings = facts.standings(sources.rows)
    found = sources.searches
    ordered = [search for search in found if not search.exhaustive]
    every, families = searches.families(found), searches.families(ordered)
    shares = searches.importances(found)
    scale = charts.GainScale.of(standings)
    keys = {s.row.key for s in standings} | {search.key for search in found}
    pairs = pairs_of(found)
    return {
        "title": _title(keys), "name": sources.title, "files": {kind: str(path) for kind, path in sources.files.items()},
        "notes": sources.notes, "version": __version__, "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "digest": record.digest(sources.rows) if sources.rows else "", "count": len(sources.rows),
        "tiles": tiles(standings, found), "filters": filters(keys), "blocks": blocks(standings, scale),
        "details": details(standings), "scale": scale, "gains": charts.gains(standings),
        "speeds": charts.speeds(standings), "rooflines": rooflines(standings), "of_peak": of_peak(standings),
        "bench": charts.peers(sources.bench) if sources.bench else "",
        "bench_setting": report.setting(sources.bench) if sources.bench else "",
        "objections": report.objections(sources.bench) if sources.bench else [],
        "families": families, "measured": any(search.obtained != PREDICTED for search in found),
        "regret": searches.regret(ordered), "by_trial": searches.progress(families, by_time=False) if families else "",
        "by_time": searches.progress(families, by_time=True) if families else "",
        "importances": importance_table(shares), "slices": searches.slices(found, shares),
        "least_trials": searches.LEAST_TRIALS, "good": searches.GOOD,
        "fates": searches.fates(every) if every else "", "failures": searches.failures(found),
        "pruned": pruned_table(sources.rows), "pairs": pairs, "predictions": charts.predictions(pairs) if pairs else "",
        "origins": facts.origins(sources.rows), "only_predicted": all(s.row.obtained == PREDICTED for s in standings),
    }  # fmt: skip


def _title(keys: Iterable[TuningKey]) -> str:
    names = sorted({charts.catalogue_entry(key) for key in keys})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- the head


def tiles(standings: Sequence[Standing], found: Sequence[Search]) -> list[Tile]:
    """What a reader wants to know first."""
    best = [s for s in standings if s.best]
    shown = [Tile(str(len(best)), "tuning keys", f"{len(standings)} rows, loads and roads apart")] if best else []
    for kernel, name in (("fwd", "forward"), ("bwd", "whole backward")):
        mine = [s for s in best if s.row.key.kernel == kernel and s.row.tflops]
        if not mine:
            continue
        top = max(mine, key=lambda s: s.row.tflops or 0.0)
        share = "" if top.share is None else f", {top.share:.0%} of peak"
        shown.append(
            Tile(
                f"{top.row.tflops:.0f}",
                f"TFLOP/s {name}, at best",
                charts.title_of(top.row.key).split(" ", 1)[1] + share,
            )
        )
        gain = facts.mean_gain(mine)
        if gain is not None:
            most = max(s.row.gain or 0.0 for s in mine)
            shown.append(Tile(f"{gain:.3f} x", f"{name} over the default", f"geometric mean; at most {most:.2f}"))
    judged = [s for s in best if s.row.gain_low is not None]
    if judged:
        kept = sum(s.keeps_default for s in judged)
        shown.append(Tile(str(kept), "keys not faster than the default", f"beyond the 95 % interval, of {len(judged)}"))
    near = [s.nearness for s in standings if s.nearness is not None]
    if near:
        shown.append(Tile(f"{max(near):.2f}", "largest error / its bound", f"median {statistics.median(near):.2f}"))
    if found:
        trials = sum(len(search.trials) for search in found)
        failed = sum(1 for search in found for trial in search.trials if trial.fate)
        shown.append(Tile(f"{trials}", "trials on record", f"{len(found)} keys searched; {failed} without a time"))
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
            labels = [report.length_name(int(value)) if prefix == "len" else value for value in values]
            shown.append((title, [(f"{prefix}:{value}", label) for value, label in zip(values, labels, strict=True)]))
    return shown


# ---- winners


def blocks(standings: Sequence[Standing], scale: charts.GainScale) -> list[Block]:
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
            group = s.row.key.kernel, s.row.key.dtype, s.row.key.precision, s.row.key.causal
            lines.append(_line(s, number, scale, group != last))
            last = group
        found.append(Block(title, list(_says(best)), lines, len(best), about, len(best) < len(mine)))
    return found


def _says(best: Sequence[Standing]) -> Iterable[str]:
    for kernel, name in (("fwd", "forward"), ("bwd", "backward")):
        mine = [s for s in best if s.row.key.kernel == kernel and s.row.tflops]
        if mine:
            top = max(mine, key=lambda s: s.row.tflops or 0.0)
            gain = facts.mean_gain(mine)
            share = "" if top.share is None else f" ({top.share:.0%})"
            over = "" if gain is None else f", {gain:.3f} x default"
            yield f"{name} up to {top.row.tflops:.0f} TFLOP/s{share}{over}"


def _line(s: Standing, number: int, scale: charts.GainScale, first: bool) -> Line:
    key = s.row.key
    return Line(
        s, facts.config_of(s.row), charts.gain_text(s), charts.gain_mark(s, scale),
        charts.tokens(key) + ("" if s.best else " other"), report.length_name(key.bucket), report.mask_name(key.causal),
        key.kernel, number, first,
    )  # fmt: skip


def details(standings: Sequence[Standing]) -> str:
    """What a row says when it is opened, as JSON: per row a list of (title, text). Titles are listed once."""
    titles: dict[str, int] = {}
    entries = [[(titles.setdefault(title, len(titles)), text) for title, text in _detail(s)] for s in standings]
    text = json.dumps({"titles": list(titles), "rows": entries}, separators=(",", ":"))
    # what would end the script element, or begin a comment in it, never stands there
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _detail(s: Standing) -> Iterable[tuple[str, str]]:
    row, key = s.row, s.row.key
    figure = charts.figure
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
            f"{figure(row.time_us, 5)} us{spread}{count}; default {figure(row.default_time_us, 5) or 'unknown'} us",
        )
    if s.lead is not None:
        yield "lead", f"{s.lead:.3f} times as fast as the portable winner"
    if row.barred:
        yield "not served", f"it {row.barred}"
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
        yield (
            "pruned",
            ", ".join(f"{reason} {n}" for reason, n in sorted(row.pruned.items(), key=lambda item: -item[1])),
        )
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


# ---- roofline, dimensions, what was pruned, predictions


def rooflines(standings: Sequence[Standing]) -> list[Roofline]:
    groups: dict[tuple[str, int, str, str], list[Standing]] = {}
    for s in standings:
        key = s.row.key
        if s.best and s.row.tflops and s.share is not None:
            sixteen = "fp32" if key.dtype == "fp32" else "16-bit"
            groups.setdefault((key.gpu, key.arch, sixteen, key.precision), []).append(s)
    found = []
    for (name, arch, kind, precision), mine in groups.items():
        gpu = facts.gpu_of(name, arch)
        assert gpu is not None  # it has a peak
        dtype = mine[0].row.key.dtype if kind == "fp32" else "bf16"
        title = name + (f", float32 {precision}" if kind == "fp32" else "")
        found.append(Roofline(title, charts.roofline(gpu, mine, dtype, precision)))
    return found


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
        stages.setdefault(p.stage, []).append((p.reason, facts.why(p.reason), cells))
    return {"columns": columns, "stages": stages, "most": most}


def pairs_of(found: Iterable[Search]) -> list[Pair]:
    """Trials that were predicted, then measured."""
    from fa2tune.tuning.books import describe

    return [
        Pair(search.key, describe(trial.config), trial.predicted_us, time)
        for search in found
        if search.obtained != PREDICTED
        for _, trial, time in search.timed
        if trial.predicted_us
    ]
