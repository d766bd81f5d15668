"""Compiles what a benchmark will run, on all cores and without a GPU, into Triton's own cache."""

from __future__ import annotations

from collections.abc import Iterable

import click

from fa2tune.compiling import compiler
from fa2tune.fleet import precompile
from fa2tune.fleet.precompile import BinaryJob
from fa2tune.gpus import Gpu
from fa2tune.spec.problem import Config, Problem
from fa2tune.spec.variant import Variant


def job(variant: Variant, config: Config, problem: Problem) -> BinaryJob:
    """The binary of a kernel's config."""
    return variant, problem.specialization, tuple(sorted(compiler.binary_config(variant, config).items()))


def compile_all(jobs: Iterable[BinaryJob], gpu: Gpu) -> None:
    """Each binary once; prints how many there are, and which do not compile and why."""
    todo = list(dict.fromkeys(jobs))
    done = precompile.compile_all(todo, gpu.arch)
    click.echo(f"{len(todo)} binaries for {gpu.name}, {len(done.failures)} of which do not compile")
    for (variant, spec, _), why in done.failures:
        click.echo(f"{variant.short_name}, head dim {spec.head_dim}/{spec.head_dim_v}, {spec.mask}: {why}")
