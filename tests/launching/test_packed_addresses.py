"""Packed calls of the Hopper kernels, launched as they would be and run by Python (tests/kernels_in_python.py): whatever the
lengths are, no byte outside the tensors and no row of two sequences at once is touched, every row of the results is written
once, and no warp waits for ever."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import kernels_in_python
import numpy as np
import pytest
import torch
import triton.language as tl
from kernel_values import Buffer, Descriptor, Fault, Int, Pointer

from fa2tune.compiling import compiler, registry
from fa2tune.launching import cuda, launch, passes
from fa2tune.launching.image import MapFormat
from fa2tune.search_spaces.sm90 import bwd_fused
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import ITEMSIZE

PROGRAMS = 3  #: multiprocessors of this GPU
GAP = 1 << 24  #: bytes between tensors
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
ELEMENTS = {2: tl.bfloat16, 4: tl.float32}
#: Rows of q and of k.
PACKINGS = {
    "mixed": ((1, 1), (0, 0), (200, 200), (63, 63), (64, 64), (129, 129), (0, 0)),
    "unequal": ((5, 300), (0, 40), (260, 130), (70, 0), (1, 200), (65, 63)),
    "many": tuple((1 + n % 5, 1 + n % 7) for n in range(14)),
    "one": ((300, 300),),
    "none": ((0, 0),),
}
SPARE = 40  #: rows behind the last sequence


class World:
    """A GPU's memory, and what a plan launches there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lengths: Any, starts: Any = None, spare: int = SPARE) -> None:
        """``starts``: of the sequences, where they are not those of the lengths."""
        sides = list(zip(*lengths, strict=True))
        self.rows = [sum(side) + spare for side in sides]
        self.starts = starts or [[0, *np.cumsum(side).tolist()] for side in sides]
        self.right = starts is None
        self.buffers: dict[int, Buffer] = {}
        self.rows_of: dict[str, Any] = {}  #: tensor -> row of each of its elements, -1: none
        self.maps: dict[int, tuple[Any, ...]] = {}
        self.bound: list[tuple[Any, ...]] = []
        self.next = 0x7F00_0000_0000
        monkeypatch.setattr(
            cuda, "library", lambda: SimpleNamespace(cuTensorMapEncodeTiled=self._encode, cuLaunchKernelEx=print)
        )
        monkeypatch.setattr(cuda, "may_start_early", lambda: True)
        monkeypatch.setattr(launch, "load", self._load)
        monkeypatch.setattr(launch, "sm_count", lambda _: PROGRAMS)
        for where in (launch, passes):
            monkeypatch.setattr(where, "arch_of", lambda _: 90)
        made = passes.bind
        monkeypatch.setattr(passes, "bind", lambda *given: self.bound.append(given[:3]) or made(*given))

    def _encode(self, place, _type, rank, address, sizes, strides, block, _steps, *_rest):  # type: ignore[no-untyped-def]
        self.maps[place.value] = address.value, list(sizes)[::-1], list(strides)[: rank - 1][::-1], list(block)[::-1]
        return 0

    @staticmethod
    def _load(variant: Any, spec: Any, config: Any, *_: Any) -> Any:
        config, block = dict(config), compiler.block_of
        formats = [
            MapFormat(0, ITEMSIZE[variant.tensors[name] or spec.dtype], 0, tuple(block(variant, spec, config, name)))
            for name in compiler.described(variant, spec, config)
        ]
        image = SimpleNamespace(
            name="k", maps=formats, warps=4, ctas=1, shared=0, programmatic=False, cooperative=False
        )
        return SimpleNamespace(image=image, kinds=launch.kinds(variant, spec, config), handle=None)

    def place(self, name: str, count: int, itemsize: int, words: Any = None) -> int:
        base = self.next
        self.next += -(-(count * itemsize + GAP) // 512) * 512
        self.buffers[base] = Buffer(name, base, count, itemsize, words)
        return base

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
        return self.place(name, count, tensor.element_size())

    def seen(self, kind: str, buffer: Buffer, elements: Any) -> None:
        if buffer.name not in self.rows_of:
            return
        rows = self.rows_of[buffer.name][elements]
        if (rows < 0).any():
            raise Fault(f"{kind} touches what lies between the rows of {buffer.name}")
        ends = self.starts["k" in buffer.name or "v" in buffer.name]
        if self.right and np.unique(np.searchsorted(ends, rows, "right")).size > 1:
            raise Fault(f"{kind} touches rows {rows.min()} to {rows.max()} of {buffer.name}: of two sequences")

    def run(self, plan: passes.Kernels, addresses: list[int]) -> None:
        for (call, places), (variant, problem, config) in zip(plan.chain.launches, self.bound, strict=True):  # type: ignore[union-attr]
            given = [addresses[which] + behind for which, behind in places]
            _, kept = call.packed(given, 0)
            spec = problem.specialization
            constants = compiler.with_hooks(compiler.constexprs(variant, spec, config))
            kinds, pointers = list(call.function.kinds), list(kept[1])
            arguments: dict[str, Any] = dict(constants)
            at = 0
            for name in variant.parameters:
                if name not in constants:
                    arguments[name] = self._argument(kinds[at], pointers[at])
                    at += 1 + 2 * len(
                        getattr(arguments[name], "sizes", ())
                    )  # a map is followed by its sizes and strides
            kernels_in_python.launch(variant.kernel, call.config.grid_x, config["num_warps"], arguments)

    def _argument(self, kind: str, pointer: int) -> Any:
        if kind == "map":
            base, sizes, strides, block = self.maps[pointer]
            buffer = self.buffers[base]
            return Descriptor(
                buffer, base, sizes, [*strides, buffer.itemsize], block, ELEMENTS[buffer.itemsize], seen=self.seen
            )
        if kind == "fp32":
            return ctypes.c_float.from_address(pointer).value
        if kind == "pointer":
            address = ctypes.c_uint64.from_address(pointer).value
            return Pointer(self.buffers[address]) if address else Pointer(Buffer("nothing", 0, 0, 4))
        return Int({"i32": ctypes.c_int32, "i64": ctypes.c_int64}[kind].from_address(pointer).value, kind == "i64")


def tensor_of(rows: int, heads: int, dim: int, order: str = "rows") -> torch.Tensor:
    """(1, heads, rows, dim) without memory: "rows": [rows, heads, dim]; "joined": a third of such rows; "heads": a head after
    the other; "expanded": one head for all."""
    if order == "heads":
        return torch.empty(1, heads, rows, dim, dtype=torch.bfloat16, device="meta")
    if order == "expanded":
        return (
            torch.empty(rows, 1, dim, dtype=torch.bfloat16, device="meta")
            .expand(rows, heads, dim)
            .transpose(0, 1)[None]
        )
    wide = 3 if order == "joined" else 1
    made = torch.empty(rows, wide * heads, dim, dtype=torch.bfloat16, device="meta")
    return made[:, :heads].transpose(0, 1)[None]


def words_of(shape: Any, dtype: torch.dtype) -> Any:
    """Memory that nobody has set."""
    return np.full(int(np.prod(shape)), 0x2F2F2F2F, np.int64) if dtype is torch.int32 else None


def planned(
    world: World, kernel: str, tensors: Mapping[str, torch.Tensor], mask: Mask, settings: Any, **more: Any
) -> Any:
    """(the plan, an address for each tensor and behind them that of the workspaces, which lie apart; the config)."""
    q, k, v = (tensors[name] for name in "qkv")
    backward = {name: tensors[name] for name in ("o", "do") if kernel != "fwd"}
    extent = Extent(RAGGED, len(world.starts[0]) - 1)
    problem = passes.describe(q, k, v, mask, 0.125, extent=extent, **backward)
    variant = registry.variant_named("sm90/fwd" if kernel == "fwd" else "sm90/bwd_fused")
    config = variant.suited(problem, {**variant.space.default(problem.specialization, 90), **settings})
    if variant.space.broken(config, problem.specialization, 90):  # no form of these head dims
        config = variant.suited(problem, variant.space.default(problem.specialization, 90))
    plan = passes.Kernels({kernel: config}, problem, tensors, 0.125, 0, **more)
    addresses = []
    for name, tensor in tensors.items():
        if tensor.dim() == 4:
            addresses.append(world.place_tensor(name, tensor))
        else:
            side = name.endswith("_k")
            words = np.array(world.starts[side], np.int64) if name.startswith("cu_") else None
            addresses.append(world.place(name, tensor.numel(), 4, words))
    block = world.next
    for one in {id(p): p for given in world.placed for p in given.values()}.values():
        base = block + one.start
        world.buffers[base] = Buffer(
            f"workspace at {one.start}",
            base,
            int(np.prod(one.shape)),
            one.dtype.itemsize,
            words_of(one.shape, one.dtype),
        )
    return plan, [*addresses, block], config


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(*given: Any, **more: Any) -> World:
        world = World(monkeypatch, *given, **more)
        world.placed = []  # type: ignore[attr-defined]
        placed = passes._placed

        def kept(*asked: Any) -> Any:
            found = placed(*asked)
            world.placed.append(found[0])  # type: ignore[attr-defined]
            return found

        monkeypatch.setattr(passes, "_placed", kept)
        return world

    return made


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
    plan, addresses, _ = planned(world, "fwd", tensors, mask, settings)
    world.run(plan, addresses)
    if world.right:
        assert (written(world, "o") == 1).all() and (written(world, "lse") == 1).all()


def backward(
    world: World, mask: Mask, settings: Any, heads: Any, dim: int, order: str = "rows", parts: int = 1
) -> None:
    q, k = tensor_of(world.rows[0], heads[0], dim, order), tensor_of(world.rows[1], heads[1], dim, order)
    v, do = tensor_of(world.rows[1], heads[1], dim, order), tensor_of(world.rows[0], heads[0], dim, order)
    o, dq, dk, dv = (passes.empty_ordered(one, dim) for one in (q, q, k, v))
    lse = torch.empty(1, heads[0], world.rows[0], device="meta")
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **offsets(world)}
    plan, addresses, config = planned(world, "bwd_fused", tensors, mask, settings, parts={"bwd_fused": parts})
    world.run(plan, addresses)
    if world.right:
        for name in ("dq", "dk", "dv"):
            assert (written(world, name) == 1).all(), name
        if config["FINISH_BESIDE"]:
            check_counts(world, heads)


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
JOINED = {**TOGETHER, "BLOCK_M": 64, "num_warps": 8, "EXPONENTIALS_FIRST": False}
BESIDE = {"BESIDE": True, "FINISH_BESIDE": True}
BACKWARDS: dict[str, dict[str, Any]] = {
    "a block behind": {}, "apart, by TMA": {**TOGETHER, "REDUCE": "tma"}, "from registers": {"REDUCE": "vector"},
    "scores ahead": {"ORDER": "ahead", "REDUCE": "vector", "EXPONENTIALS_FIRST": False},
    "joined": {**JOINED, "REDUCE": "vector"}, "prepared beside": {"BESIDE": True},
    "and finished": {**TOGETHER, **BESIDE, "REDUCE": "tma"}, "joined, and finished": {**JOINED, **BESIDE, "REDUCE": "tma"},
}  # fmt: skip
MASKS = (CAUSAL, FULL, band(65, 0), band(20, 30), band(-1, 30), Mask("chunked", 64), Mask("chunked", 7))


@pytest.mark.parametrize(("form", "packing"), list(zip(FORWARDS, itertools.cycle(PACKINGS))))
def test_forms_of_the_forward(worlds: Any, form: str, packing: str) -> None:
    dim, settings = FORWARDS[form]
    forward(worlds(PACKINGS[packing]), CAUSAL, settings, (3, 1), (dim, dim))


@pytest.mark.parametrize(("form", "packing"), list(zip(BACKWARDS, itertools.cycle(PACKINGS))))
def test_forms_of_the_backward(worlds: Any, form: str, packing: str) -> None:
    backward(worlds(PACKINGS[packing]), CAUSAL, BACKWARDS[form], (2, 1), 128)


def test_parts_of_a_group(worlds: Any) -> None:
    backward(worlds(PACKINGS["one"]), CAUSAL, {}, (4, 2), 64, parts=2)
    backward(worlds(PACKINGS["mixed"]), CAUSAL, {}, (2, 1), 64, parts=2)


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
    order = draw.choice(("rows", "joined", "heads", "expanded"))
    if seed % 2:
        settings = {**draw.choice(list(BACKWARDS.values())), "HEADS_PER_WAVE": draw.choice((1, 4, 32))}
        backward(world, mask, settings, heads, draw.choice((40, 64, 128)), order)
    else:
        dim, settings = draw.choice([FORWARDS[form] for form in ("two groups", "one group", "three groups", "256")])
        dims = draw.choice(((128, 128), (192, 128), (72, 40))) if dim == 128 else (dim, dim)
        forward(world, mask, {**settings, "HEADS_PER_WAVE": draw.choice((0, 4, 64))}, heads, dims, order)


@pytest.mark.parametrize("wrong", ["a row too many", "no rows back", "heads for rows"])
def test_a_wrong_map_is_found(worlds: Any, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
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
        forward(world, CAUSAL, {}, (2, 1), (128, 128))
