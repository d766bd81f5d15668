"""Where machine code lets the next kernel start (PREEXIT) and waits for the one before (ACQBULK), with EARLY_START: nothing of
another kernel's is loaded before, whatever the compilers move. tests/compiling/test_hopper.py has the large kernels. And that
kernels of short calls divide nothing."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, registry
from fa2tune.compiling.fingerprint import triton_version
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import DENSE, RAGGED
from fa2tune.spec.problem import Specialization
from fa2tune.spec.variant import Variant

FUSED = registry.variant_named("sm90/bwd_fused")
H200 = gpus.named("h200")
MEMORY = re.compile(r"\b(ACQBULK|PREEXIT|LDG|STG|RED|ATOMG)\b")


def order(variant: Variant, config: dict[str, Any], dim: int, extent: str = DENSE) -> list[str]:
    return MEMORY.findall(listed(variant, Specialization("bf16", dim, dim, "causal", extent=extent), config))


def listed(variant: Variant, spec: Specialization, config: dict[str, Any]) -> str:
    """Its disassembly."""
    binary = compiler.build(variant, spec, compiler.binary_config(variant, config), 90)
    assert limits.after_compile(binary, H200) is None
    command = [compiler.tool("nvdisasm"), "--print-code", "--no-dataflow", binary.cubin_path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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


@pytest.mark.parametrize(
    "form", [{}, {"BLOCK_M": 64, "num_warps": 8, "ORDER": "together", "REDUCE": "vector"}], ids=str
)
@pytest.mark.parametrize("dim", [64, 128])
def test_the_order_of_packed_tiles_is_loaded_behind_the_kernel_that_writes_it(dim: int, form: dict[str, Any]) -> None:
    """Before a tile is taken the warp that takes them waits once more, and of each it loads one number more."""
    spec = Specialization("bf16", dim, dim, "causal", extent=RAGGED)
    config = {
        **FUSED.space.default(spec, 90),
        **bwd_fused.PACKED,
        **form,
        "EXPONENTIALS_FIRST": False,
        "EARLY_START": True,
    }
    own, longer = (order(FUSED, {**config, "LONGER_FIRST": first}, dim, RAGGED) for first in (False, True))
    before, waits = ([found[: found.index("ATOMG")] for found in (own, longer)]), "ACQBULK"
    assert [set(one) for one in before] == [{waits}, {waits}], "nothing is loaded before the counter"
    assert before[1].count(waits) == before[0].count(waits) + 1
    assert longer.count("LDG") == own.count("LDG") + 1


@pytest.mark.parametrize("early", [True, False])
def test_what_writes_the_order_of_packed_tiles(early: bool) -> None:
    spec = Specialization("bf16", 64, 64, "causal", extent=RAGGED)
    config = {**FUSED.space.default(spec, 90), **bwd_fused.PACKED, "EARLY_START": early, "LONGER_FIRST": True}
    ((prepare, its_config),), _ = compiler.around(FUSED, spec, config, 90)
    without, longer = (order(prepare, {**its_config, "LONGER_FIRST": first}, 64, RAGGED) for first in (False, True))
    assert its_config["LONGER_FIRST"] and longer.count("STG") > without.count("STG")
    assert (longer[0] == "PREEXIT") == early


@pytest.mark.parametrize(
    ("name", "dims", "left"),
    [("fwd", (64, 64), 4), ("fwd", (192, 128), 3), ("bwd_dq", (192, 192), 0), ("bwd_dkdv", (192, 192), 0)],
    ids=str,
)
def test_kernels_with_divisors_from_the_host_divide_by_nothing_else(
    name: str, dims: tuple[int, int], left: int
) -> None:
    """A 32-bit division takes the reciprocal of the divisor as a float. What is left in a forward is one for each of its roles,
    by the number of programs, which a call of one round of tiles skips."""
    variant, spec = registry.variant_named(f"sm90/{name}"), Specialization("bf16", *dims, "causal")
    sent, divided = (
        len(
            re.findall(
                r"\bI2F\.(?:U32\.)?RP\b", listed(variant, spec, {**variant.space.default(spec, 90), "DIVISORS": one})
            )
        )
        for one in (True, False)
    )
    least = 10 if triton_version().startswith("3.6") else left + 4  # 3.9 has 4 in bwd_dq
    assert sent == left and divided >= least
