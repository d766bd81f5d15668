"""``fa2tune cache coverage``: does the cache have what a model needs?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fa2tune.cli import _tables
from fa2tune.cli._options import told
from fa2tune.cli.cache.common import KEY_TITLES, cells, console, gpu_asked
from fa2tune.problem import DTYPES
from fa2tune.rows import reader

if TYPE_CHECKING:
    from fa2tune.fleet.coverage import Need

OTHER_KEY = "row's key, where it differs"


@click.command(short_help="Show which keys a model needs, and the gaps.")
@click.option(
    "--model", type=click.Path(path_type=Path), required=True, help="A Hugging Face config.json, or its folder."
)
@click.option("--gpu", help="Name as `fa2tune gpus` has it.  [default: the GPU present]")
@click.option("--dtype", type=click.Choice(DTYPES), help="[default: the model's]")
@click.option("--seqlen", type=click.IntRange(min=1), multiple=True, help="Sequence length; may be repeated.  "
              "[default: every length bucket up to the model's longest]")  # fmt: skip
@click.option(
    "--pass", "pass_", type=click.Choice(("fwd", "both")), default="both", show_default=True, help="fwd: inference."
)
@click.option("--full", is_flag=True, help="No causal mask: the model is an encoder.")
@click.option("--deterministic", is_flag=True, help="As torch.use_deterministic_algorithms: no fused backward.")
@click.option(
    "--cache", "named", type=click.Path(path_type=Path), multiple=True, help="A file to ask before all others."
)
def coverage(
    model: Path, gpu: str | None, dtype: str | None, seqlen: Sequence[int], pass_: str, full: bool, deterministic: bool,
    named: Sequence[Path],
) -> None:  # fmt: skip
    """Show which tuning keys a model needs, the row and rung that would serve each, and the commands that close the gaps.

    Exit code 1 if a key has no row of its own, or only one made with another toolchain, or if some of the model's attention is
    not covered at all.
    """
    from fa2tune.calling import dispatch
    from fa2tune.fleet import coverage as rules
    from fa2tune.fleet import modelconfig

    target = gpu_asked(gpu)
    with told():
        found = modelconfig.attentions(modelconfig.read(model), dtype)
        layers = reader.layers(named)
    longest = max(attention.longest for attention in found)
    if seqlen and longest and max(seqlen) > longest:
        raise click.BadParameter(f"got {max(seqlen)}, the model has at most {longest}", param_hint="--seqlen")
    needs: dict[object, rules.Need] = {}
    open_ends = 0
    for attention in found:
        dims = f"{attention.head_dim}" + (
            f"/{attention.head_dim_v}" if attention.head_dim_v != attention.head_dim else ""
        )
        click.echo(
            f"{attention.layers} layers, {attention.kind.replace('_', ' ')}: {attention.heads_q} heads of {dims}, "
            f"{attention.heads_kv} of keys, {attention.dtype}"
            + (f"; NOT COVERED: {attention.not_covered}" if attention.not_covered else "")
        )
        asked = max(seqlen, default=longest)
        open_ends += bool(attention.not_covered) and asked > attention.longest
        for need in rules.needs(
            attention, target, layers, dispatch.toolchain(), buckets=rules.lengths(attention, seqlen), causal=not full,
            training=pass_ == "both", deterministic=deterministic,
        ):  # fmt: skip
            needs[need.key] = need
    if needs:
        click.echo(f"\n{target.name}:")
        screen = console()
        titles = (*KEY_TITLES[1:], "served by", "rung", OTHER_KEY)
        for line in _tables.lines(
            titles, _merged(needs.values()), screen.width if screen.is_terminal else None, right=("length",),
            below=("rung", OTHER_KEY),
        ):  # fmt: skip
            click.echo(line)
    counted = Counter(need.standing for need in needs.values())
    summary = ", ".join(f"{counted[name]} {name}" for name in rules.STANDINGS if counted[name])
    click.echo(f"\n{len(needs)} keys: {summary or 'none'}")
    lines = rules.commands(needs.values(), str(named[0]) if named else None)
    if lines:
        click.echo("to close the gaps:")
        for line in lines:
            click.echo(f"  {line}")
    elif needs:
        click.echo("every key has a row of its own, made with this toolchain")
    if lines or open_ends or not needs:
        raise SystemExit(1)


def _merged(needs: Iterable[Need]) -> list[list[str]]:
    """A line of the table for each key, neighbouring lengths that are served alike in one."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for need in needs:
        *key, _ = cells(need.key)[1:]
        alike.setdefault((*key, need.standing, need.rung, _differs(need)), []).append(need.key.bucket)
    return [[*about[:4], span, *about[4:]] for about, lengths in alike.items() for span in _tables.spans(lengths)]


def _differs(need: Need) -> str:
    from fa2tune.rows import lookup

    if need.answer is None:
        return ""
    return ", ".join(f"{name} {has}" for name, (_, has) in lookup.differences(need.key, need.answer.row.key).items())
