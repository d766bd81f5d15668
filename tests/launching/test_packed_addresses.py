"""Packed calls of the kernels in Gluon, launched as they would be and run by Python (tests/kernels_in_python.py): whatever the
lengths are, no byte outside the tensors and no row of two sequences at once is touched, every row of the results is written
once, and no warp waits for ever."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gpu_in_python import ELEMENTS, PythonGpu
from kernel_values import Buffer, Fault

from fa2tune.compiling import registry
from fa2tune.compiling.choice import Choice
from fa2tune.launching import launch, passes
from fa2tune.search_spaces.sm90 import bwd_fused, fwd_grouped
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Problem

#: Rows of q and of k.
PACKINGS = {
    "mixed": ((1, 1), (0, 0), (200, 200), (63, 63), (64, 64), (129, 129), (0, 0)),
    "unequal": ((5, 300), (0, 40), (260, 130), (70, 0), (1, 200), (65, 63)),
    "many": tuple((1 + n % 5, 1 + n % 7) for n in range(14)),
    "one": ((300, 300),),
    "none": ((0, 0),),
}
SPARE = 40  #: rows behind the last sequence
FUSED, SPLIT = ("bwd_fused",), ("bwd_dq", "bwd_dkdv")


class World(PythonGpu):
    """Memory of a packed call."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, lengths: Any, starts: Any = None, spare: int = SPARE, arch: int = 90
    ) -> None:
        """``starts``: of the sequences, where they are not those of the lengths; ``arch``: whose kernels run, sm90's or
        sm80's."""
        super().__init__(monkeypatch, arch=arch)
        sides = list(zip(*lengths, strict=True))
        self.rows = [sum(side) + spare for side in sides]
        self.starts = starts or [[0, *np.cumsum(side).tolist()] for side in sides]
        self.right = starts is None
        self.rows_of: dict[str, Any] = {}  #: tensor -> row of each of its elements, -1: none

    def place_tensor(self, name: str, tensor: torch.Tensor) -> int:
        """A tensor (1, heads, rows, dim) of any strides."""
        _, heads, rows, dim = tensor.shape
        _, of_head, of_row, _ = tensor.stride()
        count = 1 + (heads - 1) * of_head + (rows - 1) * of_row + dim - 1
        found = np.full(count, -1, np.int32)
        for head in range(heads):
            for row in range(rows):
                first = head * of_head + row * of_row
                found[first : first + dim] = row
        self.rows_of[name] = found
        return self.place(name, count, tensor.element_size(), dtype=ELEMENTS[tensor.element_size()])

    def seen(self, kind: str, buffer: Buffer, elements: Any) -> None:
        if buffer.name not in self.rows_of:
            return
        rows = self.rows_of[buffer.name][elements]
        if (rows < 0).any():
            raise Fault(f"{kind} touches what lies between the rows of {buffer.name}")
        ends = self.starts["k" in buffer.name or "v" in buffer.name]
        if self.right and np.unique(np.searchsorted(ends, rows, "right")).size > 1:
            raise Fault(f"{kind} touches rows {rows.min()} to {rows.max()} of {buffer.name}: of two sequences")


def tensor_of(rows: int, heads: int, dim: int, order: str = "rows") -> torch.Tensor:
    """(1, heads, rows, dim) without memory: "rows": [rows, heads, dim]; "concatenated": a third of such rows; "heads": a head
    after the other; "expanded": one head for all."""
    if order == "heads":
        return torch.empty(1, heads, rows, dim, dtype=torch.bfloat16, device="meta")
    if order == "expanded":
        return (
            torch.empty(rows, 1, dim, dtype=torch.bfloat16, device="meta")
            .expand(rows, heads, dim)
            .transpose(0, 1)[None]
        )
    wide = 3 if order == "concatenated" else 1
    made = torch.empty(rows, wide * heads, dim, dtype=torch.bfloat16, device="meta")
    return made[:, :heads].transpose(0, 1)[None]


def suited(kernel: str, problem: Problem, settings: Mapping[str, Any], arch: int) -> Any:
    """The config of a kernel of an architecture with these settings, as far as it has such dimensions."""
    if "MEMBERS" in settings:
        return grouped_config(problem, settings)
    variant = registry.variant_named(f"sm{arch}/{kernel}")
    own = {name: value for name, value in settings.items() if name in variant.space.dimensions}
    config = variant.suited(problem, {**variant.space.default(problem.specialization, arch), **own})
    if variant.space.broken(config, problem.specialization, arch):  # no form of these head dims
        config = variant.suited(problem, variant.space.default(problem.specialization, arch))
    return config


def planned(
    world: World, kernels: Sequence[str], tensors: Mapping[str, torch.Tensor], mask: Mask, settings: Any, **more: Any
) -> Any:
    """(the plan, an address for each tensor and behind them that of the workspaces, which lie apart; the configs)."""
    q, k, v = (tensors[name] for name in "qkv")
    backward = {name: tensors[name] for name in ("o", "do") if name in tensors and "do" in tensors}
    extent = Extent(RAGGED, len(world.starts[0]) - 1)
    problem = passes.describe(q, k, v, mask, 0.125, extent=extent, **backward)
    configs = {kernel: suited(kernel, problem, settings, world.arch) for kernel in kernels}
    shared = {"delta": (tuple(q.shape[:3]), "fp32")} if "bwd_dq" in kernels else {}
    plan = passes.Kernels(configs, problem, tensors, 0.125, 0, shared, **more)
    addresses = []
    for name, tensor in tensors.items():
        if tensor.dim() == 4:
            addresses.append(world.place_tensor(name, tensor))
        else:
            side = name.endswith("_k")
            words = np.array(world.starts[side], np.int64) if name.startswith("cu_") else None
            addresses.append(world.place(name, tensor.numel(), 4, words))
    return plan, [*addresses, world.place_workspaces()], configs


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *given, **more: World(monkeypatch, *given, **more)


def written(world: World, name: str) -> Any:
    """How often each element of a tensor was, without what lies between its rows."""
    buffer = next(one for one in world.buffers.values() if one.name == name)
    owned = world.rows_of[name] >= 0 if name in world.rows_of else slice(None)
    return buffer.written[owned]


def offsets(world: World) -> dict[str, torch.Tensor]:
    return {
        f"cu_seqlens_{side}": torch.empty(len(starts), dtype=torch.int32, device="meta")
        for side, starts in zip("qk", world.starts, strict=True)
    }


def forward(world: World, mask: Mask, settings: Any, heads: Any, dims: Any, order: str = "rows") -> None:
    q, k = tensor_of(world.rows[0], heads[0], dims[0], order), tensor_of(world.rows[1], heads[1], dims[0], order)
    v = tensor_of(world.rows[1], heads[1], dims[1], order)
    o = passes.empty_ordered(q, dims[1])
    lse = torch.empty(heads[0], world.rows[0], device="meta")
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, **offsets(world)}
    plan, addresses, _ = planned(world, ["fwd"], tensors, mask, settings)
    world.run(plan, addresses)
    if world.right:
        assert (written(world, "o") == 1).all() and (written(world, "lse") == 1).all()


def grouped_config(problem: Problem, settings: Mapping[str, Any]) -> Choice:
    """Of the forward whose tiles have several query heads."""
    tile = settings["BLOCK_M"], settings["BLOCK_N"]
    if tile not in fwd_grouped.tiles(problem.specialization, 90):
        tile = 128, 64
    config = fwd_grouped.config_of(problem.specialization, *tile, settings["MEMBERS"])
    return Choice(registry.variant_named("sm90/fwd_grouped"), config)


def backward(
    world: World, mask: Mask, settings: Any, heads: Any, dims: Any, order: str = "rows", parts: int = 1,
    kernels: Sequence[str] = FUSED,
) -> Any:  # fmt: skip
    """The configs, by kernel."""
    q, k = tensor_of(world.rows[0], heads[0], dims[0], order), tensor_of(world.rows[1], heads[1], dims[0], order)
    v, do = tensor_of(world.rows[1], heads[1], dims[1], order), tensor_of(world.rows[0], heads[0], dims[1], order)
    o = passes.empty_ordered(q, dims[1])
    dq, dk, dv = (passes.empty_ordered(one, one.shape[3]) for one in (q, k, v))
    lse = torch.empty(1, heads[0], world.rows[0], device="meta")
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **offsets(world)}
    plan, addresses, configs = planned(world, kernels, tensors, mask, settings, parts={kernels[-1]: parts})
    world.run(plan, addresses)
    if world.right:
        for name in ("dq", "dk", "dv"):
            assert (written(world, name) == 1).all(), name
        if configs.get("bwd_fused", {}).get("FINISH_BESIDE"):
            check_counts(world, heads)
    return configs


def check_counts(world: World, heads: Any) -> None:
    """Of each sequence and head as many tiles as it has keys for, where its rows start in the workspaces."""
    lengths = [[b - a for a, b in itertools.pairwise(side)] for side in world.starts]
    sequences, chunk = len(lengths[0]), bwd_fused.CHUNK
    chunks = world.rows[0] // chunk + sequences + 1
    flags = next(
        b for b in world.buffers.values() if b.words is not None and len(b.words) == heads[0] * (2 * chunks + 2)
    )
    assert (flags.words[: heads[0] * chunks] == 1).all()
    every = flags.words[heads[0] * chunks : 2 * heads[0] * chunks].reshape(heads[0], chunks)
    expected = np.zeros_like(every)
    for number, (first, keys) in enumerate(
        zip(world.starts[0], (*lengths[1], world.rows[1] - world.starts[1][-1]), strict=True)
    ):
        expected[:, first // chunk + number] = -(-keys // (bwd_fused.GROUPS * bwd_fused.KEYS))
    assert (every == expected).all()


FORWARDS = {
    "two groups": (128, {}), "a second Q": (128, {"Q_STAGES": 2}), "heads in bands": (128, {"HEADS_PER_WAVE": 4}),
    "one group": (64, {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3, "PINGPONG": False, "NUMBERED": False, "maxnreg": 80,
                       "Q_IN_REGISTERS": True}),
    "three groups": (64, {}), "256": (256, {}), "96": (96, {}),
}  # fmt: skip
TOGETHER = {"ORDER": "together"}
CONCATENATED = {**TOGETHER, "BLOCK_M": 64, "num_warps": 8, "EXPONENTIALS_FIRST": False}
BESIDE = {"BESIDE": True, "FINISH_BESIDE": True}
BACKWARDS: dict[str, dict[str, Any]] = {
    "a block behind": {}, "apart, by TMA": {**TOGETHER, "REDUCE": "tma"}, "from registers": {"REDUCE": "vector"},
    "scores ahead": {"ORDER": "ahead", "REDUCE": "vector", "EXPONENTIALS_FIRST": False},
    "concatenated": {**CONCATENATED, "REDUCE": "vector"}, "prepared overlapped": {"BESIDE": True},
    "and finished": {**TOGETHER, **BESIDE, "REDUCE": "tma"},
    "concatenated, and finished": {**CONCATENATED, **BESIDE, "REDUCE": "tma"},
    "longer first": {"LONGER_FIRST": True}, "concatenated, longer first, each started early": {
        **CONCATENATED, "REDUCE": "vector", "LONGER_FIRST": True, "EARLY_START": True},
}  # fmt: skip
#: Head dims, and what of the configs of either kernel differs from the defaults.
SPLITS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "two groups": ((128, 128), {}), "three groups, and keys": ((64, 64), {}), "products": ((256, 256), {}),
    "two parts": ((192, 192), {}), "a part more of K": ((192, 128), {}), "heads in turn": ((128, 128), {"HEADS_PER_WAVE": 1}),
    "96": ((96, 96), {}), "stages": ((64, 64), {"GROUPS": 2, "K_STAGES": 3, "STAGES": 2}),
    "one tile of P": ((192, 64), {"OWN": "products", "P_STAGES": 1}),
}  # fmt: skip
MASKS = (
    CAUSAL, FULL, band(65, 0), band(20, 30), band(-1, 30), Mask("chunked", 64), Mask("chunked", 7), Mask("causal_top_left"),
)  # fmt: skip


@pytest.mark.parametrize(("form", "packing"), list(zip(FORWARDS, itertools.cycle(PACKINGS))))
def test_forms_of_the_forward(worlds: Any, form: str, packing: str) -> None:
    dim, settings = FORWARDS[form]
    forward(worlds(PACKINGS[packing]), CAUSAL, settings, (3, 1), (dim, dim))


#: Tiles of several query heads: heads, rows and keys of a tile, its members.
GROUPED = [
    ((8, 2), (128, 64), 4), ((6, 2), (64, 64), 4), ((7, 1), (128, 128), 2), ((20, 1), (64, 64), 16), ((4, 2), (128, 64), 32),
]  # fmt: skip


@pytest.mark.parametrize("order", ["rows", "concatenated", "heads", "expanded"])
@pytest.mark.parametrize(("form", "packing"), list(zip(GROUPED, itertools.cycle(PACKINGS))), ids=str)
def test_tiles_of_several_heads(worlds: Any, form: Any, packing: str, order: str) -> None:
    heads, (rows, keys), members = form
    settings = {"BLOCK_M": rows, "BLOCK_N": keys, "MEMBERS": members}
    for mask, dims in ((CAUSAL, (64, 64)), (band(7, 0), (96, 96))):
        forward(worlds(PACKINGS[packing]), mask, settings, heads, dims, order)


@pytest.mark.parametrize("seed", range(8))
def test_any_tiles_of_several_heads(worlds: Any, seed: int) -> None:
    """Offsets against the rules among them."""
    draw = random.Random(seed)
    world, (heads, (rows, keys), members) = worlds(*drawn(draw)), draw.choice(GROUPED)
    dims = draw.choice(((64, 64), (192, 128), (72, 40), (160, 160)))
    settings = {"BLOCK_M": rows, "BLOCK_N": keys, "MEMBERS": members}
    forward(
        world, draw.choice(MASKS), settings, heads, dims, draw.choice(("rows", "concatenated", "heads", "expanded"))
    )


@pytest.mark.parametrize(("form", "packing"), list(zip(BACKWARDS, itertools.cycle(PACKINGS))))
def test_forms_of_the_backward(worlds: Any, form: str, packing: str) -> None:
    backward(worlds(PACKINGS[packing]), CAUSAL, BACKWARDS[form], (2, 1), (128, 128))


@pytest.mark.parametrize(("form", "packing"), list(zip(BACKWARDS, itertools.cycle(PACKINGS))))
@pytest.mark.parametrize("dim", [96, 72])
def test_forms_of_the_backward_in_parts(worlds: Any, form: str, packing: str, dim: int) -> None:
    """As far as parts have them: others stay what they are."""
    settings = {**BACKWARDS[form], "REDUCE": "vector", "num_warps": 4, "IN_PARTS": True}
    configs = backward(worlds(PACKINGS[packing]), CAUSAL, settings, (2, 1), (dim, dim))
    assert configs["bwd_fused"]["IN_PARTS"]


@pytest.mark.parametrize(
    ("packing", "heads", "dim", "parts", "form"),
    [("one", (4, 2), 64, 2, "a block behind"), ("mixed", (2, 1), 64, 2, "a block behind"),
     ("unequal", (8, 2), 128, 4, "and finished"), ("many", (4, 2), 128, 2, "concatenated, and finished"),
     ("mixed", (6, 2), 128, 3, "prepared overlapped"), ("none", (4, 2), 64, 2, "from registers")],
)  # fmt: skip
@pytest.mark.parametrize("band", [1, 32])
def test_parts_of_a_group(worlds: Any, packing: str, heads: Any, dim: int, parts: int, form: str, band: int) -> None:
    settings = {**BACKWARDS[form], "HEADS_PER_WAVE": band}
    backward(worlds(PACKINGS[packing]), CAUSAL, settings, heads, (dim, dim), parts=parts)


@pytest.mark.parametrize(("form", "packing"), list(zip(SPLITS, itertools.cycle(PACKINGS))))
def test_forms_of_the_split_backward(worlds: Any, form: str, packing: str) -> None:
    dims, settings = SPLITS[form]
    configs = backward(worlds(PACKINGS[packing]), CAUSAL, settings, (3, 1), dims, kernels=SPLIT)
    assert settings.items() <= {**configs["bwd_dq"], **configs["bwd_dkdv"]}.items()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks_of_the_split_backward(worlds: Any, mask: Mask) -> None:
    backward(worlds(PACKINGS["unequal"]), mask, {}, (2, 1), (64, 64), kernels=SPLIT)


@pytest.mark.parametrize("packing", ["one", "mixed"])
def test_parts_of_a_group_in_the_split_backward(worlds: Any, packing: str) -> None:
    heads = {"one": (4, 2), "mixed": (2, 1)}[packing]
    backward(worlds(PACKINGS[packing]), CAUSAL, {}, heads, (64, 64), parts=2, kernels=SPLIT)


def drawn(draw: random.Random) -> tuple[Any, Any, int]:
    """Lengths, offsets that are none of theirs or None, and spare rows."""
    some = [[draw.choice((0, 1, 64, 128, draw.randrange(200))) for _ in "qk"] for _ in range(draw.randrange(1, 7))]
    lengths = [(queries, queries if draw.random() < 0.5 else keys) for queries, keys in some]
    spare = draw.choice((1, 40, 200))
    totals = [sum(side) + spare for side in zip(*lengths, strict=True)]
    wrong = [[draw.choice((0, total, -5, 2**31 - 1, draw.randrange(total))) for _ in (*lengths, 0)] for total in totals]
    return lengths, wrong if draw.random() < 0.3 else None, spare


@pytest.mark.parametrize("seed", range(8))
def test_anything(worlds: Any, seed: int) -> None:
    """Lengths, offsets against the rules, masks, groups, and how rows lie in memory."""
    draw = random.Random(seed)
    world = worlds(*drawn(draw))
    mask, heads = draw.choice(MASKS), draw.choice(((1, 1), (4, 1), (6, 2), (5, 5), (8, 2)))
    order = draw.choice(("rows", "concatenated", "heads", "expanded"))
    if seed % 2:
        settings = {**draw.choice(list(BACKWARDS.values())), "HEADS_PER_WAVE": draw.choice((1, 4, 32))}
        dim = draw.choice((40, 64, 96, 128))
        backward(world, mask, settings, heads, (dim, dim), order)
    else:
        dim, settings = draw.choice([FORWARDS[form] for form in ("two groups", "one group", "three groups", "256")])
        dims = draw.choice(((128, 128), (192, 128), (72, 40))) if dim == 128 else (dim, dim)
        forward(world, mask, {**settings, "HEADS_PER_WAVE": draw.choice((0, 4, 64))}, heads, dims, order)


@pytest.mark.parametrize("seed", range(8))
def test_anything_by_mma_sync(worlds: Any, seed: int) -> None:
    draw = random.Random(seed)
    world = worlds(*drawn(draw), arch=80)
    mask, heads = draw.choice(MASKS), draw.choice(((1, 1), (4, 1), (6, 2), (5, 5)))
    dims = draw.choice(((64, 64), (128, 128), (192, 128), (72, 40)))
    order = draw.choice(("rows", "concatenated", "heads", "expanded"))
    settings = {"HEADS_PER_WAVE": draw.choice((1, 4, 16)), "SCHEDULE": draw.choice(("fa2", "double"))}
    if seed % 2:
        backward(world, mask, settings, heads, dims, order)
    else:
        forward(world, mask, settings, heads, dims, order)


@pytest.mark.parametrize("starts", [([290, 300], [0, 300]), ([0, 300], [290, 300]), ([300, 0], [300, 0])], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    ("kernels", "arch"), [(("fwd",), 90), (FUSED, 90), (SPLIT, 90), (("fwd",), 80), (FUSED, 80)], ids=str
)
def test_first_sequences_that_begin_late(
    worlds: Any, kernels: Sequence[str], arch: int, mask: Mask, starts: tuple[list[int], list[int]]
) -> None:
    """Tiles before the first sequence have numbers below 0."""
    world = worlds(((290, 290),), starts, 10, arch=arch)
    if kernels == ("fwd",):
        forward(world, mask, {}, (1, 1), (64, 64))
    else:
        backward(world, mask, {"REDUCE": "vector"}, (1, 1), (64, 64), kernels=kernels)


@pytest.mark.parametrize("starts", [[-5, 100, 40000, 300], [300, 20, 290, 0], [0, 2**31 - 1, 5, 130]], ids=str)
@pytest.mark.parametrize("form", ["longer first", "concatenated, longer first, each started early"])
def test_tiles_of_an_order_by_wrong_offsets(worlds: Any, starts: list[int], form: str) -> None:
    """There are more tiles than places, or places that nothing was written to."""
    for sides in ([starts, starts], [[0, 100, 200, 290], starts], [starts, [0, 100, 200, 290]]):
        backward(worlds(((90, 90), (100, 100), (100, 100)), sides, 10), CAUSAL, BACKWARDS[form], (2, 1), (64, 64))


@pytest.mark.parametrize("seed", range(8))
def test_anything_split(worlds: Any, seed: int) -> None:
    draw = random.Random(seed)
    world = worlds(*drawn(draw))
    mask, heads = draw.choice(MASKS), draw.choice(((1, 1), (4, 1), (6, 2), (5, 5), (8, 2)))
    dims, settings = draw.choice([*SPLITS.values(), ((72, 40), {}), ((40, 40), {})])
    order = draw.choice(("rows", "concatenated", "heads", "expanded"))
    backward(world, mask, {**settings, "HEADS_PER_WAVE": draw.choice((1, 4, 64))}, heads, dims, order, kernels=SPLIT)


@pytest.mark.parametrize("wrong", ["a row too many", "no rows back", "other units", "a member too many"])
def test_a_wrong_map_of_several_heads_is_found(worlds: Any, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    made = launch._by_member

    def by_member(*given: Any) -> Any:
        sizes, steps = made(*given)
        sizes[2] += wrong == "a row too many"
        sizes[3] += wrong == "a member too many"
        steps[0] += steps[2] if wrong == "no rows back" else 0
        steps[1] *= 2 if wrong == "other units" else 1
        return sizes, steps

    world = worlds(PACKINGS["mixed"])
    monkeypatch.setattr(launch, "_by_member", by_member)
    settings = {"BLOCK_M": 128, "BLOCK_N": 64, "MEMBERS": 4}
    with pytest.raises((Fault, AssertionError), match=r"two sequences|touches|all\(\)"):
        forward(world, CAUSAL, settings, (3, 1), (64, 64), "concatenated")


@pytest.mark.parametrize("kernels", [("fwd",), SPLIT], ids=str)
@pytest.mark.parametrize("wrong", ["a row too many", "no rows back", "heads for rows"])
def test_a_wrong_map_is_found(worlds: Any, monkeypatch: pytest.MonkeyPatch, wrong: str, kernels: Sequence[str]) -> None:
    made = launch._addressed

    def addressed(*given: Any) -> Any:
        sizes, steps = made(*given)
        if len(sizes) == 5 and wrong == "a row too many":
            sizes[3] += 1
        elif len(sizes) == 5 and wrong == "no rows back":
            steps[0] += steps[1]
        elif len(sizes) == 5:
            steps[1], steps[2] = steps[2], steps[1]
        return sizes, steps

    world = worlds(PACKINGS["mixed"])
    monkeypatch.setattr(launch, "_addressed", addressed)
    with pytest.raises(Fault, match="two sequences" if wrong == "a row too many" else "touches"):
        if kernels == SPLIT:
            backward(world, CAUSAL, {}, (2, 1), (128, 128), kernels=SPLIT)
        else:
            forward(world, CAUSAL, {}, (2, 1), (128, 128))
