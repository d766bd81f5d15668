"""``fa2tune explain``: which cache row would serve a problem, and why."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fa2tune.cli import _tables
from fa2tune.cli._options import NO_MASK, OneCall, head_dim, masks, named_mask, named_score, shown_errors, window
from fa2tune.cli._output import echo
from fa2tune.cli.cache.common import EVIDENCE_INDENT, console, describe_row, gpu_asked, is_here
from fa2tune.fleet import lookup_cost
from fa2tune.rows import reader
from fa2tune.spec.mask import Mask, mask_of
from fa2tune.spec.problem import BACKWARD, DTYPES, FUSED, SPLIT, STRATEGIES, Problem
from fa2tune.spec.score import Score

if TYPE_CHECKING:
    from fa2tune.calling.explanation import Explanation, Served
    from fa2tune.rows.lookup import Toolchain


#: A call of more fits no GPU. The host lists every tile of a call, so that a typo would take all of its memory.
MOST = 2**31 - 1


def _count(context: click.Context, option: click.Parameter, value: int | None) -> int | None:
    if value is not None and not 1 <= value <= MOST:
        raise click.BadParameter(f"got {value}, allowed are 1 to {MOST}")
    return value


PRECISIONS = ("ieee", "tf32")


@click.command(cls=OneCall)
@click.option("--headdim", type=int, callback=head_dim, default=128, show_default=True, help="Head dim of Q and K.")
@click.option("--headdim-v", type=int, callback=head_dim, help="Head dim of V.  [default: as --headdim]")
@click.option("--seqlen", type=int, callback=_count, default=4096, show_default=True, help="Query length.")
@click.option("--seqlen-k", type=int, callback=_count, help="Key length.  [default: as --seqlen]")
@click.option("--batch", type=int, callback=_count, default=1, show_default=True)
@click.option("--heads", type=int, callback=_count, default=16, show_default=True, help="Query heads.")
@click.option("--heads-kv", type=int, callback=_count, help="Key and value heads.  [default: as --heads]")
@masks(NO_MASK)
@click.option("--window", metavar="LEFT,RIGHT", callback=window,
              help="A sliding window: keys to the left and to the right of the diagonal that a query sees, -1 for all. With "
                   "--causal none to the right.")  # fmt: skip
@click.option("--mask", "other", metavar="NAME[,VALUE...]", callback=named_mask,
              help="In place of these a mask by name, with its values: chunked,8192.")  # fmt: skip
@click.option("--score", metavar="NAME[,VALUE...]", callback=named_score,
              help="A score term by name, with its values: softcap,50.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), default="bf16", show_default=True)
@click.option("--precision", type=click.Choice(PRECISIONS), default="ieee", show_default=True, help="Of fp32 products.")
@click.option("--gpu", help="Name as `fa2tune gpus` has it.  [default: the GPU present]")
@click.option("--pass", "pass_", type=click.Choice(("fwd", "bwd")), help="[default: both]")
@click.option("--deterministic", is_flag=True, help="As torch.use_deterministic_algorithms: no fused backward.")
@click.option("--unaligned", is_flag=True, help="Tensors not aligned to 16 bytes, which no descriptor can address.")
@click.option(
    "--cache", "named", type=click.Path(path_type=Path), multiple=True, help="A file to ask before all others."
)
@click.option("-v", "--verbose", is_flag=True, help="Each row's evidence, and every row that was refused and why.")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
def explain(
    headdim: int, headdim_v: int | None, seqlen: int, seqlen_k: int | None, batch: int, heads: int,
    heads_kv: int | None, mask: str | None, window: tuple[int, int] | None, other: Mask | None, score: Score,
    dtype: str,
    precision: str, gpu: str | None, pass_: str | None, deterministic: bool, unaligned: bool, named: Sequence[Path],
    verbose: bool, as_json: bool,
) -> None:  # fmt: skip
    """Show which row, a tuned config with its evidence, would serve a call, and what would improve on it.

    With -v also each step of the lookup: what about each row is stale, which better placed rows were refused and why, and where
    each kernel's binary comes from. In Python: fa2tune.explain(q, k, v)."""
    heads_kv = heads_kv or heads
    if heads % heads_kv:
        raise click.BadParameter(f"got {heads_kv}, must divide --heads {heads}", param_hint="--heads-kv")
    if precision != "ieee" and dtype != "fp32":
        raise click.BadParameter(f"got {precision}, {dtype} has ieee only", param_hint="--precision")
    if mask == "full" and window is not None:
        raise click.UsageError("--full and --window: got both, one at most is allowed")
    if other is not None and (mask is not None or window is not None):
        also = "--window" if window is not None else f"--{mask}"
        raise click.UsageError(
            f"--mask: got {other} and {also}, one of --mask, --causal, --full and --window is allowed"
        )
    target = gpu_asked(gpu)
    with shown_errors():
        layers = reader.layers(named)
    problem = Problem(
        dtype, batch, heads, heads_kv, seqlen, seqlen_k or seqlen, headdim, headdim_v or headdim,
        mask_of(mask == "causal", window, other).fitted(seqlen, seqlen_k or seqlen), precision,
        aligned=not unaligned, tma=not unaligned, score=score,
    )  # fmt: skip
    from fa2tune.calling import choosing, serving

    which = ("fwd", BACKWARD) if pass_ is None else (pass_,)
    present = gpu is None or is_here(target)
    found = serving.explain_problem(problem, target, which, deterministic, layers, present)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
        return
    screen = console()
    for line in _short(found, screen.width if screen.is_terminal else None, verbose):
        echo(line)
    if verbose:
        served_kernels = {one.kernel for one in found.kernels}
        strategy = next((name for name, needed in STRATEGIES.items() if served_kernels >= {*needed}), SPLIT)
        for served in found.kernels:
            click.echo()
            if served.kernel == BACKWARD and deterministic:
                how = f"{FUSED}, with dQ summed in a fixed order," if strategy == FUSED else SPLIT
                click.echo(f"{how} is the deterministic strategy")
            for line in _ladder(served, choosing.toolchain(), strategy):
                _tables.say(line, EVIDENCE_INDENT)


LEGEND = "x port. default: speed relative to the portable default config."


def _short(found: Explanation, width: int | None, verbose: bool) -> Iterator[str]:
    """Verdict, rows, next command. ``width``: of the terminal, None for lines of any length."""
    for sentence in (found.verdict, found.about_launch, found.about_gpu):
        yield from textwrap.wrap(sentence, width or max(len(sentence), 1), break_on_hyphens=False)
    rows = [
        [
            one.kernel,
            one.by,
            f"{one.row.gain:.2f}" if one.row and one.row.gain and not one.estimated else "",
            one.evidence,
        ]
        for one in found.kernels
        if one.row or one.estimated
    ]
    if rows:
        yield ""
        yield from _tables.lines(
            ("kernel", "implementation", "x port. default", "row"),
            rows,
            width,
            right=("x port. default",),
            below=("row",),
        )
        yield from textwrap.wrap(LEGEND, width or len(LEGEND))
    files = dict.fromkeys((served.answer.layer.name, str(served.file)) for served in found.kernels if served.answer)
    for layer, path in files:
        yield f"file: {path} ({layer} layer)"
    yield ""
    yield from _tables.following(found.next, width)
    if not verbose:
        yield "(-v shows how each row was found)"


def _ladder(served: Served, here: Toolchain, strategy: str) -> Iterator[str]:
    """How one kernel's row was found, and all that is known of it. ``here``: of this machine; ``strategy``: the backward's."""
    from fa2tune.calling import forward_plans
    from fa2tune.compiling.choice import BY_FEW_TILES, BY_FORM

    answer = served.answer
    step = answer.step if answer else "no row serves"
    if served.estimated:
        by = BY_FORM if served.form else BY_FEW_TILES
        if served.split is not None:
            by = forward_plans.how(served.split)
        elif served.whole is not None:
            by = served.whole.kind.step
        yield f"{served.kernel}: {by}"
        for kernel, config in (served.runs or {}).items():
            yield f"  runs      {kernel}: {', '.join(f'{name} {value}' for name, value in config.items())}"
        yield from _loads(served)
        yield f"otherwise: {step}"
    else:
        yield f"{served.kernel}: {step}"
    if answer:
        yield f"  file      {answer.layer.path}"
        for name, (asked, has) in served.differs.items():
            yield f"  differs   {name}: asked {asked}, the row has {has}"
        if cost := lookup_cost.cost_line(served.key, lookup_cost.step_between(served.key, answer.row.key)):
            yield f"  costs     {cost}"
        for part in answer.stale:
            yield f"  stale     {part}"
        for line in describe_row(answer.row, here):
            yield f"  {line}"
        if served.lead is not None:
            yield f"  lead      {served.lead:.3f} times as fast as the portable winner of its key"
    for one in served.refused:
        yield f"  refused   {one.candidate.row.filed_as}, {one.candidate.step}: {one.why}"
    for name, (old, new) in (served.changed or {}).items():
        yield f"  changed   {name} {old} to {new}, which suits this call better"
    if not served.estimated:
        yield from _loads(served)
    if not answer:
        default = served.otherwise if served.estimated else served.config
        yield f"  default   {strategy if served.kernel == BACKWARD else dict(default or {})}"
        if cost := lookup_cost.cost_line(served.key, lookup_cost.DEFAULT):
            yield f"  costs     {cost}"
        for difference, layer in served.nearest:
            wanted = ", ".join(f"{name} asked {asked}, has {has}" for name, (asked, has) in difference.items())
            yield f"  nearest   {layer} layer: {wanted}"


def _loads(served: Served) -> Iterator[str]:
    for kernel, origin in (served.binaries or {}).items():
        yield f"  loads     {kernel}: {origin}"
