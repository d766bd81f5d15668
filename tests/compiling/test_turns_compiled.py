"""The fused Hopper backward whose key tiles add to dQ in turns, without a GPU: products are addressed soundly, and its loops
spill what those without turns do."""

from __future__ import annotations

import pytest

from fa2tune import gpus
from fa2tune.calling.schedules import turns_schedule
from fa2tune.compiling import compiler, operandcheck, registry
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import Problem, Specialization

FUSED = registry.variant_named("sm90/bwd_fused")
#: Bytes of stack a thread that turns may add, between the loops.
MORE = 8


@pytest.mark.parametrize(("dim", "mask"), [(128, CAUSAL), (128, FULL), (64, CAUSAL)], ids=str)
def test_turns_cost_the_loops_nothing(dim: int, mask: Mask) -> None:
    spec = Specialization("bf16", dim, dim, mask.name)
    problem = Problem("bf16", 8, 16, 16, 4096, 4096, dim, dim, mask)
    default = FUSED.space.default(spec, 90)
    config = turns_schedule.config_of(problem, default, gpus.named("h200"))
    assert FUSED.space.broken(config, spec, 90) is None
    found = compiler.build(FUSED, spec, config, 90)
    without = compiler.build(FUSED, spec, {**config, "IN_ORDER": False}, 90)
    assert found.registers <= without.registers and found.spills <= without.spills + MORE
    operandcheck.compile_kernel(FUSED, spec, config, 90)
