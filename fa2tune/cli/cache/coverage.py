"""``fa2tune cache coverage``: does fa2tune compute a model's attention, and does the cache have its rows?"""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa2tune.cli import _tables
from fa2tune.cli._options import at_least_one, comma_separated, shown_errors
from fa2tune.cli.cache.common import KEY_TITLES, cells, console, gpu_asked, is_here
from fa2tune.rows import reader
from fa2tune.spec.problem import DTYPES

if TYPE_CHECKING:
    from fa2tune.fleet.coverage import Need, Verdict
    from fa2tune.fleet.modelconfig import Attention, Model

OTHER_KEY = "row's key, where it differs"
WINDOWED = "sliding windows (window=) are served by rows that were tuned without a window"
CHUNKS = 'attention in chunks (mask=fa2tune.Mask("chunked", N)) is served by rows that were tuned without chunks'
CAPPED = "soft caps (softcap=) are served by rows that were tuned without one"
FULL_CHUNKS = "attention in chunks is computed with the causal mask only; with --full its keys are those without chunks"
PADDING = "fa2tune takes no padding mask: sequences of a batch have one length"
TITLES = ("attention", "layers", "heads", "kv", "dim", "dtype", "mask", "computed")


@click.command(short_help="Show whether a model is covered, its keys, and the gaps.")
@click.option(
    "--model",
    "path",
    type=click.Path(path_type=Path),
    required=True,
    help="Path of a Hugging Face config.json, or of its folder. Needs pip install 'fa2tune[models]'.",
)
@click.option("--gpu", help="Name as `fa2tune gpus` has it.  [default: the GPU present]")
@click.option("--dtype", type=click.Choice(DTYPES), help="[default: the model's]")
@click.option(
    "--seqlen", metavar="N,...", multiple=True, callback=comma_separated(at_least_one),
    help="Sequence lengths: one, or several with commas.  [default: every length up to the model's longest]",
)  # fmt: skip
@click.option(
    "--pass",
    "pass_",
    type=click.Choice(("fwd", "both")),
    default="both",
    show_default=True,
    help="fwd: inference; both: training.",
)
@click.option("--full", is_flag=True, help="Ask for kernels without a mask: a decoder used as an encoder.")
@click.option("--deterministic", is_flag=True, help="As torch.use_deterministic_algorithms: no fused backward.")
@click.option(
    "--cache", "named", type=click.Path(path_type=Path), multiple=True, help="A file to ask before all others."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def coverage(
    path: Path, gpu: str | None, dtype: str | None, seqlen: list[int] | None, pass_: str, full: bool,
    deterministic: bool, named: Sequence[Path], as_json: bool,
) -> None:  # fmt: skip
    """Show whether fa2tune computes a model's attention, which tuning keys it needs, the row that serves each, and the commands
    that close the gaps.

    The config is read with Transformers' own class for its model type; nothing is downloaded, and no code of the model is run.

    Exit status 0: all of it is covered, and a row serves every key, be it stale or of another length, head dim or GPU. 1: some
    of the attention is not covered or not understood, or no row serves a key, so the default config does. 2: the config cannot
    be read.
    """
    from fa2tune.fleet import coverage as rules
    from fa2tune.fleet import modelconfig

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before Transformers is imported
    target = gpu_asked(gpu)
    with shown_errors():
        model = modelconfig.model(modelconfig.read(path), dtype)
        layers = reader.layers(named)
    seqlen = seqlen or []
    limit = max((attention.limit for attention in model.attentions), default=0)
    if seqlen and limit and max(seqlen) > limit:
        raise click.BadParameter(f"got {max(seqlen)}, the model has at most {limit}", param_hint="--seqlen")
    from fa2tune.calling import choosing

    needs: dict[object, rules.Need] = {}
    for attention in model.attentions:
        for need in rules.needs(
            attention, target, layers, choosing.toolchain(), buckets=rules.lengths(attention, seqlen),
            mask="full" if full else None, training=pass_ == "both" and not attention.dropout, deterministic=deterministic,
        ):  # fmt: skip
            needs[need.key, need.mask.name, need.score.name] = need
    verdict = rules.verdict(model, seqlen, pass_ == "both")
    present = gpu is None or is_here(target)
    commands = rules.commands(needs.values(), present, str(named[0]) if named else None)
    shortfalls = rules.shortfalls(verdict, needs.values())
    status = int(bool(shortfalls))
    notes = [*model.notes, PADDING] if needs else list(model.notes)
    if any(need.mask.window is not None for need in needs.values()):
        notes.append(WINDOWED)
    if any(need.mask.name == "chunked" for need in needs.values()):
        notes.append(CHUNKS)
    if any(need.score.name == "softcap" for need in needs.values()):
        notes.append(CAPPED)
    if full and any(attention.chunk for attention in model.attentions):
        notes.append(FULL_CHUNKS)
    if as_json:
        about = {"verdict": verdict.word, "reasons": verdict.reasons, "exit_code": status,
                 "shortfalls": shortfalls, "model_type": model.model_type,
                 "transformers": model.transformers, "gpu": target.name, "pass": pass_, "seqlen": seqlen}  # fmt: skip
        lists = {
            "attention": [_described(one) for one in model.attentions],
            "keys": [_served(one) for one in needs.values()],
        }
        click.echo(json.dumps({**about, **lists, "notes": notes, "commands": commands}, indent=2))
        raise SystemExit(status)
    counted = Counter(need.standing for need in needs.values())
    summary = ", ".join(
        f"{counted[name]} {name}{'s' if counted[name] != 1 else ''}" for name in rules.STANDINGS if counted[name]
    )
    keys = f"{len(needs)} key{'s' if len(needs) != 1 else ''} on {target.name}: {summary}" if needs else ""
    screen = console()
    width = screen.width if screen.is_terminal else None
    _say(_verdict_line(verdict, model, keys), width)
    if keys and verdict.word != rules.COVERED:
        _say(keys, width)
    if shortfalls:
        _say(f"exit status {status}: {'; '.join(shortfalls)}", width)
    _tables_of(model, needs.values(), full, width)
    if notes:
        click.echo()
        for note in notes:
            _say(f"note: {note}", width)
    following = list(_next(verdict, model, path, pass_, _given(gpu, dtype, seqlen, named))) + commands
    if following:
        click.echo("\nnext:")
        for line in following:
            click.echo("\n".join(_tables.shell_lines(line, width)))
    raise SystemExit(status)


def _given(gpu: str | None, dtype: str | None, seqlen: Sequence[int], named: Sequence[Path]) -> str:
    """The options of this command that narrow what it looks at, for another command."""
    found: tuple[tuple[str, Sequence[object]], ...] = (
        ("gpu", [gpu]), ("dtype", [dtype]), ("seqlen", [",".join(map(str, seqlen))] if seqlen else []), ("cache", named),
    )  # fmt: skip
    return "".join(f" --{name} {shlex.quote(str(v))}" for name, values in found for v in values if v is not None)


def _tables_of(model: Model, needs: Collection[Need], full: bool, width: int | None) -> None:
    """The model's attention layers, and the keys that they need."""
    if model.attentions:
        click.echo()
        rows = [_line(attention, full) for attention in model.attentions]
        for line in _tables.lines(TITLES, rows, width, right=("layers", "heads", "kv"), below=("computed",)):
            click.echo(line)
    if needs:
        click.echo()
        titles = (*KEY_TITLES[1:], "served by", "lookup", OTHER_KEY)
        for line in _tables.lines(titles, _merged(needs), width, right=("length",), below=("lookup", OTHER_KEY)):
            click.echo(line)


def _say(text: str, width: int | None) -> None:
    if width is None:  # not a terminal: one line, for grep
        click.echo(text)
        return
    for line in textwrap.wrap(text, max(40, width), subsequent_indent="  ", break_on_hyphens=False):
        click.echo(line)


def _verdict_line(verdict: Verdict, model: Model, keys: str) -> str:
    if verdict.reasons:
        return verdict.line
    count = sum(attention.layers for attention in model.attentions)
    return f"{verdict.word}: {count} of {count} attention layers; {keys}"


def _computed(attention: Attention) -> str:
    from fa2tune.fleet.modelconfig import MAX_COUNT

    if not attention.longest:
        return "no" if attention.known else "not known"
    if attention.longest == MAX_COUNT:
        return "any length"
    of = f" of {attention.limit}" if attention.longest < attention.limit < MAX_COUNT else ""
    return f"to {attention.longest}{of}"


def _line(attention: Attention, full: bool) -> list[str]:
    from fa2tune.fleet.families import FULL_KIND, FULL_LAYERS

    kind = "" if attention.kind == FULL_KIND else f"{attention.kind.partition('_')[0]} "
    dims = dict.fromkeys((attention.head_dim, attention.head_dim_v))
    counts = (attention.layers, attention.heads_q, attention.heads_kv, "/".join(map(str, dims)))
    mask = FULL_LAYERS if full else attention.mask
    if attention.window:
        mask += f", window {attention.window}" + (" each side" if mask == FULL_LAYERS else "")
    if attention.chunk and mask != FULL_LAYERS:
        mask += f", chunks of {attention.chunk}"
    if attention.softcap:
        mask += f", soft cap {attention.softcap:g}"
    return [
        f"{kind}{attention.part or 'self-attention'}",
        *map(str, counts),
        attention.dtype,
        mask,
        _computed(attention),
    ]


def _next(verdict: Verdict, model: Model, path: Path, pass_: str, given: str) -> Iterator[str]:
    """What to run where something is not covered."""
    from fa2tune.fleet.coverage import UNKNOWN

    if pass_ == "both" and any(attention.dropout and attention.longest for attention in model.attentions):
        yield f"fa2tune cache coverage --model {shlex.quote(str(path))}{given} --pass fwd"
    if " --dtype " not in given and any(attention.dtype == "fp32" for attention in model.attentions):
        yield f"fa2tune cache coverage --model {shlex.quote(str(path))}{given} --dtype bf16 --pass {pass_}"
    if verdict.word == UNKNOWN:
        yield "fa2tune explain --help  # asks about a single call: heads, lengths, head dim, mask"


def _described(attention: Attention) -> dict[str, Any]:
    from fa2tune.fleet.modelconfig import MAX_COUNT

    found = asdict(attention)
    return {
        name: None if value == MAX_COUNT and name in ("limit", "longest") else value for name, value in found.items()
    }


def _served(need: Need) -> dict[str, Any]:
    key = need.key
    about = {name: getattr(key, name) for name in ("kernel", "dtype", "precision", "head_dim", "head_dim_v")}
    return {
        **about,
        "mask": key.mask,
        "window": need.mask.window is not None,
        "chunks": need.mask.name == "chunked",
        "softcap": need.score.name == "softcap",
        "length": key.bucket,
        "served_by": need.standing,
        "lookup": need.step,
        "differs": _differs(need),
    }


def _merged(needs: Iterable[Need]) -> list[list[str]]:
    """A line of the table for each key, neighbouring lengths that are served alike in one."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for need in needs:
        *key, mask, _ = cells(need.key)[1:]
        mask += {"band": ", window", "chunked": ", chunks"}.get(need.mask.name, "")
        mask += ", soft cap" if need.score.name == "softcap" else ""
        alike.setdefault((*key, mask, need.standing, need.step, _differs(need)), []).append(need.key.bucket)
    return [[*about[:4], span, *about[4:]] for about, lengths in alike.items() for span in _tables.spans(lengths)]


def _differs(need: Need) -> str:
    from fa2tune.rows import lookup

    if need.answer is None:
        return ""
    return ", ".join(f"{name} {has}" for name, (_, has) in lookup.differences(need.key, need.answer.row.key).items())
