"""The page's charts of searches, as Vega-Lite specifications; see ``charts``."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from fa2tune.report.charts import LOG, Chart, ChartRecord, coloured, faceted, shaped, tip, zoom
from fa2tune.report.searches import Slices


def _behind(name: str, title: str) -> alt.Y:
    return alt.Y(f"{name}:Q", title=title, scale=LOG, axis=alt.Axis(format="~g", tickCount=5))


def progress(records: Sequence[ChartRecord], by_time: bool) -> Chart | None:
    """Best so far over the final best, a panel per group of searches, a line per length."""
    shown = [record for record in records if not by_time or record["seconds"] is not None]
    if not shown:
        return None
    name, title = ("seconds", "seconds") if by_time else ("count", "candidates")
    order = list(dict.fromkeys(record["panel"] for record in shown))
    lengths = [length for _, length in sorted({(record["len"], record["length"]) for record in shown})]
    lines = alt.Chart().mark_line(interpolate="step-after", point=alt.OverlayMarkDef(size=14)).encode(
        x=alt.X(f"{name}:Q", title=title, axis=alt.Axis(tickCount=4)), y=_behind("ratio", "best so far / final best"),
        color=alt.Color("length:O", title="sequence length", scale=alt.Scale(domain=lengths, range="ordinal")),
        tooltip=[tip("title:N", "key"), tip(f"{name}:Q", title, ",.0f"), tip("ratio:Q", "best so far / final best", ".3f")],
    ).add_params(zoom("x", "y"))  # fmt: skip
    return Chart(
        "progress-time" if by_time else "progress", f"Best time so far over the final best, by {title}",
        "One panel per kernel, dtype, head dim and mask; one line per sequence length. Lower is better; 1 is the final best.",
        faceted([lines], "panel", order, 4), "progress",
        (("title", "key"), (name, title), ("ratio", "best so far / final best")), 4, height=130, picks=("gpu", "kernel"),
    )  # fmt: skip


def convergence(records: Sequence[ChartRecord], searches: int) -> Chart | None:
    """Median and 90 % quantile over all searches of best so far over the final best."""
    if not records:
        return None
    names = ("median", "90 % quantile")
    chart = alt.Chart(alt.NamedData("rows")).mark_line(point=alt.OverlayMarkDef(size=16)).encode(
        x=alt.X("count:Q", title="candidates of a key"), y=_behind("ratio", "best so far / final best"),
        color=coloured("line", names, f"of {searches} searches"), shape=shaped("line", names, f"of {searches} searches"),
        tooltip=[tip("line:N", "of all searches"), tip("count:Q", "after candidates"), tip("ratio:Q", "over the best", ".3f")],
    ).add_params(zoom("x", "y"))  # fmt: skip
    return Chart(
        "convergence", "All searches: best time so far over the final best, by candidates",
        "How far the best candidate so far is behind the final best of its search.", chart.to_dict(), "convergence",
        (("line", "of all searches"), ("count", "candidates"), ("ratio", "best so far / final best")), 0, height=220,
    )  # fmt: skip


def slices(number: int, of: Slices) -> Chart:
    """A panel per dimension: by value the best, the middle half and the median of times over the best of their key."""
    base = alt.Chart().encode(x=alt.X("value:N", sort=alt.SortField("order"), title=None, axis=alt.Axis(labelAngle=0)))
    tips = [tip("panel:N", "dimension"), tip("value:N", "value"), tip("count:Q", "candidates"), tip("best:Q", "best", ".2f"),
            tip("median:Q", "median", ".2f"), tip("low:Q", "quartiles", ".2f"), tip("high:Q", "to", ".2f")]  # fmt: skip
    title = "time / best of the key"
    boxes = base.mark_bar(opacity=0.35, size=14).encode(y=_behind("low", title), y2="high:Q", tooltip=tips)
    whiskers = base.mark_rule(aria=False, opacity=0.5).encode(y=_behind("best", title), y2="low:Q")
    medians = base.mark_tick(aria=False, thickness=2, size=16).encode(y=_behind("median", title))
    points = base.mark_point(filled=True, size=35, opacity=1).encode(y=_behind("best", title), tooltip=tips)
    points = points.add_params(zoom("y"))
    spec = faceted([boxes, whiskers, medians, points], "panel", of.dimensions, 5)
    spec["resolve"] = {**spec["resolve"], "scale": {"x": "independent"}}
    return Chart(
        f"slices-{number}", f"{of.kernel}, head dim {of.head_dim}: time over the best of its key, by value of each dimension",
        "Point: the best candidate with this value. Box: the middle half. Line: the median.", spec, f"slices-{number}",
        (("panel", "dimension"), ("value", "value"), ("count", "candidates"), ("best", "best"), ("low", "lower quartile"),
         ("median", "median"), ("high", "upper quartile")), 5, height=150,
    )  # fmt: skip


def outcomes(records: Sequence[ChartRecord]) -> Chart | None:
    """A bar per group of searches: candidates that were timed, and the others by what became of them."""
    if not records:
        return None
    groups = list(dict.fromkeys(record["group"] for record in records))
    kinds = list(dict.fromkeys(record["outcome"] for record in sorted(records, key=lambda record: record["place"])))
    chart = alt.Chart(alt.NamedData("rows")).mark_bar().encode(
        x=alt.X("count:Q", title="candidates"), y=alt.Y("group:N", sort=groups, title=None, axis=alt.Axis(labelLimit=320)),
        color=coloured("outcome", kinds, None), order=alt.Order("place:Q"),
        tooltip=[tip("group:N", "searches"), tip("outcome:N", "outcome"), tip("count:Q", "candidates"), tip("all:Q", "of")],
    ).properties(height=alt.Step(18))  # fmt: skip
    return Chart(
        "outcomes", "Candidates of each kernel, dtype, head dim and mask, by outcome",
        "A bar per kernel, dtype, head dim and mask; one colour per outcome.", chart.to_dict(), "outcomes",
        (("group", "searches"), ("outcome", "outcome"), ("count", "candidates"), ("all", "of")), 0, height=0,
    )  # fmt: skip
