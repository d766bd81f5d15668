"""What a file of binaries is made with has every kernel that drawn calls launch. Nothing is compiled."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing, forward_plans
from fa2tune.compiling import compiler
from fa2tune.fleet import precompile
from fa2tune.launching import dq_parts, group_parts, key_splits
from fa2tune.launching.merged_heads import merged
from fa2tune.launching.passes import runs
from fa2tune.spec.extent import DENSE, RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, band
from fa2tune.spec.problem import QUERIES_FIRST, Problem

H200 = gpus.named("h200")
CALLS = 100


def draw(choose: random.Random, dims: tuple[int, int], extent: str) -> Problem:
    heads_kv, queries, keys = choose.choice((1, 2, 8)), *(choose.randint(1, 10 ** choose.randint(1, 4)) for _ in "qk")
    keys = choose.choice((queries, keys))
    batch, packing = (1, Extent(RAGGED, choose.choice((1, 5, 17, 100)), choose.choice((0, 512, 4096))))
    if extent == DENSE:
        batch, packing = choose.choice((1, 3, 33)), Extent()
    mask = choose.choice((CAUSAL, FULL, band(choose.randrange(300), 0))).fitted(queries, keys)
    heads = heads_kv * choose.choice((1, 4, 12)), heads_kv
    return Problem("bf16", batch, *heads, queries, keys, *dims, mask, extent=packing)


def launched(problem: Problem, deterministic: bool) -> set[precompile.BinaryJob]:
    chooser = choosing.Chooser(problem, H200)
    forward = chooser.choose("fwd")
    split, _ = forward_plans.split_of(problem, forward, H200)
    found = [(*one, problem) for one in runs("fwd", problem.specialization, forward, 90)]
    if split is not None:
        found = key_splits.kernels(problem, split, 90)
    _, choices = choosing.choose_backward(chooser, deterministic)
    divided = backward_plans.division(problem, choices, H200)
    whole, _ = backward_plans.whole(problem, choices, divided, H200)
    if whole is not None:
        found += whole.kernels(problem, 90)
    else:
        for kernel, choice in choices.items():
            found += [(*one, problem) for one in runs(kernel, problem.specialization, choice, 90)]
            found += group_parts.needed(problem, choice.config, 90) if divided.groups.get(kernel, 1) > 1 else []
        found += dq_parts.kernels(problem, divided.keys, 90) if divided.keys > 1 else []
    return {
        (variant, posed.specialization, tuple(sorted(compiler.binary_config(variant, config).items())))
        for variant, config, posed in found
    }


@pytest.mark.parametrize("extent", [DENSE, RAGGED])
@pytest.mark.parametrize("dims", [(128, 128), (40, 96), (192, 128)], ids=str)
def test_drawn_calls_find_their_binaries(dims: tuple[int, int], extent: str) -> None:
    dense = extent == DENSE
    wanted = precompile.Wanted((dims,), ("bf16",), windows=True, packed=not dense, one_key_head=dense)
    there, choose = set(precompile.jobs(H200, choosing.layers(), wanted)[0]), random.Random(f"{dims} {extent}")
    for _ in range(CALLS):
        problem = draw(choose, dims, extent)
        if dense and problem.mask == CAUSAL and choose.random() < 0.5:
            problem = merged(replace(problem, heads_kv=1, stacked=QUERIES_FIRST))
        lacking = launched(problem, choose.random() < 0.3) - there
        assert not lacking, f"{problem}: {[variant.name for variant, *_ in lacking]}"
