"""Where machine code lets the next kernel start (PREEXIT) and waits for the one before (ACQBULK), with EARLY_START: nothing of
another kernel's is loaded before, whatever the compilers move. tests/compiling/test_hopper.py has the large kernels."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from fa2tune.compiling import compiler, registry
from fa2tune.spec.problem import Specialization
from fa2tune.spec.variant import Variant

FUSED = registry.variant_named("sm90/bwd_fused")
MEMORY = re.compile(r"\b(ACQBULK|PREEXIT|LDG|STG|RED|ATOMG)\b")


def order(variant: Variant, config: dict[str, Any], dim: int) -> list[str]:
    spec = Specialization("bf16", dim, dim, "causal")
    binary = compiler.build(variant, spec, compiler.binary_config(variant, config), 90)
    command = [compiler.tool("nvdisasm"), "--print-code", "--no-dataflow", binary.cubin_path]
    return MEMORY.findall(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("dim", [32, 96])
@pytest.mark.parametrize("early", [True, False])
def test_before_and_after_the_fused_backward(dim: int, early: bool) -> None:
    spec = Specialization("bf16", dim, dim, "causal")
    before, after = compiler.around(FUSED, spec, {**FUSED.space.default(spec, 90), "EARLY_START": early}, 90)
    ((prepare, its_config),) = before
    ((finish, own_config),) = after
    prepared, finished = order(prepare, dict(its_config), dim), order(finish, dict(own_config), dim)
    assert "LDG" in prepared and "STG" in prepared and "LDG" in finished and "STG" in finished
    assert (prepared[0] == "PREEXIT", finished[0] == "ACQBULK") == (early, early)
    assert prepared.count("PREEXIT") == finished.count("ACQBULK") == early
