"""``fa2tune explain``: which cache row would serve a problem, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fa2tune.cli._options import head_dim, masks, told
from fa2tune.cli.cache.common import describe, gpu_asked
from fa2tune.fleet import regret
from fa2tune.problem import BACKWARD, DTYPES, ROADS, SPLIT, Problem
from fa2tune.rows import lookup, reader
from fa2tune.rows.row import over_portable

if TYPE_CHECKING:
    from fa2tune.gpus import Gpu
    from fa2tune.problem import Config


_COUNT = click.IntRange(min=1)
PRECISIONS = ("ieee", "tf32")


@click.command()
@click.option("--headdim", type=int, callback=head_dim, default=128, show_default=True, help="Head dim of Q and K.")
@click.option("--headdim-v", type=int, callback=head_dim, help="Head dim of V.  [default: as --headdim]")
@click.option("--seqlen", type=_COUNT, default=4096, show_default=True, help="Query length.")
@click.option("--seqlen-k", type=_COUNT, help="Key length.  [default: as --seqlen]")
@click.option("--batch", type=_COUNT, default=1, show_default=True)
@click.option("--heads", type=_COUNT, default=16, show_default=True, help="Query heads.")
@click.option("--heads-kv", type=_COUNT, help="Key and value heads.  [default: as --heads]")
@masks("no mask")
@click.option("--dtype", type=click.Choice(DTYPES), default="bf16", show_default=True)
@click.option("--precision", type=click.Choice(PRECISIONS), default="ieee", show_default=True, help="Of fp32 products.")
@click.option("--gpu", help="Name as `fa2tune gpus` has it.  [default: the GPU present]")
@click.option("--pass", "pass_", type=click.Choice(("fwd", "bwd")), help="[default: both]")
@click.option("--deterministic", is_flag=True, help="As torch.use_deterministic_algorithms: no fused backward.")
@click.option("--unaligned", is_flag=True, help="Tensors not aligned to 16 bytes, which no descriptor can address.")
@click.option(
    "--cache", "named", type=click.Path(path_type=Path), multiple=True, help="A file to ask before all others."
)
def explain(
    headdim: int, headdim_v: int | None, seqlen: int, seqlen_k: int | None, batch: int, heads: int,
    heads_kv: int | None, causal: bool | None, dtype: str, precision: str, gpu: str | None, pass_: str | None,
    deterministic: bool, unaligned: bool, named: Sequence[Path],
) -> None:  # fmt: skip
    """Show which cache row would serve a problem, and why: its place on the lookup ladder, its layer, what about it is
    stale, every better placed row that was refused, and whether its kernels are precompiled."""
    heads_kv = heads_kv or heads
    if heads % heads_kv:
        raise click.BadParameter(f"got {heads_kv}, must divide --heads {heads}", param_hint="--heads-kv")
    if precision != "ieee" and dtype != "fp32":
        raise click.BadParameter(f"got {precision}, {dtype} has ieee only", param_hint="--precision")
    target = gpu_asked(gpu)
    with told():
        layers = reader.layers(named)
    problem = Problem(
        dtype, batch, heads, heads_kv, seqlen, seqlen_k or seqlen, headdim, headdim_v or headdim, bool(causal), precision,
        aligned=not unaligned, tma=not unaligned,
    )  # fmt: skip
    if pass_ != "bwd":
        _explain(problem, target, layers, "fwd")
    if pass_ != "fwd":
        for kernel, specialized in _backward(problem, target, layers, deterministic).items():
            _explain(problem, target, layers, kernel, specialized)


def _backward(
    problem: Problem, gpu: Gpu, layers: Sequence[reader.Layer], deterministic: bool
) -> Mapping[str, bool | None]:
    """Explain the road of the backward; returns the kernels on it, and whether each is to be warp-specialised."""
    from fa2tune.calling import dispatch

    if deterministic:
        click.echo(f"{SPLIT} is the deterministic road")
    answer = _explain(problem, gpu, layers, BACKWARD, deterministic=deterministic)
    kinds = dispatch.kinds_of(answer.row) if answer else {}
    return {kernel: kinds.get(kernel) for kernel in ROADS[answer.row.road if answer else SPLIT]}


def _binaries(kernel: str, problem: Problem, config: Config, gpu: Gpu) -> Iterator[str]:
    """Where a first call would take each kernel from that runs for a config."""
    from fa2tune.compiling import compiler
    from fa2tune.launching import passes, precompiled

    for variant, its_config in passes.runs(kernel, problem.specialization, config, gpu.arch):
        binary = compiler.binary_config(variant, its_config)
        image, found = precompiled.find(variant, problem.specialization, binary, gpu.arch)
        source = f"precompiled, {found}" if image else f"compiled at the first call: {found}"
        yield f"{variant.name}: {source}"


def _explain(
    problem: Problem, gpu: Gpu, layers: Sequence[reader.Layer], kernel: str, specialized: bool | None = None,
    deterministic: bool = False,
) -> lookup.Answer | None:  # fmt: skip
    """Print how ``kernel`` would be served, as the dispatcher finds it; returns the answer."""
    from fa2tune.calling import defaults, dispatch
    from fa2tune.compiling import compiler

    key = dispatch.key_of(problem, kernel, gpu)
    found = list(lookup.candidates(key, gpu.silicon, layers, dispatch.toolchain()))
    kinds = [
        dispatch.kind_refusal(problem, gpu, kind) for kind in ([specialized, False] if specialized else [specialized])
    ]
    if kernel == BACKWARD:
        kinds = [dispatch.road_refusal(problem, gpu, deterministic, layers)]
    for acceptable in kinds:
        answer, refused = lookup.choose(found, acceptable)
        if answer:
            break
    click.echo(f"{kernel}: {answer.rung if answer else 'no row serves'}")
    if answer:
        click.echo(f"  file      {answer.layer.path}")
        for name, (asked, has) in lookup.differences(key, answer.row.key).items():
            click.echo(f"  differs   {name}: asked {asked}, the row has {has}")
        if cost := regret.told(key, regret.rung_between(key, answer.row.key)):
            click.echo(f"  costs     {cost}")
        for part in answer.stale:
            click.echo(f"  stale     {part}")
        for line in describe(answer.row):
            click.echo(f"  {line}")
        lead = over_portable(answer.row, answer.layer.rows)
        if lead is not None:
            click.echo(f"  lead      {lead:.3f} times as fast as the portable winner of its key")
    for one in refused:
        click.echo(f"  refused   {one.candidate.row.variant}, {one.candidate.rung}: {one.why}")
    if kernel != BACKWARD:
        config = answer.row.config if answer else defaults.default_config(kernel, problem, gpu)
        suited = compiler.variant_of(kernel, config).suited(problem, config) if answer else config
        for name in (name for name, value in suited.items() if value != config[name]):
            click.echo(
                f"  changed   {name} {config[name]} to {suited[name]}, which suits these lengths and heads better"
            )
        for line in _binaries(kernel, problem, suited, gpu):
            click.echo(f"  loads     {line}")
    if not answer:
        default = SPLIT if kernel == BACKWARD else dict(defaults.default_config(kernel, problem, gpu))
        click.echo(f"  default   {default}")
        if cost := regret.told(key, regret.DEFAULT):
            click.echo(f"  costs     {cost}")
        for difference, layer in () if found else lookup.near_misses(key, layers):
            fields = ", ".join(f"{name} asked {asked}, has {has}" for name, (asked, has) in difference.items())
            click.echo(f"  nearest   {layer.name} layer: {fields}")
    click.echo()
    return answer
