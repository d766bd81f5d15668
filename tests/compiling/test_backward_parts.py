"""Head dims in two parts in the warp-specialised backward, without a GPU: what it multiplies, what it spills, what fits, and
which config serves them."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, operandcheck, registry, sass
from fa2tune.search_spaces.sm90 import bwd_dkdv, bwd_dq, bwd_fused
from fa2tune.spec.extent import DENSE, RAGGED
from fa2tune.spec.problem import Config, Specialization, head_dim_parts, padded_head_dim

H200 = gpus.named("h200")
FUSED, DQ, DKDV = (registry.variant_named(f"sm90/bwd_{name}") for name in ("fused", "dq", "dkdv"))
KERNELS = pytest.mark.parametrize("variant", [FUSED, DQ, DKDV], ids=lambda variant: variant.name)


def specified(d: int, dv: int, mask: str = "full") -> Specialization:
    return Specialization("bf16", d, dv, mask)


def products(code: str) -> Counter[int]:
    """Columns of a wgmma, which sums over 16 -> how many there are."""
    return Counter(map(int, re.findall(r"HGMMA\.64x(\d+)x16", code)))


def built(variant: Any, spec: Specialization, **changes: Any) -> tuple[Config, compiler.Binary, str]:
    """(config, binary, machine code) of the default with changes."""
    config = {**variant.space.default(spec, 90), **changes}
    assert limits.before_compile(variant, spec, config, H200) is None
    binary = compiler.build(variant, spec, config, 90)
    command = [compiler.tool("nvdisasm"), "--print-code", "--no-dataflow", binary.cubin_path]
    return config, binary, subprocess.run(command, capture_output=True, text=True, check=True).stdout


def totals(*dims: int) -> tuple[tuple[int, int], ...]:
    return tuple(head_dim_parts(dim) for dim in dims)


@pytest.mark.parametrize("dims", [(192, 192), (192, 128), (160, 160)], ids=str)
def test_dq_multiplies_the_columns_of_both_parts_alone(dims: tuple[int, int]) -> None:
    """Of 64 keys S takes D / 16 products, dP DV / 16, and dQ 4 of each part. The loops spill nothing."""
    config, binary, code = built(DQ, specified(*dims))
    (d, rest), (dv, rest_v) = totals(*dims)
    copies = 2 * config["GROUPS"]  # a loop with a mask and one without
    expected = Counter({config["BLOCK_N"]: copies * (d + rest + dv + rest_v) // 16})
    for columns in (d, rest):
        expected[columns] += copies * config["BLOCK_N"] // 16
    assert config["IN_PARTS"] and products(code) == expected and binary.spills == 0
    reckoned = bwd_dq._shared_bytes(config, specified(*dims))
    assert reckoned - 1024 <= binary.shared_bytes <= reckoned


@pytest.mark.parametrize("dims", [(192, 192), (192, 128), (160, 160), (96, 96)], ids=str)
def test_dk_and_dv_multiply_the_columns_of_both_parts_alone(dims: tuple[int, int]) -> None:
    config, binary, code = built(DKDV, specified(*dims, "causal"))
    (d, rest), (dv, rest_v) = totals(*dims)
    expected = Counter[int]()
    if config["OWN"] == "keys":  # in each group a loop with a mask and one without, all four products in each
        expected[64] += 4 * (d + rest + dv + rest_v) // 16
        for columns in filter(None, (d, rest, dv, rest_v)):
            expected[columns] += 4 * 64 // 16
    else:  # S and dV in two loops, dP and dK in one; the first of S and dP before them
        expected[64] += 3 * (d + rest) // 16 + 2 * (dv + rest_v) // 16
        for part in filter(None, (dv, rest_v)):
            expected[part] += 2 * 64 // 16
        for part in filter(None, (d, rest)):
            expected[part] += 64 // 16
    assert config["IN_PARTS"] and products(code) == expected
    assert all(loop.local_bytes == 0 for loop in sass.loops(code) if loop.products > 8)
    reckoned = bwd_dkdv._shared_bytes(config, specified(*dims, "causal"))
    assert reckoned - 1024 <= binary.shared_bytes <= reckoned


@pytest.mark.parametrize(
    ("dim", "causal", "extent"),
    [(96, True, DENSE), (80, False, DENSE), (48, True, DENSE), (96, True, RAGGED), (80, False, RAGGED)],
)
def test_the_fused_kernel_gives_each_group_a_part_of_dq(dim: int, causal: bool, extent: str) -> None:
    """Of 64 query rows group 0 multiplies for the columns of the first part, group 1 for those of the second; of 128 rows each
    for both. dQ of the last block stands behind the loops."""
    spec = replace(specified(dim, dim, "causal" if causal else "full"), extent=extent)
    packed = bwd_fused.PACKED if spec.ragged else {}
    config, binary, code = built(FUSED, spec, IN_PARTS=True, ORDER="behind", **packed)
    d, rest = head_dim_parts(dim)
    m = config["BLOCK_M"]
    expected = Counter({m: 4 * 2 * ((d + rest) // 16 + 1)})  # S and dP with their terms
    for part in (d, rest):
        expected[part] += 4 * 2 * m // 16  # dV and dK
        expected[part] += (2 + 1) * 128 // 16 * (1 if m == 64 else 2)  # dQ
    assert products(code) == expected
    if m == 64:
        assert all(loop.local_bytes <= 256 for loop in sass.loops(code) if loop.products > 8), "two words at the most"
    assert binary.shared_bytes <= bwd_fused.shared_bytes(config, spec) and operandcheck.unsound(code) == ()


@pytest.mark.parametrize("dims", [(96, 64), (64, 96), (88, 72), (120, 16)], ids=str)
def test_v_apart_multiplies_the_columns_of_its_own_parts(dims: tuple[int, int]) -> None:
    """Where Q has one part each group multiplies for half of dQ's columns."""
    spec = specified(*dims, "causal")
    config = bwd_fused.with_v_apart(FUSED.space.default(spec, 90))
    config, binary, code = built(FUSED, spec, **config)
    d, dv, used = bwd_fused.parts(spec, config), bwd_fused.parts_v(spec, config), bwd_fused.used(spec, config)
    expected = Counter({64: 4 * (sum(d) // 16 + sum(dv) // 16 + 2)})  # S and dP with their terms
    for part in filter(None, (*d, *dv)):
        expected[used.results.get(part, part)] += 4 * 64 // 16  # dK and dV
    for part in d if d[1] else (d[0] // 2, d[0] // 2):
        expected[part] += 2 * 128 // 16  # dQ
    assert products(code) == expected
    assert all(loop.local_bytes == 0 for loop in sass.loops(code) if loop.products > 8)
    reckoned = bwd_fused.shared_bytes(config, spec)
    assert reckoned - 1024 <= binary.shared_bytes <= reckoned and operandcheck.unsound(code) == ()


def test_where_v_is_apart() -> None:
    """What a fifth of the columns or more are zeros of; a search may have it wherever V has other parts."""
    for dims, serves in (
        ((96, 64), True), ((64, 96), True), ((88, 72), True), ((48, 88), True), ((128, 64), True), ((120, 16), True),
        ((120, 72), False), ((128, 96), False), ((96, 96), False), ((64, 32), False), ((128, 128), False),
    ):  # fmt: skip
        for extent in (DENSE, RAGGED):
            spec = replace(specified(*dims, "causal"), extent=extent)
            config = FUSED.space.default(spec, 90)
            if spec.ragged:
                config |= bwd_fused.PACKED
            assert config["V_APART"] is serves and FUSED.fitted(spec, config) == config
            assert limits.before_compile(FUSED, spec, config, H200) is None
            able = FUSED.space.broken(bwd_fused.with_v_apart(config), spec, 90) is None
            assert able == bwd_fused.can_be_apart(spec) and able >= serves
        assert len(set(dims)) > 1 or not able


@cache
def legal(variant: Any, whole: Specialization) -> list[Config]:
    return [config for config in variant.space.points() if limits.before_compile(variant, whole, config, H200) is None]


@pytest.mark.parametrize("dims", [(96, 64), (48, 88), (128, 64), (64, 128), (120, 16)], ids=str)
def test_a_row_of_padded_head_dims_is_legal_with_v_apart(dims: tuple[int, int]) -> None:
    for mask in ("full", "causal"):
        asked, found = specified(*dims, mask), legal(FUSED, specified(128, 128, mask))
        assert found
        for config in found:
            fitted = FUSED.fitted(asked, config)
            assert fitted["V_APART"] and not fitted["BESIDE"] and FUSED.fitted(asked, fitted) == fitted
            assert limits.before_compile(FUSED, asked, fitted, H200) is None, (config, fitted)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dims", [*((dim, dim) for dim in (40, 48, 72, 80, 96, 144, 160, 192)), (192, 128)], ids=str)
@KERNELS
def test_a_row_of_the_padded_head_dims_is_legal_in_parts(variant: Any, dims: tuple[int, int], mask: str) -> None:
    """Whatever was tuned for a tile of whole columns. At 64 columns it stays as it is."""
    whole = specified(padded_head_dim(dims[0]), padded_head_dim(dims[1]), mask)
    asked = specified(*dims, mask)
    found_legal = legal(variant, whole)
    assert found_legal or variant is FUSED
    for config in found_legal:
        assert variant.fitted(whole, config) == config
        found = variant.fitted(asked, config)
        assert limits.before_compile(variant, asked, found, H200) is None, (config, found)
        changed = {name for name in config if config[name] != found[name]}
        assert ("IN_PARTS" in changed) == (max(dims) > 64)
        loop = {"ORDER", "REDUCE", "EXPONENTIALS_FIRST", "HEADS_PER_WAVE", "num_warps"}
        assert changed <= ({"IN_PARTS"} | loop if variant is FUSED else {"IN_PARTS"})


@KERNELS
def test_where_parts_are_refused(variant: Any) -> None:
    """Head dims in one part; and of the fused kernel unlike parts, concatenated groups, and dQ by TMA."""
    space = variant.space
    for dim in (64, 112, 128):
        spec = specified(dim, dim)
        broken = space.broken({**space.default(spec, 90), "IN_PARTS": True}, spec, 90)
        assert broken is not None and "parts" in broken.name
    if variant is FUSED:
        for dims in ((96, 64), (96, 80), (64, 96)):
            changes = {"IN_PARTS": True, "V_APART": False, "REDUCE": "vector"}
            config = {**space.default(specified(*dims), 90), **changes}
            assert space.broken(config, specified(*dims), 90).name == "parts_are_of_both_head_dims"
        for change in ({"REDUCE": "tma"}, {"num_warps": 8, "ORDER": "together"}):
            config = {**space.default(specified(96, 96), 90), **change}
            assert space.broken(config, specified(96, 96), 90).name == "parts_are_added_apart"


def test_sums_that_no_part_has_are_neither_zeroed_nor_read() -> None:
    """The kernels before and after are told how many columns are used; where there is one part, nothing, and all are."""
    for dim, used in ((96, 96), (80, 80), (72, 80), (128, None)):
        spec = specified(dim, dim)
        before, after = compiler.around(FUSED, spec, FUSED.space.default(spec, 90), 90)
        for variant, config in (*before, *after):
            assert config.get("USED_COLUMNS") == used, variant.name
            assert compiler.constexprs(variant, spec, config)["USED_COLUMNS"] == (used or 128)
