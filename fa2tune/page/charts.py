"""The page's drawings. Each function takes rows or searches and gives finished SVG; what filters may hide carries tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fa2tune import gpus
from fa2tune.bench import report
from fa2tune.bench.peers import PEERS, SUBJECT
from fa2tune.gpus import Gpu
from fa2tune.measuring.samples import quantile
from fa2tune.page.facts import KERNEL_ORDER, KERNEL_TITLES, Standing, place
from fa2tune.page.svg import Band, Linear, Log, Panel, legend, number
from fa2tune.problem import TuningKey

DOT = 4.0  #: dots of a crowd nearer than this are drawn once
SHAPES = {64: "circle", 128: "square", 256: "diamond"}
OTHER_SHAPE = "triangle"
#: Gains beyond are drawn at the edge, and say so when pointed at.
LEAST_GAIN, MOST_GAIN = 0.8, 2.0


def tokens(key: TuningKey) -> str:
    """What the page's filters know a key by: one word a choice of tuning key (page.FILTERS)."""
    mask = "causal" if key.causal else "full"
    words = (f"gpu:{key.gpu}@{key.sm_count}", f"dim:{key.head_dim}", f"dtype:{key.dtype}", f"mask:{mask}",
             f"kernel:{key.kernel}", f"len:{key.bucket}")  # fmt: skip
    return " ".join(word.replace(" ", "_") for word in words)


def title_of(key: TuningKey) -> str:
    dims = f"{key.head_dim}" if key.head_dim == key.head_dim_v else f"{key.head_dim}/{key.head_dim_v}"
    mask = "causal" if key.causal else "full"
    return f"{key.kernel} {key.dtype} {dims} {mask} {report.length_name(key.bucket)}"


def colour(kernel: str) -> str:
    return f"k-{kernel}" if kernel in KERNEL_TITLES else "k-other"


def figure(value: float | None, digits: int = 3) -> str:
    """``digits`` significant ones, without exponents."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def gain_text(standing: Standing) -> str:
    row = standing.row
    if row.gain is None:
        return ""
    if row.gain_low is None or row.gain_high is None:
        return f"{row.gain:.3f}"
    return f"{row.gain:.3f} [{row.gain_low:.3f}, {row.gain_high:.3f}]"


def _kernels(standings: Iterable[Standing]) -> list[str]:
    present = {s.row.key.kernel for s in standings}
    return [k for k in KERNEL_ORDER if k in present] + sorted(present - set(KERNEL_ORDER))


# ---- gains


@dataclass(frozen=True)
class GainScale:
    """Where gains are drawn."""

    low: float
    high: float

    @classmethod
    def of(cls, standings: Iterable[Standing]) -> GainScale:
        """From the least gain to what all but a tenth stay below: a few great ones shall not flatten the rest."""
        gains = sorted(s.row.gain for s in standings if s.best and s.row.gain)
        if not gains:
            return cls(0.9, 1.2)
        low = max(LEAST_GAIN, min(0.98, gains[0] * 0.99))
        return cls(low, min(MOST_GAIN, max(1.1, quantile(gains, 0.9) * 1.02)))

    def clip(self, gain: float) -> float:
        return min(self.high, max(self.low, gain))


def gain_mark(standing: Standing, scale: GainScale) -> Markup:
    """A row's gain and interval in a table's cell, on the page's scale, with a line at the default."""
    row = standing.row
    if row.gain is None:
        return Markup("")
    x = Log(scale.low, scale.high, 3, 77)
    one, at = number(x(1.0)), number(x(scale.clip(row.gain)))
    if row.gain_low is None or row.gain_high is None:  # predicted
        kind = "guess"
    else:
        kind = "same" if standing.undecided else "up" if row.gain >= 1 else "down"
    span = ""
    if row.gain_low is not None and row.gain_high is not None:
        low, high = number(x(scale.clip(row.gain_low))), number(x(scale.clip(row.gain_high)))
        span = f'<path class="span" d="M{low} 8H{high}"/>'
    return Markup(
        f'<svg class="gain {kind}" viewBox="0 0 80 16" width="80" height="16"><path class="one" d="M{one} 1V15"/>{span}'
        f'<circle cx="{at}" cy="8" r="3"/></svg>'
    )  # fmt: skip


def gains(standings: Sequence[Standing]) -> Markup:
    """A panel per kernel, each on a scale of its own: the best row's gain over the default by length, with its interval."""
    shown = [s for s in standings if s.best and s.row.gain is not None]
    if not shown:
        return Markup("")
    panels = []
    for kernel in _kernels(shown):
        mine = [s for s in shown if s.row.key.kernel == kernel]
        lengths = sorted({s.row.key.bucket for s in mine})
        lines = sorted({(s.row.key.gpu, s.row.key.head_dim, s.row.key.dtype, s.row.key.causal) for s in mine})
        ends = [end for s in mine for end in (s.row.gain, s.row.gain_low, s.row.gain_high) if end]
        scale = GainScale(max(LEAST_GAIN, min(0.99, *ends) * 0.99), min(MOST_GAIN, max(1.05, *ends) * 1.01))
        panel = Panel(420, 250, KERNEL_TITLES.get(kernel, kernel), left=38)
        x = Band(lengths, panel.left, panel.right)
        y = Log(scale.low, scale.high, panel.bottom, panel.top)
        ticks = [t for t in Linear(scale.low, scale.high).ticks(6) if t > 0]
        panel.axis_y(y, ticks, lambda gain: f"{gain:.2f}".rstrip("0").rstrip("."))
        panel.rule(panel.left, y(1.0), panel.right, y(1.0), "one")
        panel.axis_x([(x.at(length), report.length_name(length)) for length in lengths], "sequence length")
        for s in mine:
            key = s.row.key
            line = (key.gpu, key.head_dim, key.dtype, key.causal)
            shift = (lines.index(line) + 0.5) / len(lines) - 0.5
            at = x.at(key.bucket, 0.86 * shift)
            class_ = f"d-{key.head_dim}" + (" hollow" if not key.causal else "")
            low, high = (scale.clip(end) if end else None for end in (s.row.gain_low, s.row.gain_high))
            if low is not None and high is not None:
                panel.add(f'<g data-f="{_escaped(tokens(key))}">')
                panel.rule(at, y(low), at, y(high), f"whisker {class_}")
                panel.add("</g>")
            assert s.row.gain is not None
            tip = f"{title_of(key)}: {gain_text(s)} x default"
            panel.dot(
                at, y(scale.clip(s.row.gain)), class_, tip, tokens(key), SHAPES.get(key.head_dim, OTHER_SHAPE), 2.8
            )
        panels.append(_panel(panel.render(), f"kernel:{kernel}"))
    dims = sorted({s.row.key.head_dim for s in shown})
    names = {f"head dim {dim}, causal": f"d-{dim}" for dim in dims}
    names |= {f"head dim {dim}, full": f"d-{dim} hollow" for dim in dims}
    shapes = {name: SHAPES.get(dim, OTHER_SHAPE) for dim in dims for name in names if f" {dim}," in name}
    return legend(names, shapes) + _grid(panels)


def _escaped(text: str) -> str:
    return str(Markup.escape(text))


def _panel(drawing: Markup, about: str) -> Markup:
    """A panel that filters hide as a whole."""
    return Markup('<div data-f="{}">{}</div>').format(about, drawing)


def _grid(panels: Iterable[Markup], size: str = "") -> Markup:
    return Markup('<div class="panels {}">{}</div>').format(size, Markup("").join(panels))


# ---- speed


def speeds(standings: Sequence[Standing]) -> Markup:
    """A panel per pass and head dim: TFLOP/s by length of the best row, and of the default config beside it."""
    shown = [s for s in standings if s.best and s.row.tflops and s.row.key.kernel in ("fwd", "bwd")]
    if not shown:
        shown = [s for s in standings if s.best and s.row.tflops]
    panels = []
    groups: dict[tuple[str, int, str], list[Standing]] = {}
    for s in shown:
        groups.setdefault((s.row.key.gpu, s.row.key.head_dim, s.row.key.kernel), []).append(s)
    many = len({gpu for gpu, *_ in groups}) > 1
    lengths = sorted({s.row.key.bucket for s in shown})
    for (gpu, dim, kernel), mine in sorted(
        groups.items(), key=lambda item: (item[0][0], place(KERNEL_ORDER, item[0][2]))
    ):
        title = f"{KERNEL_TITLES.get(kernel, kernel)}, head dim {dim}" + (f", {gpu}" if many else "")
        panel = Panel(420, 260, title, top=40)
        x = Band(lengths, panel.left, panel.right)
        top = max(max(s.row.tflops or 0.0 for s in shown), 1.0) * 1.05
        y = Linear(0.0, top, panel.bottom, panel.top)
        panel.axis_y(y, y.ticks(5), lambda v: f"{v:.0f}", "TFLOP/s")
        panel.axis_x([(x.at(length), report.length_name(length)) for length in lengths], "sequence length")
        lines: dict[tuple[str, bool], list[Standing]] = {}
        for s in mine:
            lines.setdefault((s.row.key.dtype, s.row.key.causal), []).append(s)
        for (dtype, causal), line in lines.items():
            class_ = f"t-{dtype}" + ("" if causal else " hollow")
            about = " ".join(word for word in tokens(line[0].row.key).split() if not word.startswith("len:"))
            panel.line([(x.at(s.row.key.bucket), y(s.row.tflops or 0.0)) for s in line], class_, tokens=about)
            slower = [
                (x.at(s.row.key.bucket), y(s.row.tflops * s.row.time_us / s.row.default_time_us))
                for s in line
                if s.row.tflops and s.row.time_us and s.row.default_time_us
            ]
            panel.line(slower, f"{class_} dashed", tokens=about)
            for s in line:
                share = "" if s.share is None else f", {s.share:.0%} of peak"
                tip = f"{title_of(s.row.key)}: {s.row.tflops:.0f} TFLOP/s{share}, {gain_text(s)} x default"
                panel.dot(x.at(s.row.key.bucket), y(s.row.tflops or 0.0), class_, tip, tokens(s.row.key))
        panels.append(_panel(panel.render(), f"kernel:{kernel} dim:{dim}"))
    dtypes = sorted({s.row.key.dtype for s in shown})
    names = {f"{d}, causal": f"t-{d}" for d in dtypes} | {f"{d}, full": f"t-{d} hollow" for d in dtypes}
    return legend(names | {"default config": "line dashed"}) + _grid(panels)


# ---- roofline


def roofline(gpu: Gpu, standings: Sequence[Standing], dtype: str, precision: str) -> Markup:
    """TFLOP/s against FLOP per byte of device memory, both logarithmic, under the GPU's two roofs. ``standings``: of this GPU
    and kind of product, best rows."""
    top = gpu.peak(dtype, precision)
    rates = [s.row.tflops for s in standings if s.row.tflops]
    places = [s.intensity for s in standings if s.row.tflops and s.intensity > 0]
    ridge = top * 1e3 / gpu.hbm_gbs  # FLOP per byte
    panel = Panel(1120, 460, label=f"roofline of {gpu.name}", left=52, top=30, bottom=40)
    x = Log(min(ridge / 4, min(places) / 1.3), max(ridge * 4, max(places) * 1.5), panel.left, panel.right)
    y = Log(min(min(rates) / 1.3, top / 10), top * 1.25, panel.bottom, panel.top)
    panel.axis_y(y, y.ticks(), lambda v: f"{v:g}", "TFLOP/s")
    panel.axis_x(
        [(x(tick), f"{tick:g}") for tick in x.ticks()], "arithmetic intensity, FLOP per byte of device memory", True
    )
    foot = max(x.low, y.low * 1e3 / gpu.hbm_gbs)
    panel.line([(x(foot), y(foot * gpu.hbm_gbs / 1e3)), (x(ridge), y(top)), (x(x.high), y(top))], "roof")
    for share in (0.75, 0.5, 0.25):
        if top * share > y.low:
            panel.line([(x(ridge * share), y(top * share)), (x(x.high), y(top * share))], "roof part")
            panel.text(panel.right - 2, y(top * share) - 4, f"{share:.0%}", "end", "tick")
    panel.text(panel.right - 2, y(top) - 5, f"{top:g} TFLOP/s, {dtype} products on the data sheet", "end", "note")
    slope = math.degrees(math.atan2(y(1.0) - y(10.0), x(10.0) - x(1.0)))
    at = math.sqrt(foot * ridge)
    panel.add(
        f'<text class="note m" transform="translate({number(x(at) - 7)} {number(y(at * gpu.hbm_gbs / 1e3) - 4)}) '
        f'rotate({number(-slope)})">{number(gpu.hbm_gbs / 1e3)} TB/s</text>'
    )
    for s in standings:
        key = s.row.key
        if not s.row.tflops:
            continue
        class_ = colour(key.kernel) + (" hollow" if not key.causal else "")
        tip = f"{title_of(key)}: {s.row.tflops:.0f} TFLOP/s, {s.row.tflops / top:.0%} of peak, {s.intensity:.0f} FLOP/B"
        panel.dot(x(s.intensity), y(s.row.tflops), class_, tip, tokens(key), SHAPES.get(key.head_dim, OTHER_SHAPE), 3.6)
    kernels = {KERNEL_TITLES.get(k, k): colour(k) for k in _kernels(standings)}
    dims = sorted({s.row.key.head_dim for s in standings})
    marks = {f"head dim {dim}": "neutral" for dim in dims} | {"full mask": "neutral hollow"}
    shapes = {f"head dim {dim}": SHAPES.get(dim, OTHER_SHAPE) for dim in dims}
    return legend(kernels | marks, shapes) + panel.render()


# ---- against the peers


def peers(data: Mapping[str, Any]) -> Markup:
    """A panel per dtype, pass, way of timing, head dim and mask: TFLOP/s by length of fa2tune and of each peer."""
    names = report.peers_of(cell for cell in data["cells"] if cell["kind"] in report.KIND_TITLES)
    blocks = []
    for dtype, pass_, kind in report.sections(data):
        cells = report.records(data, kind, dtype=dtype, **{"pass": pass_})
        top = max((e["tflops"] for cell in cells for e in cell["peers"].values() if "tflops" in e), default=1.0) * 1.05
        panels = []
        for dim in sorted({cell["head_dim"] for cell in cells}):
            for causal in (False, True):
                mine = [cell for cell in cells if (cell["head_dim"], cell["causal"]) == (dim, causal)]
                if mine:
                    drawing = _peers_panel(mine, names, f"head dim {dim}, {report.mask_name(causal)}", top)
                    panels.append(_panel(drawing, f"dim:{dim} mask:{report.mask_name(causal)} dtype:{dtype}"))
        title = report.title_of(dtype, pass_, kind)
        blocks.append(
            Markup('<h3>{}</h3><p class="say">{}</p>{}').format(title, report.sentence(cells), _grid(panels, "four"))
        )
    return legend({PEERS[n].label: f"line p-{n}" for n in names}) + Markup("").join(blocks)


def _peers_panel(cells: Sequence[Mapping[str, Any]], names: Sequence[str], title: str, top: float) -> Markup:
    lengths = sorted({cell["seqlen"] for cell in cells})
    panel = Panel(340, 230, title, top=40)
    x = Band(lengths, panel.left, panel.right)
    y = Linear(0.0, top, panel.bottom, panel.top)
    panel.axis_y(y, y.ticks(5), lambda v: f"{v:.0f}", "TFLOP/s")
    panel.axis_x([(x.at(length), report.length_name(length)) for length in lengths], "sequence length")
    for name in sorted(names, key=lambda n: n == SUBJECT):  # fa2tune above the others
        points = [(cell, cell["peers"][name]) for cell in cells if "tflops" in cell["peers"].get(name, {})]
        panel.line([(x.at(cell["seqlen"]), y(e["tflops"])) for cell, e in points], f"p-{name}")
        for cell, e in points:
            ratio = f", fa2tune {e['ratio']:.2f} x as fast" if name != SUBJECT and "ratio" in e else ""
            tip = f"{PEERS[name].label}, {report.length_name(cell['seqlen'])}: {e['tflops']:.0f} TFLOP/s{ratio}"
            about = f"dim:{cell['head_dim']} dtype:{cell['dtype']} mask:{report.mask_name(cell['causal'])} len:{cell['seqlen']}"
            panel.dot(
                x.at(cell["seqlen"]), y(e["tflops"]), f"p-{name}", tip, about, size=3.6 if name == SUBJECT else 2.6
            )
    return panel.render()


# ---- predicted against measured


@dataclass(frozen=True)
class Pair:
    """One candidate's time by the model and by measurement."""

    key: TuningKey
    config: str
    predicted_us: float
    measured_us: float


def rank_correlation(pairs: Sequence[Pair]) -> float | None:
    """Spearman's, ties ranked alike; None where one side does not vary."""
    sides = [_ranks([p.predicted_us for p in pairs]), _ranks([p.measured_us for p in pairs])]
    try:
        return statistics.correlation(*sides)
    except statistics.StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered)))}
    last = {value: place for place, value in enumerate(ordered)}
    return [(first[value] + last[value]) / 2 for value in values]


def predictions(pairs: Sequence[Pair]) -> Markup:
    """A panel per kernel and head dim: predicted against measured time, each over the key's measured best."""
    groups: dict[tuple[str, int], list[Pair]] = {}
    best: dict[TuningKey, float] = {}
    for pair in pairs:
        groups.setdefault((pair.key.kernel, pair.key.head_dim), []).append(pair)
        best[pair.key] = min(pair.measured_us, best.get(pair.key, math.inf))
    panels = []
    for (kernel, dim), mine in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        keys = {pair.key for pair in mine}
        found = [rank_correlation([p for p in mine if p.key == key]) for key in keys]
        known = [value for value in found if value is not None]
        said = f", Spearman {statistics.median(known):.2f}" if known else ""
        panel = Panel(420, 330, f"{KERNEL_TITLES.get(kernel, kernel)}, head dim {dim}{said}", left=44, top=40)
        ends = [pair.predicted_us / best[pair.key] for pair in mine] + [
            pair.measured_us / best[pair.key] for pair in mine
        ]
        low, high = min(*ends, 1.0) * 0.95, min(max(ends) * 1.05, 8.0)
        x, y = Log(low, high, panel.left, panel.right), Log(low, high, panel.bottom, panel.top)
        marks = [tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8) if low <= tick <= high]
        panel.axis_y(y, marks, lambda v: f"{v:g}", "predicted / best measured")
        panel.axis_x([(x(tick), f"{tick:g}") for tick in marks], "measured / best measured", True)
        panel.rule(x(low), y(low), x(high), y(high), "one")
        places: set[tuple[TuningKey, int, int]] = set()
        for pair in sorted(mine, key=lambda p: p.measured_us / best[p.key]):
            over, guess = (
                x(min(pair.measured_us / best[pair.key], high)),
                y(min(pair.predicted_us / best[pair.key], high)),
            )
            place_ = pair.key, round(over / DOT), round(guess / DOT)
            if place_ in places:  # one dot would hide the other, and a table has thousands
                continue
            places.add(place_)
            tip = f"{title_of(pair.key)} {pair.config}: {pair.measured_us:.1f} us, predicted {pair.predicted_us:.1f}"
            panel.dot(over, guess, colour(kernel), tip, tokens(pair.key), size=2.2)
        panels.append(_panel(panel.render(), f"kernel:{kernel} dim:{dim}"))
    return _grid(panels)


def catalogue_entry(key: TuningKey) -> str:
    """The name of a key's GPU as people say it."""
    try:
        known = gpus.named(key.gpu)
    except ValueError:
        return key.gpu
    return f"NVIDIA {known.driver_names[0]}" if known.name == key.gpu else key.gpu
