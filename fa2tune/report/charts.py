"""The page's charts of rows and of benchmarks, as Vega-Lite specifications that Altair makes and checks.

A chart names its data; the page's script filters the records by the page's filters, sizes the panels, and draws them.
Where a chart has panels there is one per head dim and mask, in that order of rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import altair as alt

from fa2tune import gpus
from fa2tune.bench import tables
from fa2tune.bench.peers import PEERS, SUBJECT
from fa2tune.bench.plotting import COLOURS
from fa2tune.report.compared import Compared
from fa2tune.report.facts import Standing, TimedPrediction, listed_gpu, rank_correlations
from fa2tune.rows.row import OBTAINED
from fa2tune.spec.key import FAMILIES, TuningKey
from fa2tune.spec.mask import ROW_MASKS
from fa2tune.spec.problem import BUCKETS, DTYPES

ChartRecord = dict[str, Any]

BEST_OF_KEYS = "keys"  #: the data set of each key's best row, which several charts share
#: What a reader can choose in a chart, one value at a time: field of a record -> title.
PICKS = {"gpu": "GPU", "kernel": "kernel", "section": "shown"}
ZOOM: Any = {"zoom": "wheel![event.shiftKey]", "translate": "[mousedown, window:mouseup] > window:mousemove!"}
SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-left", "triangle-right")

#: From the least to the greatest value, not to the next powers of ten.
LOG = alt.Scale(type="log", nice=False, padding=6)


@dataclass(frozen=True)
class Chart:
    """One chart as the page's script takes it."""

    id: str
    title: str  #: what is shown, with its unit
    description: str  #: for readers that do not see it
    spec: Mapping[str, Any]  #: Vega-Lite; its data is named "rows"
    data: str  #: name of the data set that "rows" is filtered from
    columns: Sequence[tuple[str, str]]  #: (field, title) of the table that says the same
    panels: int = 1  #: most panels side by side; 0: no panels, as wide as the page
    height: int = 190  #: of a panel, pixels
    picks: Sequence[str] = ()  #: fields of PICKS of which one value is shown at a time
    extra: Mapping[str, Sequence[ChartRecord]] = field(
        default_factory=dict
    )  #: other data sets that the specification names


def embedded(found: Iterable[Chart]) -> list[dict[str, Any]]:
    return [asdict(chart) for chart in found]


# ---- names -----------------------------------------------------------------------------------------------------------


def dims_of(key: TuningKey) -> str:
    return f"{key.head_dim}" if key.head_dim == key.head_dim_v else f"{key.head_dim}/{key.head_dim_v}"


def tokens(key: TuningKey) -> str:
    """What the page's filters know a key by: one word for each field of contents.FILTERS."""
    words = (f"gpu:{key.gpu}@{key.sm_count}", f"dim:{key.head_dim}", f"dtype:{key.dtype}",
             f"mask:{key.mask}", f"kernel:{key.kernel}", f"len:{key.bucket}")  # fmt: skip
    return " ".join(word.replace(" ", "_") for word in words)


def title_of(key: TuningKey) -> str:
    return f"{key.kernel} {key.dtype} {dims_of(key)} {key.kind} {tables.length_name(key.bucket)}"


def catalogue_entry(key: TuningKey) -> str:
    """The name of a key's GPU as its driver gives it."""
    try:
        known = gpus.named(key.gpu)
    except ValueError:
        return key.gpu
    return f"NVIDIA {known.driver_names[0]}" if known.name == key.gpu else key.gpu


def panel_of(key: TuningKey) -> str:
    return f"head dim {dims_of(key)}, {key.kind}"


def record_of(key: TuningKey) -> ChartRecord:
    """The fields that filters, picks and axes go by."""
    return {
        "title": title_of(key), "gpu": f"{key.gpu}@{key.sm_count}", "dim": key.head_dim, "dtype": key.dtype,
        "mask": key.mask, "kernel": key.kernel, "len": key.bucket,
        "length": tables.length_name(key.bucket), "panel": panel_of(key),
    }  # fmt: skip


def panels_of(keys: Iterable[TuningKey]) -> tuple[list[str], int]:
    """(panels in order: a row of panels per mask, a column per head dim; how many columns)."""
    found = sorted({
        ((FAMILIES.index(key.family), ROW_MASKS.index(key.mask)), (key.head_dim, key.head_dim_v), panel_of(key))
        for key in keys
    })  # fmt: skip
    return [name for *_, name in found], max(1, len({dims for _, dims, _ in found}))


def _layout(keys: Sequence[TuningKey]) -> tuple[list[str], int, list[str]]:
    """``panels_of``, and the dtypes in order."""
    present = {key.dtype for key in keys}
    return *panels_of(keys), [dtype for dtype in DTYPES if dtype in present] + sorted(present - set(DTYPES))


# ---- parts of charts -------------------------------------------------------------------------------------------------


def tip(name: str, title: str, shown: str = "") -> alt.Tooltip:
    return alt.Tooltip(name, title=title, format=shown) if shown else alt.Tooltip(name, title=title)


def lengths_axis() -> alt.X:
    order = [tables.length_name(length) for length in BUCKETS]
    return alt.X("length:N", sort=order, title="sequence length", axis=alt.Axis(labelAngle=0))


def coloured(name: str, domain: Sequence[str], title: str | None) -> alt.Color:
    """By the page's own colours, which differ between light and dark."""
    return alt.Color(f"{name}:N", title=title, scale=alt.Scale(domain=list(domain), range="category"))


def shaped(name: str, domain: Sequence[str], title: str | None) -> alt.Shape:
    scale = alt.Scale(domain=list(domain), range=[SHAPES[n % len(SHAPES)] for n in range(len(domain))])
    return alt.Shape(f"{name}:N", title=title, scale=scale)


def zoom(*encodings: Any) -> alt.Parameter:
    """Of the axes named. A finger scrolls the page: only a mouse moves a chart."""
    return alt.selection_interval(bind="scales", encodings=list(encodings), **ZOOM)


def faceted(layers: Sequence[alt.Chart], field_: str, order: Sequence[str], columns: int) -> dict[str, Any]:
    """Panels by a field, each with axes of its own on shared scales."""
    facet = alt.Facet(f"{field_}:N", sort=list(order), title=None, header=alt.Header(labelAnchor="start"))
    chart = alt.layer(*layers, data=alt.NamedData("rows")).facet(facet=facet, columns=columns)
    return dict(chart.resolve_axis(x="independent", y="independent").to_dict())


# ---- rows ------------------------------------------------------------------------------------------------------------


def key_records(standings: Sequence[Standing]) -> list[ChartRecord]:
    """One record per key: its best row. ``n``: its place among all rows."""
    found = []
    for number, s in enumerate(standings):
        row = s.row
        if not s.best:
            continue
        slower = (
            row.tflops * row.time_us / row.default_time_us
            if row.tflops and row.time_us and row.default_time_us
            else None
        )
        found.append({
            **record_of(row.key), "n": number, "gain": row.gain, "low": row.gain_low, "high": row.gain_high,
            "winner": row.tflops, "default config": slower, "share": s.share, "intensity": s.intensity or None,
            "evidence": row.obtained,
        })  # fmt: skip
    return found


def gains(standings: Sequence[Standing]) -> Chart | None:
    """The best row's gain over the portable default config by length, with its interval."""
    shown = [s for s in standings if s.best and s.row.gain]
    if not shown:
        return None
    order, columns, dtypes = _layout([s.row.key for s in shown])
    y = alt.Y("gain:Q", title="x portable default", scale=LOG, axis=alt.Axis(format="~g", tickCount=6))
    base = alt.Chart().transform_filter("isValid(datum.gain)").encode(x=lengths_axis(), xOffset="dtype:N")
    one = alt.Chart().mark_rule(aria=False, strokeDash=[2, 2], color="gray").encode(y=alt.datum(1.0))
    spread = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_rule(aria=False, strokeWidth=1.5)
    spread = spread.encode(
        y=alt.Y("low:Q", title="x portable default"), y2="high:Q", color=coloured("dtype", dtypes, "dtype")
    )
    points = base.mark_point(filled=True, size=45, opacity=1).encode(
        y=y, color=coloured("dtype", dtypes, "dtype"), shape=shaped("evidence", OBTAINED, "evidence"),
        tooltip=[tip("title:N", "key"), tip("gain:Q", "x portable default", ".3f"), tip("low:Q", "95 % from", ".3f"),
                 tip("high:Q", "to", ".3f"), tip("evidence:N", "evidence")],
    ).add_params(zoom("y"))  # fmt: skip
    return Chart(
        "gains", "Speed of the winner over the portable default config, by sequence length",
        "How many times as fast as the portable default config the best row of each key is. Vertical lines are 95 % intervals "
        "of the median. The dashed line is the portable default config.",
        faceted([one, spread, points], "panel", order, columns), BEST_OF_KEYS,
        (("title", "key"), ("gain", "x portable default"), ("low", "95 % from"), ("high", "to"), ("evidence", "evidence")),
        columns, picks=("gpu", "kernel"),
    )  # fmt: skip


def speeds(standings: Sequence[Standing]) -> Chart | None:
    """TFLOP/s by length of the best row and of the portable default config."""
    shown = [s for s in standings if s.best and s.row.tflops]
    if not shown:
        return None
    order, columns, dtypes = _layout([s.row.key for s in shown])
    configs = ("winner", "default config")
    base = alt.Chart().transform_fold(list(configs), as_=["config", "rate"]).transform_filter("isValid(datum.rate)")
    base = base.encode(x=lengths_axis(), y=alt.Y("rate:Q", title="TFLOP/s"), color=coloured("dtype", dtypes, "dtype"))
    dash = alt.StrokeDash("config:N", title="config", scale=alt.Scale(domain=list(configs), range=[[1, 0], [4, 3]]))
    tips = [tip("title:N", "key"), tip("config:N", "config"), tip("rate:Q", "TFLOP/s", ".0f"),
            tip("share:Q", "winner's share of the peak", ".0%"), tip("gain:Q", "x portable default", ".3f")]  # fmt: skip
    lines = base.mark_line(aria=False).encode(strokeDash=dash)
    points = base.mark_point(filled=True, size=35).encode(
        shape=shaped("dtype", dtypes, "dtype"), tooltip=tips,
        opacity=alt.condition("datum.config == 'winner'", alt.value(1), alt.value(0.45)),
    ).add_params(zoom("y"))  # fmt: skip
    return Chart(
        "speeds", "TFLOP/s by sequence length",
        "TFLOP/s of the best row of each key, and dashed of the portable default config.",
        faceted([lines, points], "panel", order, columns), BEST_OF_KEYS,
        (("title", "key"), ("winner", "TFLOP/s"), ("default config", "portable default, TFLOP/s"),
         ("share", "share of the peak"), ("evidence", "evidence")), columns, picks=("gpu", "kernel"),
    )  # fmt: skip


def roofline(standings: Sequence[Standing]) -> Chart | None:
    """TFLOP/s against FLOP per byte of device memory, under the two roofs of the GPU; only GPUs of the catalogue have any."""
    shown = [s for s in standings if s.best and s.row.tflops and s.share is not None and s.intensity > 0]
    if not shown:
        return None
    order, columns, dtypes = _layout([s.row.key for s in shown])
    room = alt.Scale(type="log", nice=False, padding=18)  # for the limit's label
    y = alt.Y("winner:Q", title="TFLOP/s", scale=room, axis=alt.Axis(format="~g", tickCount=5))
    x = alt.X("intensity:Q", title="FLOP per byte", scale=LOG, axis=alt.Axis(format="~s", tickCount=4))
    known = alt.Chart().transform_filter("isValid(datum.share) && datum.intensity > 0")
    points = known.mark_point(filled=True, size=45).encode(
        x=x, y=y, color=coloured("dtype", dtypes, "dtype"), shape=shaped("dtype", dtypes, "dtype"),
        tooltip=[tip("title:N", "key"), tip("winner:Q", "TFLOP/s", ".0f"), tip("share:Q", "share of the peak", ".0%"),
                 tip("intensity:Q", "FLOP per byte", ".0f")],
    ).add_params(zoom("x", "y"))  # fmt: skip
    roofs = alt.Chart(alt.NamedData("roofs"))
    lines = roofs.mark_line(aria=False, color="gray", strokeWidth=1.5).encode(
        x=x.copy(), y=alt.Y("rate:Q"), detail="dtype:N"
    )
    text = roofs.transform_filter("isValid(datum.text)").mark_text(
        aria=False, align="right", baseline="bottom", color="gray", dy=-2, fontSize=10
    ).encode(x=x.copy(), y=alt.Y("rate:Q"), text="text:N")  # fmt: skip
    return Chart(
        "roofline", "TFLOP/s against FLOP per byte of device memory",
        "Both axes are logarithmic. The grey line is the lower of two data-sheet limits: memory bandwidth and products.",
        faceted([lines, text, points], "panel", order, columns), BEST_OF_KEYS,
        (("title", "key"), ("intensity", "FLOP per byte"), ("winner", "TFLOP/s"), ("share", "share of the peak")), columns,
        height=230, picks=("gpu", "kernel"), extra={"roofs": roofs_of(shown)},
    )  # fmt: skip


def roofs_of(standings: Iterable[Standing]) -> list[ChartRecord]:
    """Three points of each GPU's and dtype's roof: where memory limits, the ridge, where products limit."""
    groups: dict[tuple[str, str, str], list[Standing]] = {}
    for s in standings:
        groups.setdefault((f"{s.row.key.gpu}@{s.row.key.sm_count}", s.row.key.dtype, s.row.key.precision), []).append(s)
    found: list[ChartRecord] = []
    for (name, dtype, precision), mine in groups.items():
        gpu = listed_gpu(mine[0].row.key.gpu, mine[0].row.key.arch)
        assert gpu is not None  # it has a share of its peak
        top = gpu.peak(dtype, precision)
        ridge = top * 1e3 / gpu.hbm_gbs  # FLOP per byte
        least = min(
            ridge / 4, min(s.intensity for s in mine) / 1.3, min(s.row.tflops or top for s in mine) * 750 / gpu.hbm_gbs
        )
        most = max(ridge * 4, max(s.intensity for s in mine) * 1.3)
        for at, rate, text in (
            (least, least * gpu.hbm_gbs / 1e3, None),
            (ridge, top, None),
            (most, top, f"{top:g} TFLOP/s"),
        ):
            found.append({"gpu": name, "dtype": dtype, "intensity": at, "rate": rate, "text": text})
    return found


# ---- other implementations -------------------------------------------------------------------------------------------


def peer_records(data: Mapping[str, Any]) -> list[ChartRecord]:
    found = []
    for dtype, pass_, kind in tables.sections(data):
        for cell in tables.records(data, kind, dtype=dtype, **{"pass": pass_}):
            mask = tables.mask_label(cell)
            for name in tables.peers_of([cell]):
                entry = cell["peers"][name]
                if "tflops" not in entry:
                    continue
                found.append({
                    "section": tables.title_of(dtype, pass_, kind), "dim": cell["head_dim"], "dtype": dtype, "mask": mask,
                    "len": cell["seqlen"], "length": tables.length_name(cell["seqlen"]), "peer": PEERS[name].label,
                    "panel": f"head dim {cell['head_dim']}, {mask}", "tflops": entry["tflops"],
                    "ratio": entry.get("ratio") if name != SUBJECT else None,
                })  # fmt: skip
    return found


def peers(data: Mapping[str, Any]) -> Chart:
    """TFLOP/s by length of fa2tune and of each peer."""
    timed = [cell for cell in data["cells"] if cell["kind"] in tables.KIND_TITLES]
    names = [PEERS[name].label for name in tables.peers_of(timed)]
    colours = [COLOURS[name] for name in tables.peers_of(timed)]  # as in the plots of `fa2tune bench`
    found = sorted({(tables.mask_place(tables.mask_label(cell)), cell["head_dim"]) for cell in timed})
    order = [f"head dim {dim}, {mask}" for (_, mask), dim in found]
    columns = len({dim for _, dim in found})
    lengths = [tables.length_name(length) for length in sorted({cell["seqlen"] for cell in timed})]
    base = alt.Chart().encode(
        x=alt.X("length:N", sort=lengths, title="sequence length", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("tflops:Q", title="TFLOP/s"),
        color=alt.Color("peer:N", title=None, scale=alt.Scale(domain=names, range=colours)),
    )  # fmt: skip
    wide = alt.condition(f"datum.peer == '{PEERS[SUBJECT].label}'", alt.value(3), alt.value(1.5))
    lines = base.mark_line(aria=False).encode(strokeWidth=wide)
    points = base.mark_point(filled=True, size=40, opacity=1).encode(
        shape=shaped("peer", names, None),
        tooltip=[tip("peer:N", "implementation"), tip("panel:N", "problem"), tip("length:N", "length"),
                 tip("tflops:Q", "TFLOP/s", ".0f"), tip("ratio:Q", "fa2tune is x as fast", ".2f")],
    ).add_params(zoom("y"))  # fmt: skip
    return Chart(
        "peers", "TFLOP/s of fa2tune and of other implementations, by sequence length",
        "One line per implementation; the thick one is fa2tune. A length without a point was not measured.",
        faceted([lines, points], "panel", order, columns), "peers",
        (("peer", "implementation"), ("panel", "problem"), ("length", "length"), ("tflops", "TFLOP/s"),
         ("ratio", "fa2tune is x as fast")), columns, picks=("section",),
    )  # fmt: skip


# ---- predicted against measured --------------------------------------------------------------------------------------


def pair_records(pairs: Sequence[TimedPrediction]) -> list[ChartRecord]:
    """Each time over the key's best measured; points that would hide each other are given once."""
    best: dict[TuningKey, float] = {}
    for pair in pairs:
        best[pair.key] = min(pair.measured_us, best.get(pair.key, pair.measured_us))
    said = rank_correlations(pairs)
    found: dict[tuple[TuningKey, int, int], ChartRecord] = {}
    for pair in sorted(pairs, key=lambda p: p.measured_us / best[p.key]):
        measured, predicted = pair.measured_us / best[pair.key], pair.predicted_us / best[pair.key]
        where = pair.key, round(measured * 50), round(predicted * 50)
        rank = said.get((pair.key.kernel, pair.key.head_dim))
        if where not in found and measured > 0 and predicted > 0:
            found[where] = {
                **record_of(pair.key), "config": pair.config, "measured": measured, "predicted": predicted,
                "measured_us": pair.measured_us, "predicted_us": pair.predicted_us,
                "panel": f"head dim {pair.key.head_dim}" + ("" if rank is None else f", Spearman {rank:.2f}"),
            }  # fmt: skip
    return list(found.values())


def predictions(records: Sequence[ChartRecord]) -> Chart | None:
    """Predicted against measured time, each over the key's best measured."""
    if not records:
        return None
    order = [panel for _, panel in sorted({(record["dim"], record["panel"]) for record in records})]
    scale = LOG
    axis = alt.Axis(format="~g", tickCount=5)
    one = alt.Chart().transform_calculate(x="datum.measured").mark_line(aria=False, color="gray", strokeDash=[2, 2]).encode(
        x=alt.X("measured:Q", scale=scale, axis=axis), y=alt.Y("measured:Q", scale=scale, axis=axis)
    )  # fmt: skip
    points = alt.Chart().mark_point(filled=True, size=18, opacity=0.6).encode(
        x=alt.X("measured:Q", title="measured / best", scale=scale, axis=axis),
        y=alt.Y("predicted:Q", title="predicted / best measured", scale=scale, axis=axis),
        color=coloured("mask", ("causal", "full"), "mask"), shape=shaped("mask", ("causal", "full"), "mask"),
        tooltip=[tip("title:N", "key"), tip("config:N", "config"), tip("measured_us:Q", "measured, us", ".1f"),
                 tip("predicted_us:Q", "predicted, us", ".1f")],
    ).add_params(zoom("x", "y"))  # fmt: skip
    return Chart(
        "predictions", "Predicted against measured time of candidates",
        "Both over the best measured time of the same key, on logarithmic axes. On the dashed line they are equal.",
        faceted([one, points], "panel", order, 3), "pairs",
        (("title", "key"), ("config", "config"), ("measured_us", "measured, us"), ("predicted_us", "predicted, us")), 3,
        height=260, picks=("kernel",),
    )  # fmt: skip


# ---- two caches ------------------------------------------------------------------------------------------------------


def compared_records(found: Iterable[Compared]) -> list[ChartRecord]:
    return [
        {**record_of(c.key), "ratio": c.ratio, "here": c.here.tflops, "there": c.there.tflops, "state": c.state,
         "evidence": f"{c.here.obtained} / {c.there.obtained}"}
        for c in found if c.here and c.there and c.ratio
    ]  # fmt: skip


def compared(records: Sequence[ChartRecord], keys: Sequence[TuningKey], other: str) -> Chart | None:
    """Speed of this file's winners over those of the other, by length."""
    if not records:
        return None
    order, columns, dtypes = _layout(keys)
    one = alt.Chart().mark_rule(aria=False, strokeDash=[2, 2], color="gray").encode(y=alt.datum(1.0))
    points = alt.Chart().mark_point(filled=True, size=45, opacity=1).encode(
        x=lengths_axis(), xOffset="dtype:N",
        y=alt.Y("ratio:Q", title="x as fast", scale=LOG, axis=alt.Axis(format="~g", tickCount=6)),
        color=coloured("dtype", dtypes, "dtype"), shape=shaped("dtype", dtypes, "dtype"),
        tooltip=[tip("title:N", "key"), tip("ratio:Q", "x as fast as there", ".3f"), tip("here:Q", "TFLOP/s here", ".0f"),
                 tip("there:Q", "TFLOP/s there", ".0f"), tip("evidence:N", "evidence here / there")],
    ).add_params(zoom("y"))  # fmt: skip
    return Chart(
        "compared", f"Speed of the winners here over those of {other}",
        "Above the dashed line this file's row is the faster one.",
        faceted([one, points], "panel", order, columns), "compared",
        (("title", "key"), ("ratio", "x as fast as there"), ("here", "TFLOP/s here"), ("there", "TFLOP/s there"),
         ("evidence", "evidence here / there")), columns, picks=("gpu", "kernel"),
    )  # fmt: skip
