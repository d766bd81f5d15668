"""What the kernels of kernels/sm90 and kernels/sm80 compute, run by Python (tests/kernels_in_python.py), beside float64
attention with gradients: dense and packed, in the forms that a config can ask for. Results are poisoned with NaN, as is what
lies between packed sequences."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import kernels_in_python
import pytest
import torch
from gpu_in_python import PythonGpu

from fa2tune.calling.schedules import few_tiles, packed_schedule
from fa2tune.compiling import registry
from fa2tune.compiling.choice import Choice
from fa2tune.launching import passes
from fa2tune.measuring import reference
from fa2tune.search_spaces.sm90 import fwd
from fa2tune.spec.extent import RAGGED, WHOLE, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.score import NONE, Score

SCALE = 0.125
#: Of a result's largest element: float16 has 11 bits, and P, dS and results are rounded to it.
LARGEST_ERROR = 4e-3


class Call(NamedTuple):
    """``lengths``: of a dense call one pair for all batch entries; of a packed one a pair a sequence."""

    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    dims: tuple[int, int]
    mask: Mask
    packed: bool = False
    batch: int = 1
    spare: int = 9  #: rows behind the last sequence
    score: Score = NONE
    softmax_scale: float = SCALE

    def __str__(self) -> str:
        return f"{self.dims[0]}-{self.mask}"

    @property
    def rows(self) -> tuple[int, int]:
        sides = list(zip(*self.lengths, strict=True))
        return tuple(sum(side) + (self.spare if self.packed else 0) for side in sides)  # type: ignore[return-value]

    def places(self) -> list[tuple[int, slice, slice]]:
        """(batch entry, rows of q, rows of k) of every softmax."""
        if not self.packed:
            (whole,) = self.lengths
            return [(b, slice(0, whole[0]), slice(0, whole[1])) for b in range(self.batch)]
        ends = [list(itertools.accumulate(side)) for side in zip(*self.lengths, strict=True)]
        return [
            (0, slice(q_end - q, q_end), slice(k_end - k, k_end))
            for (q, k), q_end, k_end in zip(self.lengths, *ends, strict=True)
        ]


def inputs(call: Call, seed: int) -> dict[str, torch.Tensor]:
    """q, k, v, do of float16; NaN where no sequence is."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (call.heads[0], call.rows[0], call.dims[0]), "k": (call.heads[1], call.rows[1], call.dims[0]),
        "v": (call.heads[1], call.rows[1], call.dims[1]), "do": (call.heads[0], call.rows[0], call.dims[1]),
    }  # fmt: skip
    found = {}
    for name, shape in shapes.items():
        made = torch.full((call.batch, *shape), torch.nan, dtype=torch.float16)
        for b, queries, keys in call.places():
            rows = queries if name in ("q", "do") else keys
            made[b, :, rows] = torch.randn(made[b, :, rows].shape, generator=draw).half()
        found[name] = made
    return found


def gradient_of_lse(call: Call) -> torch.Tensor:
    """(batch, heads, rows) float32; NaN where no sequence is."""
    draw = torch.Generator().manual_seed(1)
    found = torch.full((call.batch, call.heads[0], call.rows[0]), torch.nan)
    for b, queries, _ in call.places():
        found[b, :, queries] = torch.randn(found[b, :, queries].shape, generator=draw)
    return found


def wanted(call: Call, given: dict[str, torch.Tensor], dlse: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """o, lse, dq, dk, dv in float64; 0, and -inf of lse, where no sequence is. ``dlse``: the gradient of lse, None: there is
    none."""
    q, k, v, do = (given[name].double() for name in ("q", "k", "v", "do"))
    found = {"o": torch.zeros_like(do), "lse": torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)}
    found |= {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    for number, (b, queries, keys) in enumerate(call.places()):
        leaves = [t[b : b + 1, :, rows].clone().requires_grad_() for t, rows in ((q, queries), (k, keys), (v, keys))]
        options = {"mask": call.mask, "softmax_scale": call.softmax_scale, "score": call.score}
        o, lse = reference.attention(*leaves, **options, sequence=number)  # type: ignore[arg-type]
        found["o"][b, :, queries], found["lse"][b, :, queries] = o[0].detach(), lse[0].detach()
        loss = (o * do[b : b + 1, :, queries]).sum()
        if dlse is not None:
            loss = loss + (lse * dlse[b : b + 1, :, queries])[lse.isfinite()].sum()
        gradients = torch.autograd.grad(loss, leaves)
        for name, rows, gradient in zip(("dq", "dk", "dv"), (queries, keys, keys), gradients, strict=True):
            found[name][b, :, rows] = gradient[0]
    return found


def computed(
    gpu: PythonGpu, call: Call, kernel: str, tensors: dict[str, torch.Tensor], settings: dict[str, Any], parts: int = 1
) -> None:
    """``kernel``: "sm90/fwd", ...; several with commas, one after the other. ``parts``: of the query groups in "bwd_fused"."""
    extent = Extent(RAGGED, len(call.lengths)) if call.packed else WHOLE
    backward = {name: tensors[name] for name in ("o", "do") if name in tensors and "do" in tensors}
    q, k, v = (tensors[name] for name in "qkv")
    problem = passes.describe(q, k, v, call.mask, call.softmax_scale, call.score, extent, **backward)
    chosen = {}
    for name in kernel.split(","):
        variant = registry.variant_named(name)
        asked = {dimension: value for dimension, value in settings.items() if dimension in variant.space.dimensions}
        whole = {"KEYS_APART": False} if "P_THROUGH" in asked else {}  # of a default, for another form
        config = variant.suited(problem, {**variant.space.default(problem.specialization, gpu.arch), **whole, **asked})
        config = {**config, **asked}  # what suits longer sequences alone
        broken = variant.space.broken(config, problem.specialization, gpu.arch)
        assert broken is None or broken.name == "dp_has_range"  # dP is small here, and bfloat16 would hide faults
        assert all(config[dimension] == value for dimension, value in asked.items())
        chosen[variant.serves or "bwd_fused"] = Choice(variant, config)
    shared = {"delta": (tuple(q.shape[:3]), "fp32")} if "bwd_dq" in chosen else {}
    plan = passes.Kernels(
        chosen, problem, tensors, call.softmax_scale, 0, shared, {"bwd_fused": parts} if parts > 1 else {}
    )
    addresses = [gpu.place_values(name, tensor) for name, tensor in tensors.items()]
    gpu.run(plan, [*addresses, gpu.place_workspaces()])


def offsets(call: Call) -> dict[str, torch.Tensor]:
    if not call.packed:
        return {}
    sides = zip("qk", zip(*call.lengths, strict=True), strict=True)
    return {
        f"cu_seqlens_{side}": torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32) for side, rows in sides
    }


def unset(like: torch.Tensor, dim: int) -> torch.Tensor:
    return passes.empty_ordered(like, dim).fill_(torch.nan)


def compare(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        expected = right[name].reshape(tensor.shape)
        infinite = expected.isinf()
        assert torch.equal(tensor[infinite].double(), expected[infinite]), name
        error = (tensor.double() - expected)[~infinite].abs().max().item()
        assert error <= LARGEST_ERROR * max(1.0, expected[~infinite].abs().max().item()), (name, error)


def check_bits_beside(
    call: Call,
    forward: Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]],
    scales: tuple[float, ...] = (1.0, float("nan")),
) -> None:
    """Every second sequence has the same bits of (o, lse) whatever the others hold: their values times each of ``scales``."""
    found = []
    for others in scales:
        given = inputs(call, 0)
        for _, queries, keys in call.places()[::2]:
            given["q"][:, :, queries] *= others
            given["k"][:, :, keys] *= others
            given["v"][:, :, keys] *= others
        o, lse = forward(given)
        own = [queries for _, queries, _ in call.places()[1::2]]
        found.append([torch.cat([o[0, :, rows].flatten(), lse[0, :, rows].flatten()]) for rows in own])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def check_forward(gpu: PythonGpu, call: Call, settings: dict[str, Any], kernel: str = "sm90/fwd") -> None:
    given = inputs(call, 0)
    q, k, v = (given[name] for name in "qkv")
    lse = torch.full(q.shape[1:3] if call.packed else q.shape[:3], torch.nan)
    tensors = {"q": q, "k": k, "v": v, "o": unset(q, call.dims[1]), "lse": lse, **offsets(call)}
    computed(gpu, call, kernel, tensors, settings)
    compare({"o": tensors["o"], "lse": lse}, wanted(call, given))


def check_backward(
    gpu: PythonGpu,
    call: Call,
    settings: dict[str, Any],
    kernel: str = "sm90/bwd_fused",
    parts: int = 1,
    through_lse: bool = False,
) -> None:
    given = inputs(call, 0)
    dlse = gradient_of_lse(call) if through_lse else None
    right = wanted(call, given, dlse)
    q, k, v, do = (given[name] for name in ("q", "k", "v", "do"))
    o, lse = unset(q, call.dims[1]), right["lse"].float()
    o.copy_(right["o"])
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse}
    gradients = {"dq": unset(q, call.dims[0]), "dk": unset(k, call.dims[0]), "dv": unset(v, call.dims[1])}
    added = {} if dlse is None else {"dlse": dlse}
    computed(gpu, call, kernel, {**tensors, **gradients, **added, **offsets(call)}, settings, parts)
    compare(gradients, right)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PythonGpu:
    return PythonGpu(monkeypatch, values=True)


ONE_GROUP = {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3, "PINGPONG": False, "NUMBERED": False, "maxnreg": 80,
             "Q_IN_REGISTERS": True}  # fmt: skip
SMALL_TILES = {**ONE_GROUP, "maxnreg": 128, "STAGES": 2}  # two programs a multiprocessor
TWO_Q_TILES = {"BLOCK_M": 128, "BLOCK_N": 128, "Q_STAGES": 2, "PINGPONG": True, "NUMBERED": True, "RESCALE": "lazy",
               "Q_IN_REGISTERS": False}  # fmt: skip
BOUNDED = {"RESCALE": "never"}
TOP_LEFT = Mask("causal_top_left")
PACKING = ((1, 1), (0, 0), (130, 130), (70, 0), (0, 30), (64, 140), (5, 3))
FORWARDS = [
    (Call(((200, 200),), (2, 1), (128, 128), FULL, batch=2), {}),
    (Call(((70, 270),), (4, 2), (128, 128), CAUSAL), {"Q_STAGES": 2}),
    (Call(((260, 140),), (2, 2), (64, 64), CAUSAL), {}),
    (Call(((200, 200),), (2, 1), (64, 64), band(60, 10)), ONE_GROUP),
    (Call(((190, 250),), (1, 1), (128, 128), Mask("chunked", 64)), {}),
    (Call(((260, 140),), (2, 1), (64, 64), TOP_LEFT), TWO_Q_TILES),
    (Call(((140, 260),), (2, 1), (64, 64), TOP_LEFT), TWO_Q_TILES),
    (Call(((130, 130),), (2, 1), (96, 96), CAUSAL), {}),
    (Call(((130, 200),), (1, 1), (192, 128), FULL), {}),
    (Call(((150, 150),), (1, 1), (256, 256), CAUSAL), {}),
    (Call(((300, 420),), (2, 1), (64, 64), CAUSAL), {"Q_STAGES": 1, "BLOCK_M": 192, "BLOCK_N": 64, "STAGES": 3}),
]


#: Head dims, of Q and V, that calls of few tiles have in parts or padded.
FEW_TILES = [((24, 24), FULL), ((64, 64), CAUSAL), ((80, 80), CAUSAL), ((96, 96), FULL), ((160, 160), FULL),
             ((72, 144), CAUSAL), ((104, 80), FULL), ((192, 128), CAUSAL)]  # fmt: skip


def forms_of_few_tiles() -> Iterator[tuple[tuple[int, int], Mask, Config]]:
    for dims, mask in FEW_TILES:
        spec = Specialization("fp16", *dims, mask.name)
        packed = packed_schedule.for_few_tiles(spec, 90)
        for config in [*few_tiles.configs(spec, 90), *([packed] if packed else [])]:
            yield dims, mask, config


@pytest.mark.parametrize(("dims", "mask", "config"), [*forms_of_few_tiles()])
def test_forward_of_few_tiles(gpu: PythonGpu, dims: tuple[int, int], mask: Mask, config: Config) -> None:
    check_forward(gpu, Call(((130, 150),), (2, 1), dims, mask), dict(config))


@pytest.mark.parametrize(("call", "settings"), FORWARDS, ids=str)
def test_forward(gpu: PythonGpu, call: Call, settings: dict[str, Any]) -> None:
    check_forward(gpu, call, settings)


#: A tile, one after the other, of one and of several blocks; rows that see no key; and a mask that passes blocks by.
V_HALVES = [
    (Call(((130, 520),), (2, 1), (192, 192), FULL, batch=2), {}),
    (Call(((300, 300),), (2, 1), (176, 168), CAUSAL), {}),
    (Call(((70, 610),), (1, 1), (184, 184), CAUSAL), {"PINGPONG": False}),
    (Call(((390, 140),), (2, 2), (168, 168), CAUSAL), {"RESCALE": "never"}),
    (Call(((200, 390),), (1, 1), (192, 192), FULL), {"RESCALE": "never"}),
    (Call(((200, 90),), (2, 1), (176, 176), FULL), {"RESCALE": "now"}),
    (Call(((300, 420),), (1, 1), (192, 192), band(150, 20)), {}),
    (Call(((300, 300),), (1, 1), (192, 192), TOP_LEFT), {}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "settings"), V_HALVES, ids=str)
def test_forward_with_v_in_halves(gpu: PythonGpu, call: Call, settings: dict[str, Any]) -> None:
    config = fwd.in_v_halves(Specialization("fp16", *call.dims, call.mask.name))
    assert config is not None and config["V_HALVES"]
    check_forward(gpu, call, {**config, **settings})


@pytest.mark.parametrize(
    ("dim", "mask", "settings"),
    [(128, CAUSAL, {}), (64, FULL, {}), (64, band(40, 0), ONE_GROUP), (128, band(-1, 20), {"Q_STAGES": 2}), (80, CAUSAL, {}),
     (128, Mask("chunked", 64), {}), (64, TOP_LEFT, TWO_Q_TILES),
     (128, CAUSAL, SMALL_TILES), (128, FULL, SMALL_TILES), (64, CAUSAL, BOUNDED), (128, FULL, {**BOUNDED, "Q_STAGES": 2}),
     (64, band(40, 10), ONE_GROUP)],
    ids=str,
)  # fmt: skip
def test_packed_forward(gpu: PythonGpu, dim: int, mask: Mask, settings: dict[str, Any]) -> None:
    check_forward(gpu, Call(PACKING, (2, 1), (dim, dim), mask, packed=True), settings)


@pytest.mark.parametrize("dims", [(96, 96), (128, 128), (80, 80), (192, 128), (64, 64), (16, 48)], ids=str)
@pytest.mark.parametrize("mask", [band(40, 0), CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("heads", [0, 1], ids=["all heads", "one head a band"])
def test_packed_forward_of_few_tiles(gpu: PythonGpu, dims: tuple[int, int], mask: Mask, heads: int) -> None:
    few = packed_schedule.for_few_tiles(Specialization("fp16", *dims, mask.name), 90)
    if few is not None:
        check_forward(gpu, Call(PACKING, (2, 1), dims, mask, packed=True), {**few, "HEADS_PER_WAVE": heads})


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("dims", "settings"),
    [((112, 112), {}), ((104, 40), {"Q_STAGES": 1}), ((168, 168), {"Q_IN_REGISTERS": True}), ((224, 224), {}), ((240, 80), {}),
     ((208, 256), {})],
    ids=str,
)  # fmt: skip
def test_columns_that_no_head_dim_fills(
    gpu: PythonGpu, dims: tuple[int, int], settings: dict[str, Any], packed: bool
) -> None:
    check_forward(gpu, Call(PACKING if packed else ((150, 150),), (2, 1), dims, CAUSAL, packed=packed), settings)


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("settings", [{}, BOUNDED], ids=["maxima", "bounds"])
def test_what_is_packed_with_a_sequence_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, mask: Mask, settings: dict[str, Any]
) -> None:
    """Not the bound of its scores either, whatever the norms of other sequences' keys, and whether these are numbers."""
    call = Call(PACKING, (2, 1), (64, 64), mask, packed=True)

    def forward(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (given[name] for name in "qkv")
        lse = torch.full(q.shape[1:3], torch.nan)
        tensors = {"q": q, "k": k, "v": v, "o": unset(q, 64), "lse": lse, **offsets(call)}
        computed(PythonGpu(monkeypatch, values=True), call, "sm90/fwd", tensors, settings)
        return tensors["o"], lse[None]

    check_bits_beside(call, forward, (1.0, 9.0, float("nan")))


TOGETHER = {"ORDER": "together"}
CONCATENATED = {**TOGETHER, "BLOCK_M": 64, "num_warps": 8, "EXPONENTIALS_FIRST": False}
BESIDE = {"BESIDE": True, "FINISH_BESIDE": True}
BACKWARDS: dict[str, dict[str, Any]] = {
    "a block behind": {}, "apart, by TMA": {**TOGETHER, "REDUCE": "tma"}, "from registers": {"REDUCE": "vector"},
    "scores ahead": {"ORDER": "ahead", "REDUCE": "vector", "EXPONENTIALS_FIRST": False},
    "concatenated": {**CONCATENATED, "REDUCE": "vector"}, "prepared overlapped": {"BESIDE": True},
    "and finished": {**TOGETHER, **BESIDE, "REDUCE": "tma"},
}  # fmt: skip
MASKS = (CAUSAL, FULL, band(40, 10), Mask("chunked", 64))


@pytest.mark.parametrize(("form", "mask"), list(zip(BACKWARDS, itertools.cycle(MASKS))), ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_backward(gpu: PythonGpu, form: str, mask: Mask, packed: bool) -> None:
    lengths = PACKING if packed else ((130, 150),)
    check_backward(gpu, Call(lengths, (2, 1), (128, 128), mask, packed=packed), BACKWARDS[form])


@pytest.mark.parametrize(("dim", "packed"), [(64, False), (64, True), (96, False), (96, True)])
def test_head_dims_of_the_backward(gpu: PythonGpu, dim: int, packed: bool) -> None:
    lengths = PACKING if packed else ((140, 140),)
    check_backward(gpu, Call(lengths, (2, 2), (dim, dim), CAUSAL, packed=packed), {})


#: Of head dims in two parts: form, head dim, blocks of 64 or 128 queries.
IN_PARTS = [
    ("from registers", 96, 64, CAUSAL), ("scores ahead", 80, 64, FULL), ("together", 96, 64, band(40, 10)),
    ("all overlapped", 96, 64, CAUSAL), ("from registers", 72, 64, Mask("chunked", 64)), ("from registers", 48, 128, FULL),
    ("together", 40, 128, CAUSAL), ("scores ahead", 96, 64, band(-1, 20)),
]  # fmt: skip


@pytest.mark.parametrize(("form", "dim", "rows", "mask"), IN_PARTS, ids=str)
def test_packed_backward_in_parts(gpu: PythonGpu, form: str, dim: int, rows: int, mask: Mask) -> None:
    forms = {**BACKWARDS, "together": {**TOGETHER}, "all overlapped": {**TOGETHER, **BESIDE}}
    settings = {**forms[form], "REDUCE": "vector", "BLOCK_M": rows, "IN_PARTS": True}
    check_backward(gpu, Call(PACKING, (2, 1), (dim, dim), mask, packed=True), settings)


#: V and dO in parts of their own: form, head dims.
V_APART = [
    ("from registers", (96, 64), CAUSAL), ("a block behind", (96, 64), FULL), ("scores ahead", (64, 96), band(40, 10)),
    ("from registers", (120, 16), CAUSAL), ("scores ahead", (16, 128), FULL), ("from registers", (40, 72), CAUSAL),
    ("a block behind", (88, 72), Mask("chunked", 64)), ("from registers", (32, 96), band(-1, 20)),
    ("scores ahead", (72, 40), CAUSAL),
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("form", "dims", "mask"), V_APART, ids=str)
def test_fused_backward_with_v_apart(
    gpu: PythonGpu, form: str, dims: tuple[int, int], mask: Mask, packed: bool
) -> None:
    settings = {**BACKWARDS[form], "REDUCE": "vector", "BLOCK_M": 64, "IN_PARTS": True, "V_APART": True, "num_warps": 4}
    lengths = PACKING if packed else ((150, 200),)
    check_backward(gpu, Call(lengths, (2, 1), dims, mask, packed=packed), settings)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("heads", "parts"), [((4, 2), 2), ((3, 1), 3)], ids=str)
def test_query_groups_in_parts_with_v_apart(gpu: PythonGpu, heads: tuple[int, int], parts: int, packed: bool) -> None:
    lengths = PACKING if packed else ((130, 150),)
    check_backward(gpu, Call(lengths, heads, (96, 64), CAUSAL, packed=packed), {}, parts=parts)


NARROW_CALLS = [
    (Call(((140, 140),), (2, 1), (32, 32), CAUSAL), "a block behind"),
    (Call(((150, 130),), (4, 2), (24, 24), FULL, batch=2), "a block behind"),
    (Call(((130, 270),), (2, 1), (16, 16), CAUSAL), "scores ahead"),
    (Call(((300, 260),), (3, 1), (32, 24), band(40, 10)), "scores ahead"),
    (Call(((140, 140),), (2, 2), (32, 32), FULL), "apart, by TMA"),
    (Call(((130, 150),), (2, 1), (24, 32), CAUSAL), "concatenated"),
    (Call(((260, 130),), (1, 1), (16, 32), band(-1, 20)), "from registers"),
    (Call(((140, 300),), (4, 1), (32, 32), CAUSAL), "and finished"),
    (Call(((200, 200),), (2, 2), (32, 32), Mask("chunked", 64)), "prepared overlapped"),
    (Call(PACKING, (2, 1), (32, 32), CAUSAL, packed=True), "a block behind"),
    (Call(PACKING, (2, 2), (16, 16), FULL, packed=True), "scores ahead"),
    (Call(PACKING, (2, 1), (24, 24), CAUSAL, packed=True), "concatenated"),
    (Call(PACKING, (2, 1), (32, 32), FULL, packed=True), "and finished"),
]
#: What BACKWARDS leaves to the default of head dim 128, which is not that of 32.
BEHIND = {"ORDER": "behind", "REDUCE": "vector"}


@pytest.mark.parametrize(("call", "form"), NARROW_CALLS, ids=str)
def test_backward_of_32_columns(gpu: PythonGpu, call: Call, form: str) -> None:
    check_backward(gpu, call, {**BEHIND, **BACKWARDS[form], "NARROW": True})


@pytest.mark.parametrize("order", ["behind", "ahead"])
@pytest.mark.parametrize("lengths", [((600, 300),), PACKING], ids=["dense", "packed"])
def test_backward_of_32_columns_in_three_stages(
    gpu: PythonGpu, order: str, lengths: tuple[tuple[int, int], ...]
) -> None:
    call = Call(lengths, (2, 1), (32, 32), CAUSAL, packed=len(lengths) > 1)
    check_backward(gpu, call, {"ORDER": order, "REDUCE": "vector", "NARROW": True, "STAGES": 3})


@pytest.mark.parametrize(("heads", "packed"), [((4, 1), False), ((6, 2), False), ((4, 2), True)], ids=str)
def test_backward_of_32_columns_with_groups_in_parts(gpu: PythonGpu, heads: tuple[int, int], packed: bool) -> None:
    call = Call(PACKING if packed else ((130, 150),), heads, (32, 32), CAUSAL, packed=packed)
    check_backward(gpu, call, {"NARROW": True}, parts=heads[0] // heads[1])


@pytest.mark.parametrize(
    ("heads", "dim", "parts", "form"),
    [((4, 2), 128, 2, "a block behind"), ((6, 1), 64, 3, "a block behind"), ((4, 2), 128, 2, "and finished"),
     ((4, 1), 128, 4, "concatenated"), ((4, 2), 96, 2, "from registers")],
    ids=str,
)  # fmt: skip
def test_packed_backward_with_groups_in_parts(
    gpu: PythonGpu, heads: tuple[int, int], dim: int, parts: int, form: str
) -> None:
    """With one key head its K and V are found by a stride of 0, else they are written once per part."""
    check_backward(gpu, Call(PACKING, heads, (dim, dim), CAUSAL, packed=True), BACKWARDS[form], parts=parts)


SPLIT = [
    (Call(((130, 200),), (4, 2), (128, 128), CAUSAL), {}),
    (Call(((150, 100),), (2, 1), (64, 64), FULL, batch=2), {}),
    (Call(((140, 140),), (1, 1), (128, 128), band(40, 10)), {}),
    (Call(((130, 130),), (1, 1), (256, 256), Mask("chunked", 64)), {}),
    (Call(((100, 130),), (1, 1), (192, 128), CAUSAL), {}),
]


@pytest.mark.parametrize(("call", "settings"), SPLIT, ids=str)
def test_split_backward(gpu: PythonGpu, call: Call, settings: dict[str, Any]) -> None:
    check_backward(gpu, call, settings, "sm90/bwd_dq,sm90/bwd_dkdv")


@pytest.mark.parametrize(
    ("dims", "mask", "heads"),
    [((128, 128), CAUSAL, (4, 2)), ((64, 64), FULL, (2, 1)), ((64, 64), TOP_LEFT, (1, 1)), ((128, 128), band(40, 10), (2, 1)),
     ((256, 256), CAUSAL, (2, 1)), ((256, 256), band(-1, 20), (1, 1)), ((256, 256), Mask("chunked", 64), (1, 1)),
     ((192, 192), FULL, (1, 1)), ((192, 128), CAUSAL, (2, 2)), ((64, 64), band(50, 0), (3, 1))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("through_lse", [False, True], ids=["", "through lse"])
def test_packed_split_backward(
    gpu: PythonGpu, dims: tuple[int, int], mask: Mask, heads: tuple[int, int], through_lse: bool
) -> None:
    call = Call(PACKING, heads, dims, mask, packed=True)
    check_backward(gpu, call, {}, "sm90/bwd_dq,sm90/bwd_dkdv", through_lse=through_lse)


THROUGH_REGISTERS = {"P_THROUGH": "registers", "SCORE_WARPS": 1, "KEY_WARPS": 4, "num_warps": 4, "QUERY_WARPS": 2}


ONE = {"P_THROUGH": "one", "EARLY": False}
BY_MMA_SYNC = [
    (Call(((130, 200),), (4, 2), (64, 64), CAUSAL), THROUGH_REGISTERS),
    (Call(((100, 230),), (2, 1), (96, 96), FULL), {}),
    (Call(((150, 150),), (1, 1), (128, 128), band(40, 10)), {}),
    (Call(((90, 200),), (2, 1), (128, 64), CAUSAL), ONE),
    (Call(((70, 100),), (1, 1), (192, 128), CAUSAL), {}),
    (Call(((90, 140),), (1, 1), (16, 128), FULL), {}),
]


PACKED_BY_MMA_SYNC = [
    (Call(PACKING, (2, 1), (64, 64), CAUSAL, packed=True), THROUGH_REGISTERS),
    (Call(PACKING, (2, 1), (128, 128), FULL, packed=True), {}),
    (Call(PACKING, (2, 2), (96, 64), band(40, 10), packed=True), {}),
    (Call(PACKING, (4, 2), (128, 128), CAUSAL, packed=True), {}),
    (Call(PACKING, (1, 1), (64, 64), Mask("chunked", 48), packed=True), {}),
    (Call(PACKING, (1, 1), (64, 64), Mask("causal_top_left"), packed=True), {}),
]


@pytest.mark.parametrize(("schedule", "sums"), [("fa2", "first"), ("double", "mma"), ("double", "add")])
@pytest.mark.parametrize("call", [call for call, _ in BY_MMA_SYNC + PACKED_BY_MMA_SYNC], ids=str)
def test_forward_by_mma_sync(monkeypatch: pytest.MonkeyPatch, call: Call, schedule: str, sums: str) -> None:
    check_forward(PythonGpu(monkeypatch, values=True, arch=80), call, {"SCHEDULE": schedule, "SUMS": sums}, "sm80/fwd")


#: Columns of Q in registers: head dims, of which some are left, or none; or less than a step of padding.
HELD_COLUMNS = [((128, 128), 32, CAUSAL), ((96, 96), 96, FULL), ((96, 64), 64, band(40, 10)), ((72, 72), 64, CAUSAL)]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("schedule", ["fa2", "double"])
@pytest.mark.parametrize(("dims", "held", "mask"), HELD_COLUMNS, ids=str)
def test_forward_with_columns_of_q_in_registers(
    monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], held: int, mask: Mask, schedule: str, packed: bool
) -> None:
    call = Call(PACKING if packed else ((150, 170),), (2, 1), dims, mask, packed=packed)
    changes = {"BLOCK_N": 32, "SCHEDULE": schedule, "Q_IN_REGISTERS": False, "Q_HELD": held}
    check_forward(PythonGpu(monkeypatch, values=True, arch=80), call, changes, "sm80/fwd")


def test_forward_of_wide_heads_in_99_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of compute capability 8.6, 8.9 and 12.0, which nothing has raced."""
    call = Call(((150, 100),), (2, 1), (256, 256), CAUSAL)
    config = dict(registry.variant_named("sm80/fwd").space.default(Specialization("bf16", 256, 256, "causal"), 89))
    changes = {name: config[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps", "SCHEDULE", "SUMS", "Q_IN_REGISTERS")}
    assert changes["num_warps"] == 8
    check_forward(PythonGpu(monkeypatch, values=True, arch=80), call, changes, "sm80/fwd")


#: Warps that share a row of O: head dims of Q and V, mask.
SHARED_ROWS = [
    (256, 256, CAUSAL), (256, 256, band(40, 10)), (192, 192, FULL), (192, 128, CAUSAL), (128, 256, Mask("chunked", 64)),
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("schedule", "sums", "held"), [("fa2", "first", True), ("double", "mma", True), ("fa2", "add", False)]
)
@pytest.mark.parametrize(("dim", "dim_v", "mask"), SHARED_ROWS, ids=str)
def test_forward_whose_warps_share_rows(
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    dim_v: int,
    mask: Mask,
    schedule: str,
    sums: str,
    held: bool,
    packed: bool,
) -> None:
    call = Call(PACKING if packed else ((150, 170),), (2, 1), (dim, dim_v), mask, packed=packed)
    changes = {
        "BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "SCHEDULE": schedule, "SUMS": sums, "Q_IN_REGISTERS": held,
        "O_IN_HALVES": True,
    }  # fmt: skip
    check_forward(PythonGpu(monkeypatch, values=True, arch=80), call, changes, "sm80/fwd")


@pytest.mark.parametrize("through_lse", [False, True])
@pytest.mark.parametrize(("call", "settings"), PACKED_BY_MMA_SYNC, ids=str)
def test_packed_backward_by_mma_sync(
    monkeypatch: pytest.MonkeyPatch, call: Call, settings: dict[str, Any], through_lse: bool
) -> None:
    gpu = PythonGpu(monkeypatch, values=True, arch=80)
    check_backward(gpu, call, settings, "sm80/bwd_fused", through_lse=through_lse)


@pytest.mark.parametrize("parts", [2, 4])
def test_packed_backward_by_mma_sync_of_parts_of_groups(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    call = Call(PACKING, (4, 1), (64, 64), CAUSAL, packed=True)
    check_backward(PythonGpu(monkeypatch, values=True, arch=80), call, {}, "sm80/bwd_fused", parts=parts)


#: V in registers; two products at the same time, each by half of the warps.
HELD = {"V_IN_REGISTERS": True, "BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 8, "SCORE_WARPS": 2, "KEY_WARPS": 2}
APART = {"P_THROUGH": "shared", "BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "SCORE_WARPS": 4, "KEY_WARPS": 2}
HELD_TRANSPOSED = {**THROUGH_REGISTERS, "V_IN_REGISTERS": True, "BLOCK_M": 32, "BLOCK_N": 64}
HELD_OR_APART = [
    (Call(((70, 140),), (2, 1), (256, 256), CAUSAL), HELD),
    (Call(((140, 70),), (1, 1), (192, 192), FULL), {**HELD, "P_THROUGH": "shared", "KEYS_APART": True}),
    (Call(((90, 140),), (2, 1), (96, 96), band(40, 10)), {**HELD, **ONE, "BLOCK_M": 64}),
    (Call(((100, 130),), (2, 2), (64, 128), Mask("chunked", 48)), HELD_TRANSPOSED),
    (Call(PACKING, (2, 1), (192, 128), CAUSAL, packed=True), HELD),
    (Call(PACKING, (2, 2), (64, 64), FULL, packed=True), HELD_TRANSPOSED),
    (Call(((70, 140),), (2, 1), (256, 256), CAUSAL), {**APART, "SCORES_APART": True, "KEYS_APART": True}),
    (Call(((140, 70),), (1, 1), (192, 192), FULL), {**APART, "SCORES_APART": True, "KEYS_APART": True}),
    (Call(((140, 70),), (1, 1), (128, 128), FULL), {**APART, "BLOCK_N": 128, "SCORES_APART": True}),
    (Call(((90, 140),), (2, 1), (96, 96), band(40, 10)), {**APART, "SCORES_APART": True, "KEYS_APART": True}),
    (Call(((100, 130),), (2, 2), (128, 128), Mask("chunked", 48)), {**APART, "SCORES_APART": True}),
    (Call(((100, 130),), (2, 2), (96, 96), CAUSAL), {**APART, "KEYS_APART": True}),
    (Call(PACKING, (2, 1), (256, 256), CAUSAL, packed=True), {**APART, "SCORES_APART": True, "KEYS_APART": True}),
    (Call(PACKING, (2, 1), (128, 128), FULL, packed=True), {**APART, "KEYS_APART": True}),
]  # fmt: skip


@pytest.mark.parametrize("kernel", ["bwd_fused", "bwd_ordered"])
@pytest.mark.parametrize(("call", "settings"), HELD_OR_APART, ids=str)
def test_backward_with_v_in_registers_or_products_apart(
    monkeypatch: pytest.MonkeyPatch, kernel: str, call: Call, settings: dict[str, Any]
) -> None:
    gpu = PythonGpu(monkeypatch, values=True, arch=80)
    if kernel == "bwd_ordered":
        if call.packed:
            return
        settings = {**settings, "DQ_BUFFERS": 2}
    check_backward(gpu, call, settings, f"sm80/{kernel}")


@pytest.mark.parametrize("kernel", ["bwd_fused", "bwd_ordered"])
@pytest.mark.parametrize(("call", "settings"), BY_MMA_SYNC, ids=str)
def test_backward_by_mma_sync(
    monkeypatch: pytest.MonkeyPatch, kernel: str, call: Call, settings: dict[str, Any]
) -> None:
    gpu = PythonGpu(monkeypatch, values=True, arch=80)
    if kernel == "bwd_ordered":
        settings = {**settings, "DQ_BUFFERS": 2}
    check_backward(gpu, call, settings, f"sm80/{kernel}")


def _late(left: int, deps: Any) -> Any:
    """A wait for products that takes longer than to load the next block."""
    time.sleep(0.2)
    return kernels_in_python._awaited(left, deps)


@pytest.mark.parametrize(
    ("instead", "settings"),
    [
        ({"shrunk": lambda acc, *_: acc}, {"RESCALE": "now"}),
        ({"await_room": lambda *_: None, "warpgroup_mma_wait": _late}, {"NUMBERED": False}),
    ],
)
def test_a_fault_is_found(
    gpu: PythonGpu, monkeypatch: pytest.MonkeyPatch, instead: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Sums that are not multiplied where a row's reference is raised; K and V that overwrite what is still read."""
    call = Call(((64, 500),), (1, 1), (128, 128), FULL)
    check_forward(gpu, call, settings)
    monkeypatch.setattr(kernels_in_python, "_NAMES", {**kernels_in_python._NAMES, **instead})
    monkeypatch.setattr(kernels_in_python, "_MODULES", {})
    monkeypatch.setattr(kernels_in_python, "PATIENCE", 2)
    gpu.bound.clear()
    with pytest.raises(AssertionError, match=r"'o', |deadlock|mbarrier"):
        check_forward(gpu, call, settings)
