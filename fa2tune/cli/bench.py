"""``fa2tune bench``: options in; table, JSON and plots out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fa2tune.bench import comparison
from fa2tune.bench.packed import PACKED_BY_MMA_SYNC, PACKED_PEERS, lengths_of
from fa2tune.bench.peers import BY_MMA_SYNC, FLASH_ATTN_LIBRARY, PEERS, SUBJECT, by_mma_sync, select
from fa2tune.cli import _output
from fa2tune.cli._options import comma_separated, masks, named_mask, named_score, shown_errors, window
from fa2tune.spec.mask import ROW_MASKS, Mask, band, row_mask_named
from fa2tune.spec.problem import BUCKETS
from fa2tune.spec.score import NONE, Score


def _text(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values))


def _packings(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> list[tuple[int, ...]]:
    try:
        return [lengths_of(text) for text in dict.fromkeys(given)]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _masks(mask: str | None, windows: list[tuple[int, int]], named: list[Mask]) -> list[Mask]:
    """Each once. A band that is causal or no mask is that."""
    others = [Mask("band", *sides) for sides in windows] + named
    plain = [mask] if mask is not None else [] if others else ROW_MASKS
    return [
        *dict.fromkeys([*map(row_mask_named, plain), *(band(*one.window) if one.window else one for one in others)])
    ]


def _refuse_other_lengths() -> None:
    """Where packings were given."""
    for other in ("seqlen", "memory_seqlen"):
        if click.get_current_context().get_parameter_source(other) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--packed and --{other.replace('_', '-')}: got both, one at most is allowed")


@click.command()
@click.option("--peers", multiple=True, metavar="NAME,...", callback=comma_separated(str),
              help=f"Of {', '.join(n for n in PEERS if n != SUBJECT)}; with --packed of "
              f"{', '.join(n for n in PACKED_PEERS if n != SUBJECT)}. "
              "fa2tune is always measured.  [default: all that are installed]")  # fmt: skip
@click.option(
    "--headdim",
    multiple=True,
    metavar="N,...",
    callback=comma_separated(int),
    default=[_text(comparison.HEAD_DIMS)],
    show_default=True,
    help="Head dims.",
)
@click.option(
    "--seqlen", multiple=True, metavar="N,...", callback=comma_separated(int), default=[_text(BUCKETS)], show_default=True,
    help="Sequence lengths.",
)  # fmt: skip
@masks("both masks")
@click.option("--window", "windows", multiple=True, metavar="LEFT,RIGHT", callback=window,
              help="A sliding window in place of the masks: keys to the left and to the right of the diagonal that a query "
                   "sees, -1 for all: short for --mask band,LEFT,RIGHT.")  # fmt: skip
@click.option("--mask", "named", multiple=True, metavar="NAME[,VALUE...]", callback=named_mask,
              help="In place of both masks one by name, with its values: chunked,8192. This and --window may be repeated, and "
                   "combined with --causal or --full.")  # fmt: skip
@click.option("--score", "scores", multiple=True, metavar="NAME[,VALUE...]", callback=named_score,
              help="A score term by name, with its values: softcap,50. May be repeated; none for calls without.")  # fmt: skip
@click.option("--packed", "packings", multiple=True, metavar="LENGTHS", callback=_packings,
              help="Packed sequences in place of all lengths, and no peak memory: 16x1024 for 16 of 1024, 4096,2048,700 for "
                   "three, or both. May be repeated.")  # fmt: skip
@click.option("--pass", "passes", multiple=True, metavar="NAME,...", callback=comma_separated(str),
              default=[_text(comparison.BENCHED)], show_default=True,
              help="fwd: forward without gradients; bwd: backward alone; both: one after the other.")  # fmt: skip
@click.option("--timing", "timings", multiple=True, metavar="NAME,...", callback=comma_separated(str),
              default=["interleaved"], show_default=True,
              help="interleaved: launches of all peers take turns, each with a cold L2; sustained: each peer runs alone, at "
                   "the clock that its own power draw allows (1.5 s per peer and cell).")  # fmt: skip
@click.option("--dtype", multiple=True, metavar="NAME,...", callback=comma_separated(str), default=["bf16"], show_default=True,
              help="Of bf16, fp16.")  # fmt: skip
@click.option("--memory-seqlen", multiple=True, metavar="N,...", callback=comma_separated(int),
              default=[_text(comparison.MEMORY_SEQLENS)], show_default=True,
              help="Lengths at which peak memory is measured.")  # fmt: skip
@click.option("--no-memory", is_flag=True, help="Leave peak memory out.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=0.15, show_default=True,
              help="GPU time per peer and interleaved cell; always 10 to 100 samples.")  # fmt: skip
@click.option("--time-budget", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="Stop before a cell that would likely exceed it; --resume continues.")  # fmt: skip
@click.option("--as", "other", metavar="GPU",
              help="Run the code and the rows of a GPU without wgmma on this Hopper GPU: sm_80 to sm_89, sm_120 or a name "
                   f"as tune --gpu takes it. Peers are then {', '.join(BY_MMA_SYNC)} unless named; flash-attn where "
                   f"{FLASH_ATTN_LIBRARY} names its library.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Continue OUT/bench.json if it exists.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("bench"), show_default=True,
              help="Folder for bench.json and the plots.")  # fmt: skip
def bench(
    peers: list[str] | None, headdim: list[int], seqlen: list[int], mask: str | None, windows: list[tuple[int, int]],
    named: list[Mask], scores: list[Score],
    packings: list[tuple[int, ...]], passes: list[str], timings: list[str], dtype: list[str], memory_seqlen: list[int],
    no_memory: bool, seconds: float, time_budget: float | None, other: str | None, resume: bool, out: Path,
) -> None:  # fmt: skip
    """Time fa2tune against other exact attention on this GPU, in the FlashAttention-2 paper's settings.

    Each cell (dtype, head dim, mask, score term, length, pass) compares every peer's result with a float32 reference, and
    times those that are right. bench.json is written after each cell.
    """
    if packings:
        _refuse_other_lengths()
    try:
        known, alike = (PACKED_PEERS, PACKED_BY_MMA_SYNC) if packings else (PEERS, by_mma_sync())
        chosen, absent = select(alike if other is not None and peers is None else peers, known)
        grid = comparison.Grid(
            dtypes=dtype, head_dims=headdim, masks=_masks(mask, windows, named), scores=[*dict.fromkeys(scores)] or [NONE],
            seqlens=seqlen, passes=passes, timings=timings, memory_seqlens=() if no_memory else memory_seqlen,
            packings=packings,
        )  # fmt: skip
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    file = out / "bench.json"
    if file.exists() and not resume:  # said before torch is imported
        raise click.UsageError(f"--out: {file} exists; --resume continues it, or name another folder")

    from rich.console import Console

    from fa2tune.bench import plotting, tables
    from fa2tune.bench.gpu import BenchGpu
    from fa2tune.calling.dispatch import SERVED

    console = Console()
    with shown_errors():
        gpu = BenchGpu()
        code = "" if other is None else _ported(other)
        out.mkdir(parents=True, exist_ok=True)
        results = comparison.Results(file, {**gpu.environment(), "code": code or None}, resume)
        results.save()  # an unwritable folder is said now
    for name, why in absent.items():
        console.print(f"{name} is left out: {why}")

    def progress(done: int, total: int, record: Mapping[str, Any]) -> None:
        results.data["runs"][-1]["served"] = dict(SERVED)
        results.save()
        console.print(f"[{done}/{total}] {_line(record)}", markup=False, soft_wrap=True)

    status = 0
    _output.if_stopped("The cells that were measured are kept; the same command with --resume continues")
    try:
        complete = comparison.run(
            grid.cells(), chosen, gpu, results, seconds=seconds, time_budget=time_budget, progress=progress
        )
    except comparison.BenchError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        complete, status = False, 130

    for table in tables.on_screen(results.data):
        console.print(table)
    for objection in tables.objections(results.data):
        console.print(objection, markup=False, soft_wrap=True)
    steps = ", ".join(f"{step}: {count}" for step, count in SERVED.most_common()) or "none"
    console.print(f"fa2tune's configs in this run, by step of the lookup: {steps}", markup=False, soft_wrap=True)
    with shown_errors():
        for path in [file, *plotting.plots(results.data, out)]:
            console.print(f"wrote {path}", soft_wrap=True)
    if not complete:
        console.print("Not every cell is measured yet: the same command with --resume continues.")
    if status:
        raise SystemExit(status)


def _ported(name: str) -> str:
    """Begin to run the code of another GPU; whose it is, for people. ValueError: it cannot be had here."""
    from fa2tune import gpus
    from fa2tune.catalogue import REFERENCES
    from fa2tune.launching import ported

    able = (one for one in REFERENCES if any(ported.can_stand_for(one, host) for host in ported.HOSTS))
    known = {f"sm_{one}": REFERENCES[one][0] for one in able}
    try:
        gpu, here = gpus.named(known.get(name.lower(), name)), gpus.present()
    except ValueError:
        raise ValueError(f"as: got {name!r:.40}, allowed are {', '.join(known)}, or the name of a GPU") from None
    if here is None or not ported.can_stand_for(gpu.arch, here.arch):
        found = "no GPU" if here is None else f"{here.name} ({here.capability})"
        raise ValueError(
            f"as: {gpu.name} has compute capability {gpu.capability}, and here is {found}; it takes a GPU of compute "
            f"capability {' or '.join(f'{one / 10}' for one in ported.HOSTS)} here, and {', '.join(known)} or such a GPU's name"
        )
    ported.begin(gpu)
    return f"sm_{ported.CODE} code for {gpu.name}"


def _line(record: Mapping[str, Any]) -> str:
    """A cell in one line, as it is finished."""
    from fa2tune.bench import tables

    entries = record["peers"]
    what = f"{record['pass']} {record['dtype']} head dim {record['head_dim']} {tables.mask_label(record)}"
    own = entries[SUBJECT]
    if own["status"] != "ok":
        figure = f"fa2tune {own['status']}: {own['why']}"
    elif record["kind"] == "memory":
        figure = f"fa2tune {own['peak_bytes'] / 2**20:.0f} MiB"
    else:
        best = tables.ratio_to_best(record)
        figure = f"fa2tune {own['tflops']:.0f} TFLOP/s" + (
            f", {best[0]:.2f} x the best peer ({best[1]})" if best else ""
        )
    if own.get("kernels"):
        figure += f" by {', '.join(f'{kernel} {name}' for kernel, name in own['kernels'].items())}"
    odd = [
        f"{name} {entry['status']}" for name, entry in entries.items() if name != SUBJECT and entry["status"] != "ok"
    ]
    kind = (tables.KIND_TITLES | tables.PACKED_TITLES).get(record["kind"], record["kind"])
    length = tables.length_label(record) if record.get("packed") else f"length {record['seqlen']}"
    return f"{kind} {what} {length}: " + "; ".join([figure, *odd])
