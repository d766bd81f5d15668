"""What ``fa2tune bench`` measured, as tables on screen and as Markdown. Plots: ``fa2tune.bench.plotting``.

Takes the data of a results file (comparison.load). rich loads on use.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fa2tune.bench import comparison
from fa2tune.bench.packed import PACKED_PEERS, label_of
from fa2tune.bench.peers import PEERS, SUBJECT
from fa2tune.spec.mask import ROW_MASKS, band

if TYPE_CHECKING:
    from rich.table import Table

    CellRecord = Mapping[str, Any]

#: Kinds of timed cells -> what a title adds; in the order of tables
KIND_TITLES = {kind: name for name, kind in reversed(comparison.TIMINGS.items())}
PACKED_TITLES = {kind: f"packed sequences, {name}" for name, kind in reversed(comparison.PACKED_TIMINGS.items())}
#: Of all peers, in the order of tables.
LABELS = {name: peer.label for name, peer in {**PEERS, **PACKED_PEERS}.items()}
PASS_TITLES = {"fwd": "forward", "bwd": "backward", "both": "forward + backward"}
DTYPE_TITLES = {"bf16": "bfloat16", "fp16": "float16"}
#: The peer whose ratio has a column of its own.
BASELINE = "sdpa-flash"
#: The lengths that averages are taken over: shorter ones are bound by launches and waves, not by the kernel.
LONG = 2048


# ---- reading the data ----------------------------------------------------------------------------------------------


def records(data: Mapping[str, Any], kind: str, **fields: Any) -> list[CellRecord]:
    """The cells of a kind whose fields have these values, by head dim, mask (full first), length."""
    found = [cell for cell in data["cells"] if cell["kind"] == kind and all(cell[f] == v for f, v in fields.items())]
    return sorted(found, key=lambda cell: (cell["head_dim"], mask_place(mask_label(cell)), cell["seqlen"]))


def sections(data: Mapping[str, Any], kinds: Iterable[str] = KIND_TITLES) -> list[tuple[str, str, str]]:
    """(dtype, pass, kind) of every timed cell, in the order of tables."""
    present = {(cell["dtype"], cell["pass"], cell["kind"]) for cell in data["cells"]}
    return [one for one in itertools.product(DTYPE_TITLES, PASS_TITLES, kinds) if one in present]


def title_of(dtype: str, pass_: str, kind: str) -> str:
    return f"{PASS_TITLES[pass_].capitalize()}, {DTYPE_TITLES[dtype]}, {(KIND_TITLES | PACKED_TITLES)[kind]}"


def peers_of(cells: Iterable[CellRecord]) -> list[str]:
    """Names of the peers that these cells know, in the order of LABELS."""
    present = {name for cell in cells for name in cell["peers"]}
    return [name for name in LABELS if name in present]


def ratio_to_best(cell: CellRecord) -> tuple[float, str] | None:
    """How many times as fast as the fastest peer fa2tune is, and which that is; None without a figure for both."""
    ratios = [(entry["ratio"], name) for name, entry in cell["peers"].items() if name != SUBJECT and "ratio" in entry]
    return min(ratios, default=None)


def averages(cells: Iterable[CellRecord]) -> dict[str, float]:
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


def length_label(cell: CellRecord) -> str:
    """The length of a cell's sequences, or how they are packed."""
    return label_of(cell["packed"]) if cell.get("packed") else length_name(cell["seqlen"])


def mask_label(cell: CellRecord) -> str:
    """The name of a cell's mask: "full", "causal", "window LEFT, RIGHT", or another's with its values: "chunked 8192". Behind
    it the score term, if there is one: "causal, softcap 50"."""
    if cell.get("score") is None:
        return _mask_label(cell)
    name, *values = cell["score"]
    return f"{_mask_label(cell)}, {' '.join([name, *(f'{value:g}' for value in values)])}"


def _mask_label(cell: CellRecord) -> str:
    if cell.get("mask") is not None:
        name, *values = cell["mask"]  # its file need not be here
        return f"{name} {', '.join(map(str, values))}".rstrip()
    if cell.get("window") is not None:  # absent from files made before there were windows
        return str(band(*cell["window"]))
    return "causal" if cell["causal"] else "full"


def mask_place(name: str) -> tuple[int, str]:
    """For sorting masks: full, causal, then the others."""
    return ROW_MASKS.index(name) if name in ROW_MASKS else len(ROW_MASKS), name


def figure_of(entry: Mapping[str, Any] | None, field: str, unit: float = 1.0, digits: int = 0) -> str:
    """One entry in a table: its figure, or what stands in for it."""
    if entry is not None and field in entry:
        return f"{entry[field] / unit:.{digits}f}"
    return "-" if entry is None or entry["status"] == "ok" else str(entry["status"])


def setting(data: Mapping[str, Any]) -> str:
    """The machine, the versions and when it was measured, on one line."""
    last = data["runs"][-1]
    days = sorted({str(run["date"])[:10] for run in data["runs"]})
    named = (("driver", "driver"), ("torch", "torch"), ("Triton", "triton"), ("cuDNN", "cudnn"))
    code = [f"running {last['code']}"] if last.get("code") else []
    parts = [str(last["gpu"]), *code, *(f"{title} {last[field]}" for title, field in named if last.get(field))]
    return ", ".join([*parts, " to ".join({days[0]: None, days[-1]: None})])


def _rows(cells: Sequence[CellRecord], names: Sequence[str]) -> list[tuple[list[str], int | None]]:
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
                str(cell["head_dim"]), mask_label(cell), length_label(cell),
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


def sentence(cells: Sequence[CellRecord]) -> str:
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


def memory_setting(cell: CellRecord) -> str:
    return f"batch 1, {cell['heads']} heads of {cell['head_dim']}, {mask_label(cell)}, {DTYPE_TITLES[cell['dtype']]}"


# ---- tables --------------------------------------------------------------------------------------------------------


def on_screen(data: Mapping[str, Any]) -> list[Table]:
    """One rich table per dtype, pass and way of timing, the fastest of each row in bold, and one for memory."""
    from rich.table import Table

    shown = []
    for dtype, pass_, kind in sections(data, [*KIND_TITLES, *PACKED_TITLES]):
        cells = records(data, kind, dtype=dtype, **{"pass": pass_})
        names = peers_of(cells)
        caption = sentence(cells) if kind in KIND_TITLES else None
        table = Table(title=f"{title_of(dtype, pass_, kind)}, TFLOP/s", caption=caption)
        for title in _header(names, {name: name for name in names}):  # labels are too wide for a screen
            table.add_column(title, justify="right")
        group = None
        for cell, (row, fastest) in zip(cells, _rows(cells, names), strict=True):
            if group not in (None, (cell["head_dim"], mask_label(cell))):
                table.add_section()
            group = (cell["head_dim"], mask_label(cell))
            table.add_row(*(f"[bold]{text}[/bold]" if column == fastest else text for column, text in enumerate(row)))
        shown.append(table)
    if memory := records(data, "memory"):
        names = peers_of(memory)
        table = Table(title=f"Peak memory beyond q, k, v and do, GiB ({memory_setting(memory[0])})")
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


def markdown(data: Mapping[str, Any], dtype: str, pass_: str, kind: str) -> str:
    """A Markdown table of one section, TFLOP/s, the fastest of each row in bold."""
    cells = records(data, kind, dtype=dtype, **{"pass": pass_})
    names = peers_of(cells)
    header = _header(names, LABELS)
    lines = ["| " + " | ".join(header) + " |", "|" + "--:|" * len(header)]
    for row, fastest in _rows(cells, names):
        lines.append("| " + " | ".join(f"**{t}**" if column == fastest else t for column, t in enumerate(row)) + " |")
    return "\n".join(lines) + "\n"
