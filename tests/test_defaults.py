"""Which config serves where no row does. Needs no GPU."""

from __future__ import annotations

import pytest

from fa2tune import gpus
from fa2tune.calling.defaults import default_config, portable_default
from fa2tune.compiling import limits
from fa2tune.compiling.compiler import variant_of
from fa2tune.problem import KERNELS, Problem
from fa2tune.variant import WARP_SPECIALIZED, way_of

H200, A100, B200 = (gpus.named(name) for name in ("h200", "a100", "b200"))


def problem(dims: tuple[int, int] = (128, 128), dtype: str = "bf16", causal: bool = False, tma: bool = True) -> Problem:
    return Problem(dtype, 1, 16, 16, 2048, 2048, *dims, causal, aligned=tma, tma=tma)


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dq", "bwd_dkdv"])
@pytest.mark.parametrize("dims", [(72, 72), (128, 128), (192, 128), (64, 256), (256, 256)])
def test_wide_heads_take_the_warp_specialised_default_on_hopper(kernel: str, dims: tuple[int, int]) -> None:
    asked = problem(dims)
    config = default_config(kernel, asked, H200)
    variant = variant_of(kernel, config)
    assert way_of(config) == WARP_SPECIALIZED and variant.serves == kernel
    assert limits.before_compile(variant, asked.specialization, config, H200) is None


@pytest.mark.parametrize("gpu", [A100, B200], ids=["a100", "b200"])
def test_other_architectures_take_the_portable_default(gpu: gpus.Gpu) -> None:
    assert all(default_config(one, problem(), gpu) == portable_default(one, problem(), gpu.arch) for one in KERNELS)


@pytest.mark.parametrize("asked", [problem(dtype="fp32"), problem(tma=False), problem((32, 32))], ids=str)
def test_what_warp_specialised_kernels_cannot_run_or_gain_takes_the_portable_default(asked: Problem) -> None:
    assert all(default_config(one, asked, H200) == portable_default(one, asked, 90) for one in KERNELS)


def test_a_fused_backward_is_no_default() -> None:
    """It sums dQ in no fixed order: only a row, which a measurement made, asks for it."""
    assert way_of(default_config("bwd_fused", problem(), H200)) != WARP_SPECIALIZED


def test_by_pointer_where_no_descriptor_can_address() -> None:
    for dims in ((64, 64), (128, 128)):
        assert portable_default("fwd", problem(dims, tma=False), 90)["LOADS"] == "pointer"
