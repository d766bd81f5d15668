"""What ``fa2tune bench`` measured, shown: tables on screen, Markdown, and plots like the FlashAttention-2 paper's.

Takes the data of a results file (bench.load). matplotlib and rich load on use.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa2tune.bench import comparison
from fa2tune.bench.card import SETTLE_SECONDS, TURN_SECONDS
from fa2tune.bench.peers import PEERS, SUBJECT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

    Record = Mapping[str, Any]

#: Kinds of timed cells -> what a title adds; in the order of tables
KIND_TITLES = {kind: name for name, kind in reversed(comparison.TIMINGS.items())}
_HOW = {
    "sustained": f"each alone for {SETTLE_SECONDS + TURN_SECONDS:g} s at a time, at the clock its own power allows, lines to "
    "the slower and faster turn",
    "time": "median of interleaved runs on a cold L2, lines to the 10 % and 90 % quantiles",
}
PASS_TITLES = {"fwd": "forward", "bwd": "backward", "both": "forward + backward"}
DTYPE_TITLES = {"bf16": "bfloat16", "fp16": "float16"}
MEMORY_PLOT = "memory.png"
#: The peer whose ratio has a column of its own.
BASELINE = "sdpa-flash"
#: The lengths that averages are taken over: shorter ones are bound by launches and waves, not by the kernel.
LONG = 2048

#: Okabe and Ito's palette, which colour-blind readers can tell apart; greys for the two that nobody would choose.
COLOURS = {
    "fa2tune": "#D55E00", "fa4": "#0072B2", "sdpa-cudnn": "#56B4E9", "sdpa-flash": "#009E73", "flex": "#CC79A7",
    "triton-plain": "#E6B422", "sdpa-efficient": "#A6A6A6", "standard": "#5B5B5B",
}  # fmt: skip
_INK, _PALE = "#222222", "#6F6F6F"


# ---- reading the data ----------------------------------------------------------------------------------------------


def records(data: Mapping[str, Any], kind: str, **fields: Any) -> list[Record]:
    """The cells of a kind whose fields have these values, by head dim, mask (full first), length."""
    found = [cell for cell in data["cells"] if cell["kind"] == kind and all(cell[f] == v for f, v in fields.items())]
    return sorted(found, key=lambda cell: (cell["head_dim"], cell["causal"], cell["seqlen"]))


def sections(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(dtype, pass, kind) of every timed cell, in the order of tables."""
    present = {(cell["dtype"], cell["pass"], cell["kind"]) for cell in data["cells"]}
    return [one for one in itertools.product(DTYPE_TITLES, PASS_TITLES, KIND_TITLES) if one in present]


def title_of(dtype: str, pass_: str, kind: str) -> str:
    return f"{PASS_TITLES[pass_].capitalize()}, {DTYPE_TITLES[dtype]}, {KIND_TITLES[kind]}"


def peers_of(cells: Iterable[Record]) -> list[str]:
    """Names of the peers that these cells know, in the order of PEERS."""
    present = {name for cell in cells for name in cell["peers"]}
    return [name for name in PEERS if name in present]


def ratio_to_best(cell: Record) -> tuple[float, str] | None:
    """How many times as fast as the fastest peer fa2tune is, and which that is; None without a figure for both."""
    ratios = [(entry["ratio"], name) for name, entry in cell["peers"].items() if name != SUBJECT and "ratio" in entry]
    return min(ratios, default=None)


def averages(cells: Iterable[Record]) -> dict[str, float]:
    """Geometric mean of fa2tune's ratio to each peer over cells with lengths from LONG up; "best": to the best of each cell."""
    gathered: dict[str, list[float]] = {}
    for cell in cells:
        if cell["seqlen"] < LONG:
            continue
        best = ratio_to_best(cell)
        if best:
            gathered.setdefault("best", []).append(best[0])
        for name, entry in cell["peers"].items():
            if name != SUBJECT and "ratio" in entry:
                gathered.setdefault(name, []).append(entry["ratio"])
    return {name: statistics.geometric_mean(ratios) for name, ratios in gathered.items()}


def length_name(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def mask_name(causal: bool) -> str:
    return "causal" if causal else "full"


def figure_of(entry: Mapping[str, Any] | None, field: str, unit: float = 1.0, digits: int = 0) -> str:
    """One entry in a table: its figure, or what stands in for it."""
    if entry is not None and field in entry:
        return f"{entry[field] / unit:.{digits}f}"
    return "-" if entry is None or entry["status"] == "ok" else str(entry["status"])


def setting(data: Mapping[str, Any]) -> str:
    """The machine and the versions, on one line."""
    last = data["runs"][-1]
    named = (("driver", "driver"), ("torch", "torch"), ("Triton", "triton"), ("cuDNN", "cudnn"))
    parts = [str(last["gpu"]), *(f"{title} {last[field]}" for title, field in named if last.get(field))]
    return ", ".join([*parts, str(last["date"])[:10]])


def _rows(cells: Sequence[Record], names: Sequence[str]) -> list[tuple[list[str], int | None]]:
    """Table rows (head dim, mask, length, TFLOP/s of each peer, ratio to BASELINE, ratio to the best peer), and which
    column is the fastest's."""
    rows = []
    for cell in cells:
        entries = cell["peers"]
        speeds = {name: entries[name]["tflops"] for name in names if "tflops" in entries.get(name, {})}
        fastest = 3 + list(names).index(max(speeds, key=speeds.__getitem__)) if speeds else None
        best = ratio_to_best(cell)
        rows.append((
            [
                str(cell["head_dim"]), mask_name(cell["causal"]), length_name(cell["seqlen"]),
                *(figure_of(entries.get(name), "tflops") for name in names),
                *(figure_of(entries.get(name), "ratio", digits=2) for name in names if name == BASELINE),
                f"{best[0]:.2f}" if best else "-",
            ],
            fastest,
        ))  # fmt: skip
    return rows


def _header(names: Sequence[str], labels: Mapping[str, str]) -> list[str]:
    ratios = [f"x {labels[BASELINE]}"] if BASELINE in names else []
    return ["head dim", "mask", "length", *(labels[name] for name in names), *ratios, "x best"]


def sentence(cells: Sequence[Record]) -> str:
    """The averages in words, each head dim apart: one may win what another loses. "" if no length is long enough for them."""
    long = [cell for cell in cells if cell["seqlen"] >= LONG]
    dims = sorted({cell["head_dim"] for cell in long})
    means = [averages(cell for cell in long if cell["head_dim"] == dim) for dim in dims]
    counts = {name: sum("ratio" in cell["peers"].get(name, {}) for cell in long) for name in PEERS}
    most = max(counts.values(), default=0)

    def against(name: str, label: str) -> str:
        ratios = " / ".join(f"{found[name]:.2f}" if name in found else "-" for found in means)
        return f"{ratios} x {label}" + (f" ({counts[name]} of {most} cells)" if counts.get(name, most) < most else "")

    named = [against(name, PEERS[name].label) for name in PEERS if counts[name] and name != SUBJECT]
    if not named:
        return ""
    sizes = [sum(cell["head_dim"] == dim for cell in long) for dim in dims]
    apart = f", head dim {' / '.join(map(str, dims))}"
    if len({*sizes}) > 1:
        apart += f" ({' / '.join(map(str, sizes))} cells)"
    return (
        f"fa2tune, geometric mean over lengths from {LONG} up{apart}: "
        f"{against('best', 'the best peer of each cell')}; {', '.join(named)}."
    )


# ---- tables --------------------------------------------------------------------------------------------------------


def tables(data: Mapping[str, Any]) -> list[Table]:
    """One rich table per dtype, pass and way of timing, the fastest of each row in bold, and one for memory."""
    from rich.table import Table

    shown = []
    for dtype, pass_, kind in sections(data):
        cells = records(data, kind, dtype=dtype, **{"pass": pass_})
        names = peers_of(cells)
        table = Table(title=f"{title_of(dtype, pass_, kind)}, TFLOP/s", caption=sentence(cells))
        for title in _header(names, {name: name for name in names}):  # labels are too wide for a screen
            table.add_column(title, justify="right")
        group = None
        for cell, (row, fastest) in zip(cells, _rows(cells, names), strict=True):
            if group not in (None, (cell["head_dim"], cell["causal"])):
                table.add_section()
            group = (cell["head_dim"], cell["causal"])
            table.add_row(*(f"[bold]{text}[/bold]" if column == fastest else text for column, text in enumerate(row)))
        shown.append(table)
    if memory := records(data, "memory"):
        names = peers_of(memory)
        table = Table(title=f"Peak memory beyond q, k, v and do, GiB ({_memory_setting(memory[0])})")
        for title in ("pass", "length", *names):
            table.add_column(title, justify="right")
        for cell in memory:
            figures = (figure_of(cell["peers"].get(name), "peak_bytes", 2**30, 2) for name in names)
            table.add_row(PASS_TITLES[cell["pass"]], length_name(cell["seqlen"]), *figures)
        shown.append(table)
    return shown


def objections(data: Mapping[str, Any]) -> list[str]:
    """What was wrong or failed, one line a peer and reason, with how many cells it concerns."""
    counts: dict[tuple[str, str, str], int] = {}
    for cell in data["cells"]:
        for name, entry in cell["peers"].items():
            if entry["status"] in ("wrong", "failed"):
                what = (name, entry["status"], entry["why"])
                counts[what] = counts.get(what, 0) + 1
    return [f"{name} {status} in {n} cell{'s' * (n > 1)}: {why}" for (name, status, why), n in counts.items()]


def markdown(data: Mapping[str, Any], dtype: str, pass_: str, kind: str, seqlens: Sequence[int] | None = None) -> str:
    """A Markdown table of one section, TFLOP/s, the fastest of each row in bold. ``seqlens`` None: every length."""
    cells = records(data, kind, dtype=dtype, **{"pass": pass_})
    shown = [cell for cell in cells if seqlens is None or cell["seqlen"] in seqlens]
    names = peers_of(shown)
    header = _header(names, {name: PEERS[name].label for name in names})
    lines = ["| " + " | ".join(header) + " |", "|" + "--:|" * len(header)]
    for row, fastest in _rows(shown, names):
        lines.append("| " + " | ".join(f"**{t}**" if column == fastest else t for column, t in enumerate(row)) + " |")
    return "\n".join(lines) + "\n"


# ---- plots ---------------------------------------------------------------------------------------------------------


def _memory_setting(cell: Record) -> str:
    return f"batch 1, {cell['heads']} heads of {cell['head_dim']}, {mask_name(cell['causal'])}, {DTYPE_TITLES[cell['dtype']]}"


def _canvas(rows: int, columns: int, size: tuple[float, float], title: str, subtitle: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=160, facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False, sharey="row")
    inches = size[1]
    figure.subplots_adjust(left=0.75 / size[0], right=1 - 0.2 / size[0], top=1 - 1.55 / inches, bottom=0.55 / inches,
                           wspace=0.06, hspace=0.28)  # fmt: skip
    left = 0.75 / size[0]
    figure.text(left, 1 - 0.3 / inches, title, fontsize=15, fontweight="bold", color=_INK, va="center")
    figure.text(left, 1 - 0.47 / inches, subtitle, fontsize=9, color=_PALE, va="top", linespacing=1.4)
    return figure, axes


def _legend(figure: Figure, handles: Sequence[Any], names: Sequence[str], size: tuple[float, float]) -> None:
    figure.legend(
        handles, [PEERS[name].label for name in names], loc="center left", ncols=len(names), frameon=False, fontsize=9.5,
        bbox_to_anchor=(0.7 / size[0], 1 - 1.02 / size[1]), handlelength=1.1, handleheight=1.1, columnspacing=1.5,
        handletextpad=0.5, borderaxespad=0, borderpad=0, labelcolor=_INK,
    )  # fmt: skip


def _quiet(axis: Axes) -> None:
    """Nothing drawn that is not data, but faint lines to read heights by."""
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#999999")
    axis.tick_params(axis="both", length=0, labelsize=9, labelcolor=_PALE)
    axis.tick_params(axis="x", which="minor", length=0)
    axis.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axis.set_axisbelow(True)


def plot_pass(data: Mapping[str, Any], dtype: str, pass_: str, kind: str, path: Path) -> None:
    """Bars of TFLOP/s grouped by length, a panel per head dim (rows) and mask (columns), written as PNG. A peer that was
    wrong, failed or did not fit keeps its place, with the word instead of a bar."""
    cells = records(data, kind, dtype=dtype, **{"pass": pass_})
    names = peers_of(cells)
    head_dims = sorted({cell["head_dim"] for cell in cells})
    masks = sorted({cell["causal"] for cell in cells})
    lengths = sorted({cell["seqlen"] for cell in cells})
    bars = len(lengths) * (len(names) + 1.5)
    size = (max(10.0, 1.0 + len(masks) * bars * 0.105), 2.0 + 2.7 * len(head_dims))
    figure, axes = _canvas(
        len(head_dims), len(masks), size, f"Attention {PASS_TITLES[pass_]}, {DTYPE_TITLES[dtype]}, {KIND_TITLES[kind]}",
        f"TFLOP/s, higher is better; {_HOW[kind]}.\n16k tokens in all, hidden size 2048. {setting(data)}",
    )  # fmt: skip
    handles: dict[str, Any] = {}
    for row, head_dim in enumerate(head_dims):
        for column, causal in enumerate(masks):
            axis = axes[row][column]
            _quiet(axis)
            axis.set_title(f"head dim {head_dim}, {mask_name(causal)}", fontsize=11, color=_INK, loc="left", pad=8)
            axis.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
            panel = [cell for cell in cells if cell["head_dim"] == head_dim and cell["causal"] == causal]
            for cell in panel:
                handles |= _bars(axis, lengths.index(cell["seqlen"]), cell["peers"], names)
            axis.set_xlim(-0.55, len(lengths) - 0.45)
            if row == len(head_dims) - 1:
                axis.set_xlabel("sequence length", fontsize=9, color=_PALE)
        axes[row][0].set_ylabel("TFLOP/s", fontsize=9, color=_PALE)
        axes[row][0].set_ylim(0, axes[row][0].get_ylim()[1] * 1.06)  # room for the figures
    drawn = [name for name in names if name in handles]
    _legend(figure, [handles[name] for name in drawn], drawn, size)
    figure.savefig(path)


def _bars(axis: Axes, centre: int, entries: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """One cell's group of bars around x = centre. -> a legend handle per peer drawn."""
    width = 0.84 / len(names)
    handles = {}
    for place, name in enumerate(names):
        entry = entries.get(name)
        if entry is None:
            continue
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


def plot_memory(data: Mapping[str, Any], path: Path) -> None:
    """Peak memory against length, both logarithmic, a panel per pass, written as PNG. Peers stand side by side at each
    length: many need the same."""
    cells = records(data, "memory")
    names = peers_of(cells)
    passes = [pass_ for pass_ in PASS_TITLES if any(cell["pass"] == pass_ for cell in cells)]
    lengths = sorted({cell["seqlen"] for cell in cells})
    size = (1.2 + 5.6 * max(2, len(passes)), 5.4)
    figure, axes = _canvas(
        1, len(passes), size, "Peak memory of attention",
        f"What one call holds at most beyond q, k, v and the incoming gradient, its results included; lower is better. "
        f"{_memory_setting(cells[0]).capitalize()}.\n{setting(data)}",
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
                (handles[name],) = axis.plot(*zip(*points, strict=True), color=COLOURS[name], linewidth=0, marker="o",
                                             markersize=6, markeredgewidth=0)  # fmt: skip
        axis.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
        axis.set_xlabel("sequence length", fontsize=9, color=_PALE)
        axis.yaxis.set_major_formatter(lambda mib, _: f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB")
    drawn = [name for name in names if name in handles]
    _legend(figure, [handles[name] for name in drawn], drawn, size)
    figure.savefig(path)


def plot_name(dtype: str, pass_: str, kind: str) -> str:
    how = "" if kind == "time" else f"_{kind}"
    return f"{PASS_TITLES[pass_].replace(' + ', '_')}_{dtype}{how}.png"


def plots(data: Mapping[str, Any], folder: Path) -> list[Path]:
    """Every plot that the data allows, into ``folder``: ``forward_bf16.png``, ..., ``memory.png``."""
    written = []
    for dtype, pass_, kind in sections(data):
        written.append(folder / plot_name(dtype, pass_, kind))
        plot_pass(data, dtype, pass_, kind, written[-1])
    if records(data, "memory"):
        written.append(folder / MEMORY_PLOT)
        plot_memory(data, written[-1])
    return written
