"""Launches without a GPU: what a stand-in for libcuda is handed, held against what the kernel takes."""

from __future__ import annotations

import ctypes
import gc
import re
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fa2tune import gpus, logs
from fa2tune.calling import choosing, dispatch, forward_plans, merging, ops
from fa2tune.calling.choosing import Chooser
from fa2tune.calling.defaults import default_config
from fa2tune.calling.serving import explain
from fa2tune.compiling import binaries, compiler, fingerprint, measured_code, operandcheck, registry
from fa2tune.compiling.choice import BY_FEW_TILES, Choice
from fa2tune.compiling.compiler import CompileError, NoTritonError
from fa2tune.compiling.registry import variant_named
from fa2tune.fleet import precompile
from fa2tune.launching import cuda, launch, passes, precompiled
from fa2tune.launching.cuda import Chain, CudaError, Function, Maps
from fa2tune.launching.image import Image, MapFormat
from fa2tune.rows import reader
from fa2tune.rows.row import Row
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import SPLIT, STRATEGIES, Problem, Specialization

PROBLEM = Problem("bf16", 2, 4, 2, 300, 500, 64, 64, CAUSAL)
HANDLE = 0xF00D
OPTIN = 232448  #: bytes of shared memory a block of an H100 may have


class Everything:
    """A set that whatever is asked for is in."""

    def __contains__(self, key: object) -> bool:
        return True

    def clear(self) -> None:
        pass


class Driver:
    """libcuda's functions, as far as they are called. ``launched``: what each launch was handed."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.encoded: list[dict[str, Any]] = []
        self.attributes: list[tuple[int, int]] = []
        self.sizes: list[int] | None = None  #: of the kernel's parameters; None: a driver that cannot tell
        self.codes: list[int] = []  #: of the next launches
        self.map_codes: list[int] = []  #: of the next descriptors to encode
        self.takes = lambda address: address % 16 == 0  #: which addresses TMA takes
        self.contexts = 0
        self.during: Any = None
        self.modes: list[int] = []
        self.version = 13000

    def __getattr__(self, name: str) -> Any:
        if name == "cuFuncGetParamInfo" and self.sizes is None:
            raise AttributeError(name)
        return getattr(type(self), f"_{name}")(self)

    @staticmethod
    def _value(reference: Any) -> Any:
        return reference._obj

    def _cuGetErrorString(self) -> Any:
        def call(code: int, text: Any) -> int:
            text._obj.value = b"no luck"
            return 0

        return call

    def _cuDriverGetVersion(self) -> Any:
        return lambda found: setattr(found._obj, "value", self.version) or 0

    def _cuCtxGetCurrent(self) -> Any:
        return lambda context: setattr(context._obj, "value", None) or 0

    def _cuDevicePrimaryCtxRetain(self) -> Any:
        return lambda context, device: setattr(context._obj, "value", 77) or 0

    def _cuCtxSetCurrent(self) -> Any:
        def call(context: Any) -> int:
            self.contexts += 1
            return 0

        return call

    def _cuDeviceGetAttribute(self) -> Any:
        return lambda found, which, device: setattr(found._obj, "value", OPTIN) or 0

    def _cuThreadExchangeStreamCaptureMode(self) -> Any:
        def call(mode: Any) -> int:
            self.modes.append(mode._obj.value)
            mode._obj.value = 0  # global, as it was
            return 0

        return call

    def _cuModuleLoadData(self) -> Any:
        return lambda module, cubin: 0 if cubin.startswith(b"\x7fELF") else 200

    def _cuModuleGetFunction(self) -> Any:
        return lambda found, module, name: setattr(found._obj, "value", HANDLE) or 0

    def _cuFuncSetCacheConfig(self) -> Any:
        return lambda function, config: 0

    def _cuFuncSetAttribute(self) -> Any:
        return lambda function, which, value: self.attributes.append((which, value)) or 0

    def _cuFuncGetAttribute(self) -> Any:
        return lambda found, which, function: setattr(found._obj, "value", {0: 1024, 1: 16}[which]) or 0

    def _cuFuncGetParamInfo(self) -> Any:
        def call(function: Any, index: Any, offset: Any, size: Any) -> int:
            assert self.sizes is not None
            if index.value >= len(self.sizes):
                return 1
            size._obj.value = self.sizes[index.value]
            return 0

        return call

    def _cuTensorMapEncodeTiled(self) -> Any:
        def call(place, kind, rank, address, shape, strides, block, steps, interleave, swizzle, promotion, fill):  # type: ignore[no-untyped-def]
            assert place.value % 64 == 0
            if self.map_codes and (code := self.map_codes.pop(0)):
                return code
            if not self.takes(address.value or 0):
                return 1
            ctypes.memmove(place.value, struct.pack("<Q", address.value) * 16, 128)
            self.encoded.append(
                {"address": address.value, "type": kind, "shape": list(shape), "block": list(block), "steps": list(steps),
                 "strides": list(strides)[: rank - 1], "swizzle": swizzle, "promotion": promotion}
            )  # fmt: skip
            return 0

        return call

    def _cuLaunchKernelEx(self) -> Any:
        def call(config_at: Any, handle: Any, pointers_at: Any, extra: Any) -> int:
            if self.during is not None:
                during, self.during = self.during, None
                during()
            config = config_at._obj
            attributes = (cuda._Attribute * config.count).from_address(config.attributes)
            self.launched.append(
                {"config": ctypes.addressof(config), "grid": (config.grid_x, config.grid_y, config.grid_z),
                 "block": config.block_x, "shared": config.shared, "stream": config.stream, "handle": handle.value,
                 "pointers": pointers_at.value, "attributes": [(a.id, *a.value[:3]) for a in attributes]}
            )  # fmt: skip
            return self.codes.pop(0) if self.codes else 0

        return call

    def arguments(self, kinds: list[str], which: int = -1) -> list[Any]:
        """What the kernel would have read: an address of a tensor for a map, else a number."""
        pointers = (ctypes.c_void_p * len(kinds)).from_address(self.launched[which]["pointers"])
        formats = {"pointer": "<Q", "map": "<Q", "i32": "<i", "i64": "<q", "fp32": "<f"}
        return [
            struct.unpack(formats[kind], ctypes.string_at(place, struct.calcsize(formats[kind])))[0]
            for kind, place in zip(kinds, pointers, strict=True)
        ]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(cuda, "library", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0xCAFE, raising=False)
    monkeypatch.setattr(launch, "arch_of", lambda index: 90)
    monkeypatch.setattr(launch, "sm_count", lambda index: 132)
    monkeypatch.setattr(Chain, "MEMO", {})
    monkeypatch.setattr(Chain, "SEEN", Everything())  # what is looked at after a launch has to be kept
    launch.load.cache_clear()
    cuda.may_start_early.cache_clear()
    yield found
    launch.load.cache_clear()
    cuda.may_start_early.cache_clear()


def image(variant: Any, config: Any, **changes: Any) -> Image:
    known = registry.variant_named(variant.name)
    count = len(compiler.described(known, PROBLEM.specialization, config))
    block = (1, 1, 64, 64)
    plain = {"name": "k", "cubin": b"\x7fELF", "shared": 100_000, "warps": 12, "ctas": 1, "cooperative": False,
             "programmatic": False, "maps": (MapFormat(3, 2, 9, block),) * count}  # fmt: skip
    return Image(**{**plain, **changes})


def bound(
    monkeypatch: pytest.MonkeyPatch, name: str = "sm90/fwd", **changes: Any
) -> tuple[Chain, list[torch.Tensor], list[str]]:
    """A forward's launch, as a chain of one, tensors for it, and the kinds of its parameters, scratch included."""
    variant = variant_named(name)
    spec = PROBLEM.specialization
    config = variant.space.default(spec, 90)
    made = image(variant, config, **changes)
    monkeypatch.setattr(precompiled, "find", lambda *asked: (made, "a file"))
    q, o = (torch.zeros(2, 4, 300, 64, dtype=torch.bfloat16) for _ in "qo")
    k, v = (torch.zeros(2, 500, 2, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": torch.zeros(2, 4, 300)}
    strides = {n: launch.strides_of(t) for n, t in tensors.items() if t.dim() == 4}
    scalars = variant.scalars(PROBLEM, config, False)
    made_launch = launch.bind(variant, PROBLEM, config, strides, 0.125, tuple(tensors), 0, scalars=scalars)
    chain = launch.chain([(made_launch, range(len(tensors)))], 0)
    assert isinstance(chain, Chain)
    binary = compiler.binary_config(variant, config)
    return chain, list(tensors.values()), [*launch.kinds(variant, spec, binary), "pointer", "pointer"]


def test_a_kernel_is_handed_what_its_parameters_say(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, kinds = bound(monkeypatch)
    call(tensors)
    launched = driver.launched[-1]
    assert (launched["handle"], launched["stream"], launched["block"]) == (HANDLE, 0xCAFE, 12 * 32)
    assert launched["shared"] == 100_000 and launched["attributes"] == []
    assert (8, OPTIN - 16) in driver.attributes  # opted in to all the shared memory there is
    q, k, v, o, lse = tensors
    shapes = [[2, 4, 300, 64, 4 * 300 * 64, 300 * 64, 64, 1], [2, 2, 500, 64, 500 * 128, 64, 128, 1]]
    expected = [
        q.data_ptr(), *shapes[0], k.data_ptr(), *shapes[1], v.data_ptr(), *shapes[1], o.data_ptr(), *shapes[0],
        lse.data_ptr(), pytest.approx(0.125 * launch.LOG2E), 2, 4, 2, 300, 500,
        variant_named("sm90/fwd").space.default(PROBLEM.specialization, 90)["HEADS_PER_WAVE"],
        0, *[0] * 5, 0, 0,  # no norms are asked for, no divisors sent, and Triton's scratch
    ]  # fmt: skip
    assert driver.arguments(kinds) == expected


def test_the_rest_of_a_head_dim_is_a_descriptor_of_the_same_memory(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 = 64 + 32 columns of q and k, 64 of v and o."""
    variant, problem = variant_named("sm90/fwd"), replace(PROBLEM, head_dim=96)
    spec = problem.specialization
    config = variant.space.default(spec, 90)
    wanted = compiler.passed(variant, spec, config)
    assert {name: tensor for name, tensor in wanted.items() if name != tensor} == {"q_rest": "q", "k_rest": "k"}
    described = compiler.described(variant, spec, config)
    assert described == ["q", "k", "v", "o", "q_rest", "k_rest"]
    blocks = [tuple(compiler.block_of(variant, spec, config, name)) for name in described]
    rows = config["BLOCK_N"]
    assert blocks[:2] == [(1, 1, 64, 64), (1, 1, rows, 64)] and blocks[4:] == [(1, 1, 64, 32), (1, 1, rows, 32)]
    made = image(variant, config, maps=tuple(MapFormat(3, 2, 9, block) for block in blocks))
    monkeypatch.setattr(precompiled, "find", lambda *asked: (made, "a file"))
    tensors = {name: torch.zeros(2, heads, rows, dim, dtype=torch.bfloat16) for name, heads, rows, dim in (
        ("q", 4, 300, 96), ("k", 2, 500, 96), ("v", 2, 500, 64), ("o", 4, 300, 64))}  # fmt: skip
    strides = {name: launch.strides_of(tensor) for name, tensor in tensors.items()}
    tensors["lse"] = torch.zeros(2, 4, 300)
    names = tuple(name for name, tensor in wanted.items() if tensor in tensors)
    places = [list(tensors).index(wanted[name]) for name in names]
    scalars = variant.scalars(problem, config, False)
    made_launch = launch.bind(variant, problem, config, strides, 0.125, names, 0, scalars=scalars)
    call = launch.chain([(made_launch, places)], 0)
    before = len(driver.encoded)
    call(list(tensors.values()))
    found = driver.encoded[before:]
    assert [one["address"] for one in found] == [tensors[name].data_ptr() for name in ("q", "k", "v", "o", "q", "k")]
    assert [one["shape"] for one in found[4:]] == [[96, 300, 4, 2], [96, 500, 2, 2]]
    assert [one["block"][0] for one in found] == [64, 64, 64, 64, 32, 32]
    kinds = [*launch.kinds(variant, spec, compiler.binary_config(variant, config)), "pointer", "pointer"]
    assert len(driver.arguments(kinds)) == len(kinds)


def test_a_descriptor_is_encoded_once_per_address(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, kinds = bound(monkeypatch)
    before = len(driver.encoded)  # those that tried whether TMA can take such tensors
    call(tensors)
    call(tensors)
    assert len(driver.encoded) - before == 4
    assert driver.encoded[before + 1] == {
        "address": tensors[1].data_ptr(), "type": 9, "shape": [64, 500, 2, 2], "block": [64, 64, 1, 1], "steps": [1] * 4,
        "strides": [256, 128, 128000], "swizzle": 3, "promotion": 2,
    }  # fmt: skip
    fresh = [torch.zeros_like(t) for t in tensors]
    call(fresh)
    assert len(driver.encoded) - before == 8 and driver.arguments(kinds)[0] == fresh[0].data_ptr()


def test_descriptors_outlive_the_launch_that_passes_them(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, kinds = bound(monkeypatch)
    slots = call.launches[0][0].slots
    maps = [maps for _, maps in slots if maps is not None]

    def meanwhile() -> None:  # as other threads would
        for one in maps:
            for n in range(1, 2 * Maps.KEPT + 3):
                one.encode(16 * n)
        gc.collect()

    driver.during = meanwhile
    call(tensors)
    assert all(tensor.data_ptr() not in one for tensor, one in zip(tensors, maps, strict=False))
    found = driver.arguments(kinds)
    assert [found[index] for index, one in slots if one is not None] == [t.data_ptr() for t in tensors[:4]]


def test_what_tma_cannot_take_is_said_when_planning(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.takes = lambda address: False
    with pytest.raises(CompileError, match=r"sm90/fwd, q: CUDA error 1 while encoding .* shape \[2, 4, 300, 64\]"):
        bound(monkeypatch)


def test_launches_at_once_share_no_memory(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, kinds = bound(monkeypatch)
    others = [torch.zeros_like(t) for t in tensors]
    driver.during = lambda: call(others)  # as another thread would, which runs while the driver is called
    call(tensors)
    inner, outer = driver.launched
    assert inner["config"] != outer["config"] and inner["pointers"] != outer["pointers"]
    assert driver.arguments(kinds, 0)[0] == others[0].data_ptr()
    assert driver.arguments(kinds, 1)[0] == tensors[0].data_ptr()


def test_arguments_are_packed_once_for_addresses_and_stream(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they have come a second time."""
    monkeypatch.setattr(Chain, "SEEN", set())
    call, tensors, _ = bound(monkeypatch)
    call(tensors)
    assert not Chain.MEMO, "they may never come again"
    call(tensors)
    call(tensors)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0xBEEF)
    call(tensors)
    call(tensors)
    _, first, again, _, elsewhere = driver.launched
    assert again == first and elsewhere == {
        **first, "stream": 0xBEEF, "config": elsewhere["config"], "pointers": elsewhere["pointers"]
    }  # fmt: skip
    assert elsewhere["config"] != first["config"] and len(Chain.MEMO) == 2


def test_packed_arguments_are_forgotten_before_they_are_too_many(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chain, "KEPT", 3)
    monkeypatch.setattr(Chain, "SEEN", set())
    call, tensors, _ = bound(monkeypatch)
    held = [[torch.zeros_like(t) for t in tensors] for _ in range(5)]
    sizes = set()
    for these in 12 * held:
        call(these)
        sizes.add(len(Chain.MEMO))
        assert len(Chain.SEEN) <= 4 * Chain.KEPT
        for (_, _, addresses), [(_, [_, memory, *_])] in Chain.MEMO.items():
            assert [*memory][-len(addresses) :] == [*addresses]
    assert sizes == {0, 1, 2, 3}, "filled, and once in a while emptied"
    assert len(driver.launched) == 12 * len(held)
    dispatch.reload()
    assert not Chain.MEMO and not Chain.SEEN


def test_two_chains_at_the_same_addresses_share_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, _ = bound(monkeypatch)
    launch.load.cache_clear()
    other, _, _ = bound(monkeypatch, "portable/fwd", shared=50_000)
    for _ in range(3):
        call(tensors)
        other(tensors)
    assert [one["shared"] for one in driver.launched] == 3 * [100_000, 50_000] and len(Chain.MEMO) == 2


def test_packed_arguments_outlive_the_launch_that_passes_them(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, kinds = bound(monkeypatch)
    call(tensors)
    call(tensors)
    expected, found = driver.arguments(kinds), list[list[Any]]()

    def meanwhile() -> None:  # another thread fills the memo
        Chain.MEMO.clear()
        gc.collect()
        found.append(driver.arguments(kinds))  # of the launch before, which passed the same memory

    driver.during = meanwhile
    call(tensors)
    assert found == [expected] and not Chain.MEMO


def test_a_tensor_without_memory_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, _ = bound(monkeypatch)
    call(tensors)
    nowhere = torch._efficientzerotensor(tensors[0].shape, dtype=tensors[0].dtype)
    for _ in range(3):
        with pytest.raises(cuda.NoAddressError, match="without storage"):
            call([nowhere, *tensors[1:]])
    assert len(driver.launched) == 1


def test_a_chain_places_tensors_and_workspaces(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches on two of three tensors each, and on one that lies within the last."""
    seen: list[list[int]] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.doing = f"launching {name}"
            self.code = 0

        def packed(self, addresses: list[int], stream: int) -> cuda.Packed:
            return lambda: seen.append([stream, *addresses]) or self.code, [self]

    block = torch.empty(1000, dtype=torch.uint8)
    tensors = [torch.empty(3), torch.empty(5), block]
    within = launch.Workspace((2, 5), torch.float32, 512)
    places: list[list[launch.TensorPlace]] = [[0, within], [within, 1]]
    recorders = [Recorder("first"), Recorder("second")]
    chain = launch.chain(list(zip(recorders, places, strict=True)), 0)
    for _ in range(2):
        chain(tensors)
    one, two, inside = tensors[0].data_ptr(), tensors[1].data_ptr(), block.data_ptr() + 512
    assert seen == 2 * [[0xCAFE, one, inside], [0xCAFE, inside, two]]
    view = within.within(block)
    assert (view.data_ptr(), view.shape, view.dtype) == (inside, (2, 5), torch.float32)
    recorders[1].code = 700
    with pytest.raises(cuda.CudaError, match="launching second: "):
        chain(tensors)


def test_attributes_of_clusters_cooperation_and_early_starts(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tensors, _ = bound(monkeypatch)
    plain(tensors)
    launch.load.cache_clear()
    call, tensors, _ = bound(monkeypatch, ctas=2, cooperative=True, programmatic=True)
    call(tensors)
    one, two = driver.launched
    assert two["grid"] == (2 * one["grid"][0], 1, 1)
    assert two["attributes"] == [(6, 1, 0, 0), (2, 1, 0, 0), (4, 2, 1, 1), (5, 1, 0, 0)]


def test_a_launch_may_start_before_the_one_before_has_ended(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a config's kernel itself waits for what the other makes."""
    call, tensors, _ = bound(monkeypatch)
    plain = call.launches[0][0]
    asked = cuda.Launch(plain.function, 1, plain.values[:-2], plain.slots, early=True)
    Chain([(asked, [(place, 0) for place in range(len(tensors))])], 0)(tensors)
    assert driver.launched[-1]["attributes"] == [(6, 1, 0, 0)]
    early = {
        name
        for name, variant in registry.variants().items()
        if variant.early(PROBLEM, variant.space.default(PROBLEM.specialization, 90), 132)
    }
    assert early == {"sm90/bwd_dkdv_ds", "sm90/bwd_dq_ds"}, "whatever their config, both wait"
    fused = variant_named("sm90/bwd_fused")
    wide = replace(PROBLEM, seqlen_q=4096, seqlen_k=4096)
    beside = {**fused.space.default(PROBLEM.specialization, 90), "BESIDE": True}
    for version, early in ((12020, False), (12030, True)):
        cuda.may_start_early.cache_clear()
        driver.version = version
        assert launch.starts_early(fused, PROBLEM, beside, 0) == early
        assert not launch.starts_early(fused, PROBLEM, {**beside, "BESIDE": False}, 0)
        workers = fused.scalars(wide, beside, early)
        assert (132 * workers["rows_worth"] // workers["keys_seen"] >= 132) != early, "alone, all prepare"
    (before,), (after,) = compiler.around(fused, PROBLEM.specialization, beside, 90)
    assert (before[0].name, after[0].name) == ("sm90/bwd_prepare_overlapped", "sm90/bwd_finish")
    assert not launch.starts_early(after[0], PROBLEM, after[1], 0)
    _, (after,) = compiler.around(fused, PROBLEM.specialization, {**beside, "FINISH_BESIDE": True}, 90)
    assert launch.starts_early(after[0], PROBLEM, after[1], 0)
    started = {**beside, "BESIDE": False, "EARLY_START": True}
    _, (after,) = compiler.around(fused, PROBLEM.specialization, started, 90)
    for tiles, early in ((60, True), (124, True), (125, False), (132, False), (500, False)):  # 64 blocks of dQ
        few = replace(PROBLEM, batch=1, heads_q=1, heads_kv=1, seqlen_q=4096, seqlen_k=128 * tiles)
        assert launch.starts_early(after[0], few, after[1], 0) == early, (
            "not where main leaves no room for its programs"
        )
        assert launch.starts_early(fused, few, started, 0)
    packed_rows = replace(few, extent=Extent(RAGGED, 2))
    assert launch.starts_early(after[0], packed_rows, after[1], 0), "their tiles are not known"
    packed = replace(PROBLEM, batch=1, extent=Extent(RAGGED, 2))
    for name in ("sm90/fwd", "sm90/fwd_grouped", "sm90/fwd_split"):
        variant, spec = variant_named(name), packed.specialization
        config = variant.space.default(spec, 90)
        assert launch.starts_early(variant, packed, config, 0)
        assert not launch.starts_early(variant, PROBLEM, config, 0)
        assert not launch.starts_early(variant, replace(packed, extent=Extent(RAGGED, 2, scheduled=True)), config, 0)
        ((order, settings),), _ = compiler.around(variant, spec, config, 90)
        assert order.name == "portable/packed_order" and settings["EARLY"]
        assert not launch.starts_early(order, packed, settings, 0)
    (before,), (after,) = compiler.around(fused, PROBLEM.specialization, {**beside, "BESIDE": False}, 90)
    assert (before[0].name, after[0].name) == ("sm90/bwd_prepare", "sm90/bwd_finish")


def test_a_thread_without_a_context_gets_one(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, _ = bound(monkeypatch)
    driver.codes, before = [201], driver.contexts
    call(tensors)
    assert len(driver.launched) == 2 and driver.contexts == before + 1


def test_a_thread_without_a_context_encodes_descriptors(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose first call finds the kernel loaded, when planning or with tensors at new addresses."""
    call, tensors, kinds = bound(monkeypatch)
    driver.map_codes, before = [201], driver.contexts
    again, _, _ = bound(monkeypatch)
    assert driver.contexts > before
    driver.map_codes, before = [201], driver.contexts
    fresh = [torch.zeros_like(t) for t in tensors]
    call(fresh)
    assert driver.contexts == before + 1 and driver.arguments(kinds)[0] == fresh[0].data_ptr()
    driver.map_codes = [201, 201]
    with pytest.raises(cuda.CudaError, match="CUDA error 201 while encoding a TMA descriptor"):
        again([torch.zeros_like(t) for t in tensors])


def test_a_refused_launch_is_told_in_the_drivers_words(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tensors, _ = bound(monkeypatch)
    driver.codes = [700]
    with pytest.raises(CudaError, match="CUDA error 700 while launching k: no luck"):
        call(tensors)


def test_parameters_of_another_layout_are_refused(driver: Driver) -> None:
    made = image(variant_named("portable/bwd_delta"), {})
    driver.sizes = [8, 128, 4, 8, 8]
    assert Function(made, ["pointer", "map", "i32"], 0, "").handle.value == HANDLE
    driver.sizes = [8, 128, 8, 8, 8]
    with pytest.raises(CudaError, match=r"takes parameters of \[8, 128, 8, 8, 8\] bytes, a launch passes \[8, 128, 4"):
        Function(made, ["pointer", "map", "i32"], 0, "")


def test_more_than_the_gpu_has_is_out_of_resources(driver: Driver) -> None:
    from triton.runtime.errors import OutOfResources

    for changes, said in (({"shared": OPTIN + 1}, "shared memory"), ({"warps": 33}, "threads")):
        with pytest.raises(OutOfResources, match=said):
            Function(image(variant_named("portable/bwd_delta"), {}, **changes), [], 0, "")


def test_what_does_not_fit_a_parameter_is_refused() -> None:
    assert cuda._packed("i32", -1) == (1 << 64) - 1
    for kind, value in (("i32", 1 << 31), ("i32", -(1 << 31) - 1), ("i64", 1 << 63)):
        with pytest.raises(ValueError, match=f"does not fit {kind}"):
            cuda._packed(kind, value)


def test_a_binary_that_the_driver_refuses_is_compiled_after_all(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variant = variant_named("portable/bwd_delta")
    spec = PROBLEM.specialization
    config = compiler.binary_config(variant, variant.space.default(spec, 90))
    good, bad = image(variant, config), image(variant, config, cubin=b"rubbish")
    monkeypatch.setattr(precompiled, "find", lambda *asked: (bad, "some.kernels"))
    monkeypatch.setattr(operandcheck, "compile_kernel", lambda *asked: None)
    monkeypatch.setattr(launch, "image_of", lambda compiled: good)
    with caplog.at_level("INFO", "fa2tune"):
        found = launch.load(variant, spec, tuple(sorted(config.items())), 0)
    assert found.image is good and found.origin == "compiled: some.kernels: CUDA error 200 while loading k: no luck"
    assert "compiling bwd_delta: some.kernels" in caplog.text


def test_nothing_is_loaded_in_a_capture_unless_allowed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensors, _ = bound(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    bound(monkeypatch)[0](tensors)  # it is there already
    launch.load.cache_clear()
    with pytest.raises(launch.CaptureMiss, match="sm90/fwd"):
        bound(monkeypatch)
    driver.modes.clear()
    with cuda.relaxed_capture():
        bound(monkeypatch)[0](tensors)
    assert driver.modes == [2, 0] and not cuda.may_load()  # relaxed, and then as it was


# ---- memory


def test_fresh_tensors_are_like_those_it_was_made_with() -> None:
    like = torch.zeros(2, 5, 3, 8, dtype=torch.bfloat16).transpose(1, 2), torch.zeros(2, 3)
    fresh = passes.Fresh(torch.device("cpu"), *(tensor.to("meta") for tensor in like))
    first, second = fresh(), fresh()
    for one, other, wanted in zip(first, second, like, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert len({tensor.untyped_storage().data_ptr() for tensor in (one, other, wanted)}) == 3
    torch.use_deterministic_algorithms(True)
    try:
        assert all(tensor.isnan().all() for tensor in fresh())
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_short_way_to_memory_is_for_the_current_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[Any, ...]] = []
    monkeypatch.setattr(passes, "ALLOCATE", lambda *layout: taken.append(layout))
    fresh = passes.Fresh(torch.device("cpu"), torch.zeros(2, 3))
    assert len(fresh()) == 1 and not taken  # on a CPU
    fresh.index = 1  # as a tensor of a second GPU has it
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    fresh()
    assert taken == [((2, 3), (3, 1), torch.float32)]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    assert fresh()[0].device == fresh.device and len(taken) == 1
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(passes, "ALLOCATE", None)  # a torch that has no such thing
    assert fresh()[0].shape == (2, 3)


def test_workspaces_lie_apart_in_one_block() -> None:
    asked = {"stats": ((2, 3, 100), "fp32"), "sums": "words", "words": ((3, 7), "i32"), "tiles": ((5, 5), "")}
    found, size = passes.placed(asked, torch.bfloat16, 1024)
    assert found["sums"] is found["words"] and found["words"].dtype == torch.int32
    assert found["tiles"].dtype == torch.bfloat16 and found["tiles"].end - found["tiles"].start == 50
    apart = [found[name] for name in ("stats", "words", "tiles")]
    assert all(one.start % passes.ALIGNMENT == 0 for one in apart) and apart[0].start == 1024
    assert all(one.end <= other.start for one, other in pairwise(apart)) and apart[-1].end <= size


# ---- a first call while a graph is captured


class Missing:
    """A plan whose kernel is not loaded, and may be loaded in a relaxed capture alone."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def __call__(self, choices: Mapping[str, Choice]) -> str:
        if not cuda.may_load():
            raise launch.CaptureMiss("fwd")
        self.made.append({kernel: choice.config for kernel, choice in choices.items()})
        return "a plan"


@pytest.fixture
def capturing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Chooser:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return Chooser(PROBLEM, gpus.named("h200"))


def test_by_default_it_is_an_error_that_says_what_to_do(capturing: Chooser) -> None:
    missing = Missing()
    with pytest.raises(launch.CaptureMiss) as miss:
        dispatch._plan(capturing, {"fwd": capturing.choose("fwd")}, missing)
    said = r"fwd is not loaded yet .* warm-up call with these shapes .* or set FA2TUNE_CAPTURE_MISS=default"
    with pytest.raises(RuntimeError, match=said):
        dispatch._plan_in_capture(miss.value, capturing, ("fwd",), missing)
    assert not missing.made


def test_it_may_take_the_documented_default(capturing: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2TUNE_CAPTURE_MISS", "default")
    missing, kernels = Missing(), STRATEGIES[SPLIT]
    before = dispatch.SERVED["default, in a capture"]
    assert dispatch._plan_in_capture(launch.CaptureMiss("bwd_dq"), capturing, kernels, missing) == "a plan"
    default = {kernel: default_config(kernel, PROBLEM, gpus.named("h200")) for kernel in kernels}
    assert missing.made == [default]
    assert dispatch.SERVED["default, in a capture"] - before == 2 and not cuda.may_load()


def test_another_setting_is_refused(capturing: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2TUNE_CAPTURE_MISS", "tune")
    with pytest.raises(ValueError, match="FA2TUNE_CAPTURE_MISS: got 'tune', allowed are error and default"):
        dispatch._plan_in_capture(launch.CaptureMiss("fwd"), capturing, ("fwd",), Missing())


# ---- what a first call leaves behind


@pytest.fixture
def serving(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Driver]:
    """CPU tensors pass for an H200's, nothing is compiled yet, and nothing is collected."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    monkeypatch.setattr(ops, "interpreted", lambda: True)
    for module in (passes, launch):
        monkeypatch.setattr(module, "arch_of", lambda index: 90)
    monkeypatch.setattr(dispatch, "gpu_of", lambda index: gpus.named("h200"))
    monkeypatch.setattr(dispatch, "FORWARD_PLANS", {})
    monkeypatch.setattr(dispatch, "BACKWARD_PLANS", {})
    enabled = gc.isenabled()
    gc.disable()
    yield driver
    if enabled:
        gc.enable()


def kept(call: Callable[..., Any]) -> list[str]:
    """What is still there after a call that is handed q, k and v, of them and of what it returns."""
    tensors = [torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    seen = [(name, weakref.ref(tensor)) for name, tensor in zip("qkv", tensors, strict=True)]
    seen += [("a result", weakref.ref(result)) for result in call(*tensors)]
    del tensors
    return [name for name, tensor in seen if tensor() is not None]


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(ops.attention(q, k, v).sum(), (q, k, v))


def test_a_first_call_that_compiles_keeps_no_tensor(serving: Driver, tmp_path: Path) -> None:
    assert kept(gradients) == []
    assert len(serving.launched) >= 3 and len([*tmp_path.glob("*/*.cubin")]) >= 3, "forward and backward were compiled"


@pytest.mark.parametrize("refused", [1, 2])
def test_nor_does_one_whose_config_does_not_compile(
    serving: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: int
) -> None:
    """Of the forward, or of the backward."""
    import triton

    compile_, asked = triton.compile, list[Any]()

    def refusing(source: Any, **options: Any) -> Any:
        asked.append(source)
        if len(asked) == refused:
            raise RuntimeError("it is only a test")
        return compile_(source, **options)

    monkeypatch.setattr(triton, "compile", refusing)
    logs.warn_once.cache_clear()
    assert kept(gradients) == []
    assert "the first choice for" in caplog.text and serving.launched


def test_nor_does_one_that_fails_for_good(serving: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[Any]()

    def compile_kernel(variant: Any, *asked: Any) -> Any:
        try:
            raise ValueError(f"a reason against {variant.name}")
        except ValueError as error:
            raise CompileError("it does not compile") from error

    def failing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        try:
            ops.attention(q, k, v)
        except CompileError as error:
            said.extend((str(error), str(error.__cause__)))
        return ()

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    assert kept(failing) == []
    assert said == ["it does not compile", "a reason against portable/fwd"]


# ---- machine code of a user's rows, and no Triton


def filed(path: Path, rows: Sequence[Row], without: tuple[str, ...] = ()) -> None:
    """What ``fa2tune tune`` files with rows, save for the code itself; ``without``: kernels that are left out."""
    made = {}
    for variant, spec, point in precompile.jobs_of(rows)[90]:
        if variant.short_name not in without:
            binary = dict(point)
            blocks = [compiler.block_of(variant, spec, binary, n) for n in compiler.described(variant, spec, binary)]
            its_image = Image(
                variant.short_name.replace("/", "_"), b"\x7fELF", 1000, 4, 1, False, False,
                tuple(MapFormat(3, 2, 9, tuple(block)) for block in blocks),
            )  # fmt: skip
            code, triton = precompiled.code_of(variant, spec, binary, 90), rows[0].triton
            about = {**precompiled.about(variant, spec, binary, 90), "triton": triton}
            new = binaries.New(code, about, precompiled.launch_of(its_image), its_image.cubin)
            made[precompiled.file_key(code, triton)] = new
    binaries.save(path, binaries.file_bytes(made, precompile.sources()))


@pytest.fixture
def rows() -> list[Row]:
    """Rows of one head dim, dtype and mask."""
    path = next(path for path in reader.shipped_paths() if path.stem == "h200")
    return [r for r in reader.read(path) if (r.key.head_dim, r.key.dtype, r.key.mask) == (128, "bf16", "full")]


@pytest.fixture
def loaded(serving: Driver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that are loaded, where there is no Triton."""
    found, function = list[str](), Function

    def loading(image: Image, *rest: Any) -> Function:
        found.append(image.name)
        return function(image, *rest)

    def none(*asked: Any) -> Any:
        raise NoTritonError(ModuleNotFoundError("No module named 'triton'"), "a kernel")

    monkeypatch.setattr(launch, "Function", loading)
    monkeypatch.setattr(compiler, "compile_kernel", none)
    precompiled.triton_build()  # is remembered, for other tests
    for module in (fingerprint, precompiled):
        monkeypatch.setattr(module, "triton_version", lambda: "")
    monkeypatch.setattr(choosing, "toolchain", lambda: measured_code.toolchain(driver=""))
    monkeypatch.setattr(dispatch, "SERVED", Counter())
    monkeypatch.setattr(forward_plans, "_REFUSED", {})
    logs.warn_once.cache_clear()
    return found


def call_of(batch: int, heads: int, queries: int, keys: int) -> list[torch.Tensor]:
    """q, k and v of head dim 128; a quarter as many key heads."""
    sizes = (heads, queries), (heads // 4, keys), (heads // 4, keys)
    return [torch.zeros(batch, *size, 128, dtype=torch.bfloat16) for size in sizes]


DECODING, SHORT, LONG = (2, 32, 1, 8192), (1, 16, 512, 512), (4, 32, 4096, 4096)


def test_calls_of_few_queries_and_few_tiles_load_what_the_tuner_filed(
    loaded: list[str], rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filed(tmp_path / "user.kernels", rows)
    monkeypatch.setenv("FA2TUNE_KERNELS", str(tmp_path / "user.kernels"))
    decoding = call_of(*DECODING)
    explained = explain(*decoding).kernels[0]
    assert {text.partition(",")[0] for text in (explained.binaries or {}).values()} == {"precompiled"}
    ops.attention(*decoding)
    assert loaded == list(explained.runs or ()) == ["fwd_split", "fwd_combine"]
    ops.attention(*call_of(*SHORT))
    ops.attention(*call_of(*LONG))
    assert "sm90_fwd" in loaded
    (last,) = dispatch.SERVED.keys() - {forward_plans.KEYS_SPLIT, BY_FEW_TILES}
    assert "problem exact" in last and set(dispatch.SERVED.values()) == {1}


def test_backwards_of_few_key_heads_do_too(
    loaded: list[str], rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filed(tmp_path / "user.kernels", rows)
    monkeypatch.setenv("FA2TUNE_KERNELS", str(tmp_path / "user.kernels"))
    monkeypatch.setattr(merging, "pays", lambda *asked: False)  # one head of more queries is expected to be faster
    q, k, v = (tensor.requires_grad_() for tensor in call_of(1, 16, 1024, 1024))
    ops.attention(q, k, v).sum().backward()
    assert {"bwd_spread", "bwd_gather"} < set(loaded)


def test_without_the_kernels_that_split_keys_the_row_serves_and_both_say_so(
    loaded: list[str],
    rows: list[Row],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    filed(tmp_path / "user.kernels", rows, ("fwd_split",))
    monkeypatch.setenv("FA2TUNE_KERNELS", str(tmp_path / "user.kernels"))
    decoding = call_of(*DECODING)
    found = explain(*decoding)
    said = (
        "fwd: to split keys among programs is expected to be faster, but fwd_split: no file of binaries has this kernel"
    )
    assert said in str(found) and "no Triton is installed" in str(found)
    assert found.kernels[0].split is None and list(found.kernels[0].runs or ()) == ["sm90/fwd"]
    ops.attention(*decoding)
    assert set(loaded) == {"sm90_fwd"} and forward_plans.KEYS_SPLIT not in dispatch.SERVED
    assert "next: keys are not split" in caplog.text
    assert "fa2tune has no machine code of fwd_split" in str(explain(*decoding))


# ---- held against what the compiler makes

_SIZES = {"b8": 1, "u8": 1, "u16": 2, "b16": 2, "u32": 4, "b32": 4, "s32": 4, "f32": 4, "u64": 8, "b64": 8, "s64": 8}
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?)?\w+(?:\[(\d+)\])?"
)


@pytest.mark.parametrize(
    ("name", "loads", "dim"),
    [
        ("portable/fwd", "pointer", 64), ("portable/fwd", "descriptor", 64), ("sm90/fwd", None, 64), ("sm90/fwd", None, 80),
        ("sm90/bwd_dq", None, 64),
    ],
)  # fmt: skip
def test_kinds_are_those_of_the_compiled_kernel(name: str, loads: str | None, dim: int) -> None:
    variant, spec = variant_named(name), Specialization("bf16", dim, 64, "causal")
    config = {**variant.space.default(spec, 90), **({} if loads is None else {"LOADS": loads})}
    binary = compiler.binary_config(variant, config)
    try:
        compiled = compiler.compile_kernel(variant, spec, binary, 90)
    except CompileError as error:
        pytest.skip(f"this Triton does not compile it: {error}")
    head = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0]
    sizes = [_SIZES[kind] * int(count or 1) for kind, count in _PARAMETER.findall(head)]
    assert sizes == [cuda.SIZES[kind] for kind in (*launch.kinds(variant, spec, binary), "pointer", "pointer")]
    made = launch.image_of(compiled)
    assert made.cubin.startswith(b"\x7fELF") and made.name in compiled.asm["ptx"]
    assert len(made.maps) == len(compiler.described(variant, spec, config))


@pytest.mark.parametrize(
    ("scale", "sent"),
    [(0.0, 1e-30), (-0.0, 1e-30), (1e-35, 1e-30), (-1e-35, -1e-30), (0.5, 0.5), (-3.0, -3.0)],
)
def test_no_scale_is_zero(scale: float, sent: float) -> None:
    """One backward divides by it."""
    assert launch._away_from_zero(scale) == sent
