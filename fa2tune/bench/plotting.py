"""Plots of what ``fa2tune bench`` measured, each as PNG and as SVG.

Takes the data of a results file (comparison.load). matplotlib loads on use.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa2tune.bench import tables
from fa2tune.bench.gpu import SETTLE_SECONDS, TURN_SECONDS
from fa2tune.bench.peers import PEERS, SUBJECT
from fa2tune.bench.tables import DTYPE_TITLES, KIND_TITLES, PASS_TITLES, length_name, mask_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fa2tune.bench.tables import CellRecord

#: How the cells of a kind are timed.
_HOW = {
    "sustained": f"each implementation alone for {SETTLE_SECONDS + TURN_SECONDS:g} s at a time, thin lines to the slower and "
    "the faster turn",
    "time": "median of interleaved runs with a cold L2, thin lines to the 10 % and 90 % quantiles",
}
#: Names of the files, without their suffix.
MEMORY_PLOT, OVERVIEW = "memory", "overview"
SUFFIXES = (".png", ".svg")

#: Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {
    "fa2tune": "#D55E00", "fa4": "#0072B2", "sdpa-cudnn": "#56B4E9", "sdpa-flash": "#009E73", "flex": "#CC79A7",
    "triton-plain": "#E6B422", "sdpa-efficient": "#A6A6A6", "standard": "#5B5B5B", "flash-attn": "#F0E442",
}  # fmt: skip
MARKERS = dict(zip(COLOURS, "osD^vP*X<", strict=True))
#: What a legend says a peer is; {field}: of the run's environment.
_NAMES = {
    "fa2tune": "fa2tune (this library)", "fa4": "FlashAttention-4 {flash-attn-4}", "sdpa-cudnn": "torch SDPA: cuDNN {cudnn}",
    "sdpa-flash": "torch SDPA: FlashAttention-2", "flex": "torch FlexAttention, compiled",
    "triton-plain": "fa2tune's kernels, untuned", "sdpa-efficient": "torch SDPA: memory-efficient",
    "standard": "matmul + softmax in torch", "flash-attn": "flash-attn (FlashAttention-2)",
}  # fmt: skip
_INK, _PALE = "#222222", "#6F6F6F"
_LEFT, _RIGHT = 0.75, 0.2  #: margins, inches
_LETTERS_PER_INCH = 16.0  #: of a note
RARE = 0.25  #: share of a plot's cells; peers with fewer are named in a note
#: The same data gives the same bytes; text stays text, to be searched and read aloud.
_STYLE: Any = {"svg.hashsalt": "fa2tune", "svg.fonttype": "none"}


def plot_name(dtype: str, pass_: str, kind: str) -> str:
    """Name of a plot's files, without the suffix."""
    how = "" if kind == "time" else f"_{kind}"
    return f"{PASS_TITLES[pass_].replace(' + ', '_')}_{dtype}{how}"


def plots(data: Mapping[str, Any], folder: Path) -> list[Path]:
    """Every plot that the data allows, into ``folder``, as PNG and SVG: forward_bf16, ..., memory, overview."""
    drawn = {plot_name(*section): plot_pass(data, *section) for section in tables.sections(data)}
    if tables.records(data, "memory"):
        drawn[MEMORY_PLOT] = plot_memory(data)
    if best := overview_section(data):
        drawn[OVERVIEW] = plot_overview(data, *best)
    written = []
    for name, figure in drawn.items():
        for suffix in SUFFIXES:
            written.append(folder / f"{name}{suffix}")
            _save(figure, written[-1])
    return written


def _save(figure: Figure, path: Path) -> None:
    import matplotlib as mpl

    # SVG would hold the date, and PNG matplotlib's version
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    with mpl.rc_context(_STYLE):
        figure.savefig(path, metadata=metadata)


# ---- what plots share ----------------------------------------------------------------------------------------------


def _canvas(
    rows: int, columns: int, size: tuple[float, float], title: str, subtitle: str, top: float, below: float = 0.55
) -> tuple[Figure, Any]:
    """A figure of ``size`` inches with a title, and its axes between ``top`` and ``below`` inches from its edges."""
    from matplotlib.figure import Figure

    width, height = size
    figure = Figure(figsize=size, dpi=160, facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False, sharey="row")
    figure.subplots_adjust(left=_LEFT / width, right=1 - _RIGHT / width, top=1 - top / height, bottom=below / height,
                           wspace=0.06, hspace=0.28)  # fmt: skip
    figure.text(_LEFT / width, 1 - 0.3 / height, title, fontsize=15, fontweight="bold", color=_INK, va="center")
    figure.text(_LEFT / width, 1 - 0.47 / height, subtitle, fontsize=9, color=_PALE, va="top", linespacing=1.4)
    return figure, axes


def _legend(figure: Figure, handles: Mapping[str, Any], labels: Mapping[str, str], below: float) -> None:
    """Names of the peers drawn, in their order, ``below`` inches from the top."""
    width, height = figure.get_size_inches()
    names = [name for name in PEERS if name in handles]
    figure.legend(
        [handles[name] for name in names], [labels[name] for name in names], loc="upper left", ncols=_columns(names),
        frameon=False, fontsize=9, bbox_to_anchor=((_LEFT - 0.05) / width, 1 - below / height), handlelength=1.1,
        handleheight=1.1, columnspacing=1.5, handletextpad=0.5, borderaxespad=0, borderpad=0, labelcolor=_INK,
    )  # fmt: skip


def _columns(names: Sequence[str]) -> int:
    return min(3, len(names))


def _legend_inches(names: Sequence[str]) -> float:
    """How high a legend is."""
    return 0.21 * -(-len(names) // max(1, _columns(names)))


def _labels(data: Mapping[str, Any], cells: Sequence[CellRecord]) -> dict[str, str]:
    """What a legend says of each peer: its name and version, and in how many of the cells it was measured, if not in all."""
    versions = {field: str(value or "") for field, value in data["runs"][-1].items()}
    found = {}
    for name in tables.peers_of(cells):
        text = _NAMES.get(name, PEERS[name].label)
        for field in ("flash-attn-4", "cudnn"):
            text = text.replace(f"{{{field}}}", versions.get(field, "")).rstrip()
        count = sum(name in cell["peers"] for cell in cells)
        found[name] = text if count == len(cells) else f"{text} ({count} of {len(cells)} cells)"
    return found


def _quiet(axis: Axes) -> None:
    """Nothing drawn that is not data, but faint lines to read heights by."""
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#999999")
    axis.tick_params(axis="both", length=0, labelsize=9, labelcolor=_PALE)
    axis.tick_params(axis="x", which="minor", length=0)
    axis.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axis.set_axisbelow(True)


def _rare(cells: Sequence[CellRecord]) -> list[str]:
    """The peers that were measured in less than ``RARE`` of these cells."""
    counts = {name: sum(name in cell["peers"] for cell in cells) for name in tables.peers_of(cells)}
    return [name for name, count in counts.items() if count < RARE * len(cells)]


def _without(cells: Sequence[CellRecord], names: Sequence[str]) -> list[CellRecord]:
    return [
        {**cell, "peers": {name: entry for name, entry in cell["peers"].items() if name not in names}} for cell in cells
    ]


def _note(cells: Sequence[CellRecord], letters: int) -> list[str]:
    """Why bars are absent, in lines of at most so many ``letters``; none where every peer was timed in every cell."""
    counts = {name: sum(name in cell["peers"] for cell in cells) for name in tables.peers_of(cells)}
    rare = _rare(cells)
    sentences = []
    if some := [name for name, count in counts.items() if count < len(cells) and name not in rare]:
        listed = ", ".join(f"{_plain_name(name)} (in {counts[name]} of {len(cells)} cells)" for name in some)
        sentences.append(f"Where a bar is absent, the run that timed the cell was without that library: {listed}.")
    if rare:
        listed = ", ".join(f"{_plain_name(name)} ({counts[name]})" for name in rare)
        sentences.append(f"Timed in few of the {len(cells)} cells and not drawn: {listed}.")
    return [line for sentence in sentences for line in textwrap.wrap(sentence, letters)]


def _plain_name(name: str) -> str:
    """A peer's name without its version."""
    return _NAMES.get(name, PEERS[name].label).partition(" {")[0]


# ---- one pass ------------------------------------------------------------------------------------------------------


def plot_pass(data: Mapping[str, Any], dtype: str, pass_: str, kind: str) -> Figure:
    """Bars of TFLOP/s grouped by length, a panel per head dim (rows, ascending) and mask (columns: full, causal). A peer that
    is not in a cell takes no room there, and the note below says so; one that was wrong, failed or did not fit is named by
    that word in place of a bar; a cell without any figure says "not measured". Peers of few cells are left out: their bars
    would make those of all others in these cells too thin."""
    cells = tables.records(data, kind, dtype=dtype, **{"pass": pass_})
    whole, cells = cells, _without(cells, _rare(cells))
    names = tables.peers_of(cells)
    head_dims = sorted({cell["head_dim"] for cell in cells})
    masks = sorted({mask_label(cell) for cell in cells}, key=tables.mask_place)
    lengths = sorted({cell["seqlen"] for cell in cells})
    usual = statistics.mode(len(cell["peers"]) for cell in cells)  # a cell with more peers has thinner bars
    width = max(10.0, 1.0 + len(masks) * len(lengths) * (usual + 1.5) * 0.105)
    note = _note(whole, int((width - _LEFT - _RIGHT) * _LETTERS_PER_INCH))
    below = 0.55 + 0.17 * len(note)
    size = (width, 1.35 + below + 2.7 * len(head_dims))
    top = 1.2 + _legend_inches(names)
    figure, axes = _canvas(
        len(head_dims), len(masks), size, f"Attention {PASS_TITLES[pass_]}, {DTYPE_TITLES[dtype]}, {KIND_TITLES[kind]}",
        f"TFLOP/s, higher is better; {_HOW[kind]}.\n16k tokens in all, hidden size 2048. {tables.setting(data)}", top, below,
    )  # fmt: skip
    figure.text(_LEFT / size[0], 0.1 / size[1], "\n".join(note), fontsize=8, color=_PALE, va="bottom", linespacing=1.4)
    handles: dict[str, Any] = {}
    for row, head_dim in enumerate(head_dims):
        for column, mask in enumerate(masks):
            axis = axes[row][column]
            _quiet(axis)
            axis.set_title(f"head dim {head_dim}, {mask}", fontsize=11, color=_INK, loc="left", pad=8)
            axis.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
            panel = {c["seqlen"]: c for c in cells if c["head_dim"] == head_dim and mask_label(c) == mask}
            for centre, length in enumerate(lengths):
                if length in panel:
                    handles |= _bars(
                        axis, centre, panel[length]["peers"], 0.84 / max(usual, len(panel[length]["peers"]))
                    )
                else:
                    axis.text(
                        centre, 0, " not measured", rotation=90, ha="center", va="bottom", fontsize=7, color=_PALE
                    )
            axis.set_xlim(-0.55, len(lengths) - 0.45)
            if row == len(head_dims) - 1:
                axis.set_xlabel("sequence length", fontsize=9, color=_PALE)
        axes[row][0].set_ylabel("TFLOP/s", fontsize=9, color=_PALE)
        axes[row][0].set_ylim(0, axes[row][0].get_ylim()[1] * 1.06)  # room for the figures
    _legend(figure, handles, _labels(data, cells), 0.9)
    return figure


def _bars(axis: Axes, centre: int, entries: Mapping[str, Mapping[str, Any]], width: float) -> dict[str, Any]:
    """One cell's group of bars around x = centre. -> a legend handle per peer drawn."""
    handles = {}
    names = [name for name in PEERS if name in entries]
    for place, name in enumerate(names):
        entry = entries[name]
        x = centre + (place - (len(names) - 1) / 2) * width
        own = name == SUBJECT
        ink = COLOURS[SUBJECT] if own else _PALE
        if "tflops" not in entry:
            axis.text(x, 0, f" {entry['status']}", rotation=90, ha="center", va="bottom", fontsize=5.5, color=ink)
            continue
        speed = entry["tflops"]
        # time quantiles turned into speeds: the quicker end of the time is the upper end of the bar
        slow, quick = (speed * entry["ms"] / entry[end] for end in ("high_ms", "low_ms"))
        spread = [[max(0.0, speed - slow)], [max(0.0, quick - speed)]]  # rounding may leave a hair below zero
        handles[name] = axis.bar(x, speed, width * 0.92, color=COLOURS[name], linewidth=0)
        axis.errorbar(x, speed, yerr=spread, fmt="none", ecolor=_INK, elinewidth=0.5, alpha=0.6)
        axis.annotate(
            f"{speed:.0f}", (x, speed + spread[1][0]), (0, 2.5), textcoords="offset points", rotation=90, ha="center",
            va="bottom", fontsize=6, color=ink, fontweight="bold" if own else "normal",
        )  # fmt: skip
    return handles


# ---- memory --------------------------------------------------------------------------------------------------------


def plot_memory(data: Mapping[str, Any]) -> Figure:
    """Peak memory against length, both logarithmic, a panel per pass. Peers stand side by side at each length: many need the
    same."""
    cells = tables.records(data, "memory")
    names = tables.peers_of(cells)
    passes = [pass_ for pass_ in PASS_TITLES if any(cell["pass"] == pass_ for cell in cells)]
    lengths = sorted({cell["seqlen"] for cell in cells})
    figure, axes = _canvas(
        1, len(passes), (1.2 + 5.6 * max(2, len(passes)), 5.2 + _legend_inches(names)), "Peak memory of attention",
        f"What one call holds at most beyond q, k, v and the incoming gradient, its results included; lower is better. "
        f"{tables.memory_setting(cells[0]).capitalize()}.\n{tables.setting(data)}", 1.2 + _legend_inches(names),
    )  # fmt: skip
    handles: dict[str, Any] = {}
    for axis, pass_ in zip(axes[0], passes, strict=True):
        _quiet(axis)
        axis.set_title(PASS_TITLES[pass_], fontsize=11, color=_INK, loc="left", pad=8)
        axis.set_yscale("log", base=2)
        for place, name in enumerate(names):
            shift = (place - (len(names) - 1) / 2) * 0.8 / len(names)
            points = [
                (lengths.index(cell["seqlen"]) + shift, cell["peers"][name]["peak_bytes"] / 2**20)
                for cell in cells
                if cell["pass"] == pass_ and cell["peers"].get(name, {}).get("peak_bytes")
            ]
            if points:
                (handles[name],) = axis.plot(*zip(*points, strict=True), color=COLOURS[name], linewidth=0,
                                             marker=MARKERS[name], markersize=6, markeredgewidth=0)  # fmt: skip
        axis.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
        axis.set_xlabel("sequence length", fontsize=9, color=_PALE)
        axis.yaxis.set_major_formatter(lambda mib, _: f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB")
    _legend(figure, handles, _labels(data, cells), 0.9)
    return figure


# ---- the overview --------------------------------------------------------------------------------------------------


def overview_section(data: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """(dtype, kind, mask) of the overview: the first dtype and mask, causal before full, that have both passes, in the way
    of timing with the most figures. None: no such cells."""
    for dtype in DTYPE_TITLES:
        for mask in ("causal", "full"):
            figures = {}
            for kind in KIND_TITLES:
                cells = [cell for cell in tables.records(data, kind, dtype=dtype) if mask_label(cell) == mask]
                if {"fwd", "bwd"} <= {cell["pass"] for cell in cells}:
                    figures[kind] = sum("tflops" in entry for cell in cells for entry in cell["peers"].values())
            if figures:
                return dtype, max(figures, key=figures.__getitem__), mask
    return None


TITLES = {"causal": "Causal attention", "full": "Attention without a mask"}


def plot_overview(data: Mapping[str, Any], dtype: str, kind: str, mask: str) -> Figure:
    """TFLOP/s by length, a panel per pass (rows) and head dim (columns, ascending). Only peers that were measured in at least
    half of the cells: a line needs points. Over fa2tune's line its ratio to the fastest peer of each cell."""
    cells = tables.records(data, kind, dtype=dtype)
    cells = [cell for cell in cells if mask_label(cell) == mask and cell["pass"] in ("fwd", "bwd")]
    counts = {name: sum("tflops" in c["peers"].get(name, {}) for c in cells) for name in PEERS}
    names = [name for name, count in counts.items() if 2 * count >= len(cells)]
    head_dims = sorted({cell["head_dim"] for cell in cells})
    lengths = sorted({cell["seqlen"] for cell in cells})
    figure, axes = _canvas(
        2, len(head_dims), (1.2 + 3.1 * max(2, len(head_dims)), 6.8 + _legend_inches(names)),
        f"{TITLES[mask]}, {DTYPE_TITLES[dtype]}, {data['runs'][-1]['gpu']}",
        f"TFLOP/s by sequence length, higher is better; {_HOW[kind].partition(', thin')[0]}; 16k tokens in all, hidden size "
        "2048.\nFigures over fa2tune's line: its speed over that of the fastest other implementation.\n"
        f"{tables.setting(data)}", 1.45 + _legend_inches(names),
    )  # fmt: skip
    handles: dict[str, Any] = {}
    for row, pass_ in enumerate(("fwd", "bwd")):
        for column, head_dim in enumerate(head_dims):
            axis = axes[row][column]
            _quiet(axis)
            axis.set_title(f"{PASS_TITLES[pass_]}, head dim {head_dim}", fontsize=11, color=_INK, loc="left", pad=8)
            panel = [cell for cell in cells if (cell["pass"], cell["head_dim"]) == (pass_, head_dim)]
            for name in names[::-1]:  # fa2tune above the others
                points = [(lengths.index(c["seqlen"]), c["peers"][name]["tflops"]) for c in panel
                          if "tflops" in c["peers"].get(name, {})]  # fmt: skip
                own = name == SUBJECT
                if points:
                    (handles[name],) = axis.plot(
                        *zip(*points, strict=True), color=COLOURS[name], linewidth=2.4 if own else 1.4, marker=MARKERS[name],
                        markersize=5.5 if own else 4.2, markeredgewidth=0,
                    )  # fmt: skip
            for cell in panel:
                if best := tables.ratio_to_best(cell):
                    at = (lengths.index(cell["seqlen"]), cell["peers"][SUBJECT]["tflops"])
                    axis.annotate(f"{best[0]:.2f}", at, (0, 6), textcoords="offset points", ha="center", fontsize=8,
                                  color=COLOURS[SUBJECT])  # fmt: skip
            axis.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
            axis.set_xlim(-0.4, len(lengths) - 0.6)
            if row:
                axis.set_xlabel("sequence length", fontsize=9, color=_PALE)
        axes[row][0].set_ylabel("TFLOP/s", fontsize=9, color=_PALE)
        axes[row][0].set_ylim(0, axes[row][0].get_ylim()[1] * 1.05)
    _legend(figure, handles, _labels(data, cells), 1.12)
    return figure
