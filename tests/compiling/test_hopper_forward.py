"""The warp-specialised forward without a GPU: its barriers, its branch and its loops, read off its machine code; and what it
may take for a row's maximum, in float32 arithmetic that rounds P as it does."""

from __future__ import annotations

import math
import re
import subprocess
from collections import Counter
from typing import Any

import pytest
import torch
import triton

from fa2tune import gpus
from fa2tune.compiling import compiler, limits, registry, sass
from fa2tune.measuring import reference, verify
from fa2tune.search_spaces.portable import fwd_norms
from fa2tune.search_spaces.sm90 import fwd as space
from fa2tune.spec.extent import DENSE, RAGGED
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem, Specialization, head_dim_parts, padded_head_dim

VARIANT = registry.variant_named("sm90/fwd")
PRODUCER_THREADS, GROUP_THREADS = 32, 128
TRITONS_BARRIERS = 7  #: its own are 0, 1, and one a partition, of which there are four at the most


def built(dim: int, causal: bool, extent: str = DENSE, **changes: Any) -> tuple[dict[str, Any], str]:
    """(config, machine code) of the default with changes."""
    spec = Specialization("bf16", dim, dim, "causal" if causal else "full", extent=extent)
    config = {**VARIANT.space.default(spec, 90), **changes}
    assert limits.before_compile(VARIANT, spec, config, gpus.named("h200")) is None
    path = compiler.build(VARIANT, spec, config, 90).cubin_path
    command = [compiler.tool("nvdisasm"), "--print-code", "--no-dataflow", path]
    return config, subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_chunks_spill_no_more_than_a_window(dim: int) -> None:
    spills = {}
    for mask in ("band", "chunked"):
        spec = Specialization("bf16", dim, dim, mask)
        config = VARIANT.space.default(spec, 90)
        assert limits.before_compile(VARIANT, spec, config, gpus.named("h200")) is None
        spills[mask] = compiler.build(VARIANT, spec, config, 90).spills
    assert spills["chunked"] <= spills["band"] < 32


def barriers(code: str) -> set[tuple[str, str, int]]:
    """(SYNC or ARV, which, threads) of each named barrier."""
    found = re.findall(r"BAR\.(SYNC|ARV)\S* (\w+), (0x[0-9a-f]+)", code)
    return {(how, name, int(threads, 16)) for how, name, threads in found}


def numbers(code: str, name: str, threads: int) -> set[int]:
    """Those of a barrier. Under Triton 3.8 two partitions end in the same code, which has its barrier's number in a register:
    what was last put there before each way to it."""
    if not name.startswith("R"):
        return {int(name, 16)}
    [block] = re.findall(rf"^\.(L_x_\d+):\n(?:(?!\.L_x).*\n)*?.*BAR\.SYNC\S* {name}, {threads:#x} ", code, re.MULTILINE)
    ways = re.finditer(rf"BRA `\(\.{block}\)|^\.{block}:", code, re.MULTILINE)
    put = [re.findall(rf"/\s+(?:@\S+ +)?(\S+ {name}, .*?) ;", code[: way.start()])[-1] for way in ways]
    moved = [re.fullmatch(rf"(?:IMAD\.)?MOV\S* {name}, (?:RZ, RZ, )?(0x[0-9a-f]+)", one) for one in put]
    assert all(moved), put
    return {int(one[1], 16) for one in moved if one}


@pytest.mark.parametrize("numbered", VARIANT.space.dimensions["NUMBERED"])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_which_warps_meet_at_numbered_barriers(dim: int, turns: bool, numbered: bool) -> None:
    """Two groups in turn, and all of them with the producer: at the last ones, since Triton takes the first. What is come to
    is met, and the other way round."""
    config, code = built(dim, True, PINGPONG=turns, NUMBERED=numbered)
    groups = config["BLOCK_M"] // 64
    in_turn, handing_back = 2 * GROUP_THREADS, groups * GROUP_THREADS + PRODUCER_THREADS
    found = barriers(code)
    for kind in ("SYNC", "ARV"):
        mine = {int(name, 16) for how, name, threads in found if how == kind and threads == in_turn}
        assert mine == (set(range(13, 13 + groups)) if turns else set())
        assert any(how == kind and threads == handing_back for how, _, threads in found) == numbered
    others = {(name, threads) for _, name, threads in found if threads not in (in_turn, handing_back)}
    assert max(set().union(*(numbers(code, *other) for other in others))) < TRITONS_BARRIERS


@pytest.mark.parametrize(
    ("heads", "lengths", "rescale"),
    [
        ((16, 16), (16384, 16384), "never"), ((16, 16), (512, 512), "never"), ((32, 4), (2, 2), "never"),
        ((16, 16), (1, 16384), "lazy"), ((32, 4), (1, 1), "lazy"), ((16, 16), (1023, 16384), "lazy"),
        ((16, 16), (1024, 16384), "never"),
        ((32, 4), (127, 16384), "lazy"), ((32, 4), (128, 16384), "never"),  # of eight heads on one of K
    ],
)  # fmt: skip
def test_few_queries_take_no_pass_over_many_keys(
    heads: tuple[int, int], lengths: tuple[int, int], rescale: str
) -> None:
    problem = Problem("bf16", 1, *heads, *lengths, 128, 128, FULL)
    config = {**VARIANT.space.default(problem.specialization, 90), "RESCALE": "never"}
    assert VARIANT.suited(problem, config) == {**config, "RESCALE": rescale}
    for other in ("lazy", "now"):
        assert VARIANT.suited(problem, {**config, "RESCALE": other}) == {**config, "RESCALE": other}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_what_few_queries_take_is_legal(dim: int, causal: bool) -> None:
    decoding = Problem("bf16", 1, 16, 16, 1, 16384, dim, dim, CAUSAL if causal else FULL)
    spec, h200 = decoding.specialization, gpus.named("h200")
    legal = [
        config for config in VARIANT.space.points()
        if config["RESCALE"] == "never" and limits.before_compile(VARIANT, spec, config, h200) is None
    ]  # fmt: skip
    assert legal
    for config in legal:
        assert limits.before_compile(VARIANT, spec, VARIANT.suited(decoding, config), h200) is None


#: As shipped: three programs share a multiprocessor.
THREE = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "STAGES": 3,
    "Q_STAGES": 2,
    "PINGPONG": False,
    "Q_IN_REGISTERS": True,
    "maxnreg": 80,
}


@pytest.mark.parametrize("numbered", VARIANT.space.dimensions["NUMBERED"])
@pytest.mark.parametrize(("dim", "changes"), [(128, {}), (64, {}), (64, THREE)], ids=["128", "64", "three programs"])
def test_what_no_warp_waits_at_keeps_its_memory(dim: int, changes: dict[str, Any], numbered: bool) -> None:
    """Triton gives the memory of an mbarrier that is only initialised to others, over whose values it may be written back
    later. So those that named barriers stand in for are invalidated behind the partitions."""
    config, code = built(dim, True, **changes, NUMBERED=numbered)
    initialised = re.findall(r"SYNCS\.EXCH\.64 \w+, \[UR\d+(?:\+(0x[0-9a-f]+))?\]", code)
    of_q, of_k_and_v = 2 * config["Q_STAGES"] * config["BLOCK_M"] // 64, 4 * config["STAGES"]
    assert len(initialised) == of_q + of_k_and_v
    assert len(re.findall(r"SYNCS\.CCTL\.IV", code)) == (of_k_and_v // 2 if numbered else 0)
    # what the partitions are handed is stored at addresses known by now
    stored = re.findall(r"STS\S* \[UR\d+\+(0x[0-9a-f]+)\]", code)
    assert stored
    assert not {int(at or "0", 16) // 8 for at in initialised} & {int(at, 16) // 8 for at in stored}


def test_a_group_that_need_not_multiply_o_waits_for_no_other() -> None:
    """RESCALE "lazy": each warp votes for itself, so the loop has no barrier of the group that it has not without."""
    meetings = {}
    for rescale in ("now", "lazy"):
        config, code = built(128, False, RESCALE=rescale)
        meetings[rescale] = min(loop.meetings for loop in sass.loops(code) if loop.mufu >= config["BLOCK_N"] // 2)
        assert bool(re.search(r"\bVOTE\.ANY", code)) == (rescale == "lazy")
    assert meetings["lazy"] <= meetings["now"]


@pytest.mark.parametrize("dim", [64, 128])
def test_no_division_holds_up_the_products_that_end_a_tile(dim: int) -> None:
    """With two Q tiles and no mask: where Q K^T and P V are issued together, which is in the main loop and where a tile ends,
    nothing works out the next tile."""
    config, code = built(dim, False)
    assert config["Q_STAGES"] == 2
    opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)", code, re.MULTILINE)
    issued = re.findall(r"WARPGROUP\.ARRIVE.*?WARPGROUP\.DEPBAR", " ".join(opcodes))
    products = [stretch.count("HGMMA") for stretch in issued]
    both = [stretch for stretch, count in zip(issued, products, strict=True) if count > min(products)]
    assert len(both) == 2 * config["BLOCK_M"] // 64
    assert "I2F.RP" in opcodes and not any("I2F.RP" in stretch for stretch in both)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bounded_scores_want_no_maxima(dim: int, causal: bool) -> None:
    """RESCALE "never": a main loop has one FFMA, one exponential and one addition a score, without the exchange of maxima, and
    there is another for scores that are not bounded. (Of all groups but one the loops may not be told apart.)"""
    config, code = built(dim, causal, RESCALE="never")
    scores = config["BLOCK_N"] // 2  # of a thread
    loops = [loop for loop in sass.loops(code) if scores <= loop.mufu < 2 * scores]
    spare = [loop for loop in loops if loop.mufu == scores]
    assert spare
    assert {loop.shuffles for loop in spare} == {0} and max(loop.ffma for loop in spare) == scores
    usual = [loop for loop in loops if loop.mufu > scores and loop.issue <= min(one.issue for one in loops) * 1.6]
    assert len(usual) >= len(spare)
    assert max(loop.issue for loop in spare) < 0.95 * min(loop.issue for loop in usual)


@pytest.mark.parametrize("rescale", ["lazy", "never"])
@pytest.mark.parametrize(
    "settings", [{}, {"BLOCK_N": 64, "STAGES": 3, "NUMBERED": False, "Q_IN_REGISTERS": True}], ids=str
)
def test_loops_over_packed_sequences_are_those_of_dense_calls(settings: dict[str, Any], rescale: str) -> None:
    """Of three groups, which have the fewest registers: nothing is spilled, nor is P moved about (``repack``)."""
    found = []
    for extent in (DENSE, RAGGED):
        config, code = built(64, True, extent, RESCALE=rescale, **settings)
        scores = config["BLOCK_N"] // 2  # of a thread
        loops = [loop for loop in sass.loops(code) if scores <= loop.mufu < 2 * scores]
        assert {loop.local_bytes for loop in loops} == {0}
        found.append(sorted(loop.issue for loop in loops))
    assert len(found[0]) == len(found[1]) == (9 if rescale == "never" else 6)
    assert all(packed <= dense + 4 for dense, packed in zip(*found, strict=True))


#: Head dims of Q and V -> the parts that they are computed in.
PARTS = {
    (96, 96): ((64, 32), (64, 32)), (72, 72): ((64, 16), (64, 16)), (40, 40): ((32, 16), (32, 16)),
    (160, 160): ((128, 32), (128, 32)), (192, 128): ((128, 64), (128, 0)), (128, 80): ((128, 0), (64, 16)),
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", PARTS, ids=str)
def test_a_head_dim_in_two_parts_multiplies_their_columns_alone(dims: tuple[int, int], causal: bool) -> None:
    """Each wgmma takes 16 of the summed dimension: of a block of keys, D / 16 of BLOCK_N columns, BLOCK_N / 16 of DV columns.
    The loops spill nothing, and what is in shared memory is what the search space says."""
    spec = Specialization("bf16", *dims, "causal" if causal else "full")
    config = VARIANT.space.default(spec, 90)
    assert limits.before_compile(VARIANT, spec, config, gpus.named("h200")) is None
    binary = compiler.build(VARIANT, spec, config, 90)
    command = [compiler.tool("nvdisasm"), "--print-code", "--no-dataflow", binary.cubin_path]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = Counter(map(int, re.findall(r"HGMMA\.64x(\d+)x16", code)))
    (d, rest), (dv, rest_v) = PARTS[dims]
    rows, groups = config["BLOCK_N"], config["BLOCK_M"] // 64
    loops = 2 if causal else 1  # with a mask and without
    expected = Counter(
        {rows: groups * (1 + loops) * (d + rest) // 16}
    )  # the first block's scores stand before the loops
    for columns in filter(None, (dv, rest_v)):
        expected[columns] += groups * (loops + 1) * rows // 16
    if config["Q_STAGES"] == 2:
        expected[rows] += groups * (d + rest) // 16  # the next tile's
    assert found == expected
    assert all(loop.local_bytes == 0 for loop in sass.loops(code) if rows // 2 <= loop.mufu < rows)
    estimated = space._shared_bytes(config, spec, config["STAGES"], config["O_THROUGH"])
    assert estimated - 1024 <= binary.shared_bytes <= estimated


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [*PARTS, (192, 192), (144, 144), (80, 80), (96, 64), (256, 192)], ids=str)
def test_a_row_of_the_padded_head_dims_is_legal_in_parts(dims: tuple[int, int], causal: bool) -> None:
    """Whatever was tuned for a tile of whole columns, with what fits beside smaller ones."""
    h200, mask = gpus.named("h200"), "causal" if causal else "full"
    whole = Specialization("bf16", padded_head_dim(dims[0]), padded_head_dim(dims[1]), mask)
    asked = Specialization("bf16", *dims, mask)
    legal = [c for c in VARIANT.space.points() if limits.before_compile(VARIANT, whole, c, h200) is None]
    assert legal
    for config in legal:
        assert VARIANT.fitted(whole, config) == config
        found = VARIANT.fitted(asked, config)
        assert limits.before_compile(VARIANT, asked, found, h200) is None, (config, found)
        changed = {name for name in config if config[name] != found[name]}
        assert {"IN_PARTS"} <= changed <= {"IN_PARTS", "STAGES", "O_THROUGH", "BLOCK_N", "Q_STAGES"}
        assert found["STAGES"] * found["BLOCK_N"] >= config["STAGES"] * config["BLOCK_N"]
        assert found["Q_STAGES"] >= config["Q_STAGES"]


@pytest.mark.parametrize(
    ("dims", "chosen"),
    [
        ((192, 128), (128, 2, 1, "halves")), ((160, 160), (128, 2, 1, "q")), ((144, 144), (128, 2, 1, "own")),
        ((192, 192), (64, 2, 1, "own")), ((96, 96), (128, 3, 2, "own")), ((80, 80), (128, 3, 2, "own")),
        ((40, 40), (128, 3, 1, "own")), ((128, 128), (128, 2, 1, "own")), ((256, 256), (64, 2, 1, "halves")),
    ],
    ids=str,
)  # fmt: skip
def test_parts_take_the_room_that_padded_columns_lack(dims: tuple[int, int], chosen: tuple[int, int, int, str]) -> None:
    """128 keys a block, else a second Q beside three stages; 40, padded to 64, had room for it, so Q_STAGES stays."""
    config = VARIANT.space.default(Specialization("bf16", *dims, "causal"), 90)
    assert tuple(config[name] for name in ("BLOCK_N", "STAGES", "Q_STAGES", "O_THROUGH")) == chosen
    shared = {**config, "BLOCK_M": 64, "BLOCK_N": 64, "maxnreg": 128, "STAGES": 2, "Q_STAGES": 1, "O_THROUGH": "own"}
    found = VARIANT.fitted(Specialization("bf16", *dims, "causal"), shared)
    assert (found["BLOCK_N"], found["Q_STAGES"]) == (64, 1)  # another program has the rest of the room


def test_what_the_parts_of_head_dims_are() -> None:
    """Powers of two that cover it, the second of 16 or more; one, where two would be as wide."""
    for dim in range(16, 257, 8):
        first, rest = head_dim_parts(dim)
        assert dim <= first + rest <= padded_head_dim(dim) and (rest == 0 or 16 <= rest < first)
        assert all(part & (part - 1) == 0 for part in (first, rest))
        assert (first + rest == padded_head_dim(dim)) == (rest == 0)
    found = {dim: head_dim_parts(dim) for dim in (24, 40, 48, 56, 72, 80, 96, 112, 144, 160, 192, 224)}
    assert found == {
        24: (32, 0), 40: (32, 16), 48: (32, 16), 56: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 112: (128, 0),
        144: (128, 16), 160: (128, 32), 192: (128, 64), 224: (256, 0),
    }  # fmt: skip


@pytest.mark.parametrize("numbered", [False, True])
def test_a_mask_costs_the_loop_without_one_nothing(numbered: bool) -> None:
    """Head dim 64 by three groups, which leaves 160 registers a thread: P, carried from the masked loop to the next, is neither
    spilled nor put together there. (As 16-bit values it was, under Triton 3.6: 331 to 403 instructions for 300.)"""
    issue = {}
    for causal in (False, True):
        changes = {"BLOCK_M": 192, "BLOCK_N": 128, "RESCALE": "never", "Q_STAGES": 1, "PINGPONG": True}
        config, code = built(64, causal, NUMBERED=numbered, **changes)
        loops = [loop for loop in sass.loops(code) if loop.mufu == config["BLOCK_N"] // 2]
        # under Triton 3.8 a word of two groups is written and read in a trip; P has 32 words
        most = 0 if triton.__version__.startswith("3.6.") else 2 * 128
        assert loops and max(loop.local_bytes for loop in loops) <= most
        issue[causal] = max(loop.issue for loop in loops)
    assert issue[True] < 1.08 * issue[False]


def bounded(inputs: reference.Inputs, headroom: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(o and lse as RESCALE "never" has them, how far each row's bound lies above the highest score of its last 128 keys, as a
    power of two)."""
    q, k, v = (tensor.float() for tensor in (inputs.q, inputs.k, inputs.v))
    scale = q.shape[-1] ** -0.5 / math.log(2)
    scores = q @ k.transpose(2, 3) * scale
    norm_q, norm_k = (t.square().sum(-1).clamp(min=fwd_norms.SMALLEST).sqrt() for t in (q, k))
    bound = norm_q * norm_k.amax(-1, keepdim=True) * scale
    peak = (bound - headroom)[..., None]
    weights = torch.exp2(scores - peak)
    weights = weights.where(weights >= 2.0**-126, 0.0)  # as ex2.approx.ftz
    total = weights.sum(-1, keepdim=True)
    o = weights.to(inputs.q.dtype).float() @ v / total
    lse = (peak + total.log2()).squeeze(-1) * math.log(2)
    return {"o": o.to(inputs.q.dtype), "lse": lse}, bound - scores[..., -128:].amax(-1)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_loosest_bound_keeps_the_error_rule(dtype: str, dim: int) -> None:
    loosest, headroom = (space.LOOSEST, 0.0) if dtype == "bf16" else (space.LOOSEST_FP16, space.HEADROOM_FP16)
    drawn = reference.make_inputs(Problem(dtype, 1, 2, 2, 128, 2048, dim, dim, FULL), "cpu")
    _, above = bounded(drawn, headroom)
    factor = loosest / above.max().item()  # q as long as the rule lets it be
    inputs = reference.Inputs((drawn.q * factor).to(drawn.q.dtype), drawn.k, drawn.v, drawn.do)
    found, above = bounded(inputs, headroom)
    assert 0.95 * loosest < above.max() < 1.05 * loosest
    oracle, same = reference.oracle_and_reference(inputs, mask=FULL, softmax_scale=None, gradients=False)
    verify.compare(found, oracle, same)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("keys", "below"), [(4096, 12.5), (16384, 14.55), (16384, 15.2), (16384, 16.5)])
def test_the_loosest_bound_keeps_long_tails(dtype: str, keys: int, below: float) -> None:
    """One key has a row's maximum, all the others lie so many powers of two lower, and one that is orthogonal to the row and
    long makes the bound as loose as it may be."""
    loosest, headroom = (space.LOOSEST, 0.0) if dtype == "bf16" else (space.LOOSEST_FP16, space.HEADROOM_FP16)
    dim, highest = 64, 30.0
    drawn = reference.make_inputs(Problem(dtype, 1, 1, 1, 64, keys, dim, dim, FULL), "cpu")
    unit = math.log(2) * dim**0.5  # of a product, for a score of one power of two
    q, k = torch.zeros(1, 1, 64, dim), torch.zeros(1, 1, keys, dim)
    q[..., 0] = unit
    k[..., 0] = highest - below
    k[..., -1, 0] = highest
    k[..., 0, :2] = torch.tensor([0.0, highest + 0.98 * loosest])
    # values of one sign: what the tail loses does not cancel
    inputs = reference.Inputs(q.to(drawn.q.dtype), k.to(drawn.q.dtype), drawn.v.abs(), drawn.do)
    found, above = bounded(inputs, headroom)
    assert 0.9 * loosest < above.max() <= loosest
    oracle, same = reference.oracle_and_reference(inputs, mask=FULL, softmax_scale=None, gradients=False)
    verify.compare(found, oracle, same)


def test_the_headroom_of_fp16_is_finite() -> None:
    assert torch.finfo(torch.float16).max > 1.9 * 2.0**space.HEADROOM_FP16
