"""Products of as many columns as a head dim has: the edit of PTX, its hook in Triton, and the machine code that comes of it."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from hopper_builds import TESTED
from triton import knobs

from fa2tune.compiling import compiler, registry, trimmed
from fa2tune.launching import precompiled
from fa2tune.search_spaces.lib.hopper import trimmed as trimmed_columns
from fa2tune.spec.problem import Specialization
from fa2tune.spec.variant import Used

REGISTERS = ",".join(f"%f{i}" for i in range(128))
BY_REGISTERS = (
    f"wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{{REGISTERS}}}, {{%r1,%r2,%r3,%r4}}, %rd1, %p1, 1, 1, "
)
BY_MEMORY = f"wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {{{REGISTERS}}}, %rd2, %rd1, 0, 1, 1, 1, "


def columns(ptx: str) -> list[tuple[int, int]]:
    """(columns, registers of the result) of each product."""
    found = re.findall(r"m64n(\d+)k16\S* \{([^}]*)\}", ptx)
    return [(int(wide), len(registers.split(","))) for wide, registers in found]


@pytest.mark.parametrize("product", [BY_REGISTERS, BY_MEMORY])
def test_products_with_a_transposed_right_factor_are_narrower(product: str) -> None:
    text = f"a;\n{product}1;\nb;\n{product}0;\nc;"
    edited = trimmed.edited(text, Used({256: 200}))
    assert columns(edited) == [(200, 100), (256, 128)]
    assert edited == text.replace("n256", "n200", 1).replace("," + ",".join(f"%f{i}" for i in range(100, 128)), "", 1)
    assert trimmed.edited(text, Used({128: 104})) == trimmed.edited(text, Used()) == text


def test_products_over_columns_of_zeros_are_left_out() -> None:
    """Of a product of tiles the last ones: those of one result, up to the commit."""
    step = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{}}}, %rd1, %rd{}, {}, 1, 1, 0, 0;\nadd;\n"
    whole = [
        "".join(step.format(result, k, "0" if k == 0 else "1") for k in range(8)) for result in ("%f1,%f2", "%f3,%f4")
    ]
    other = "".join(step.format("%f5,%f6", k, "1") for k in range(4))
    text = f"a;\n{whole[0]}{whole[1]}wgmma.commit_group;\n{whole[1]}wgmma.commit_group;\n{other}b;"
    edited = trimmed.edited(text, Used({}, {128: 112}))
    assert edited == re.sub(r"wgmma\.mma_async[^;]*%rd7,[^;]*;", "", text) != text
    assert (
        trimmed.edited(text, Used({}, {64: 48}))
        == re.sub(r"wgmma\.mma_async[^;]*%f5,%f6[^;]*%rd3,[^;]*;", "", text)
        != text
    )
    assert trimmed.edited(text, Used({}, {256: 208})) == text
    transposed = text.replace("0, 0;", "1, 1;")
    assert trimmed.edited(transposed, Used({}, {128: 112})) == transposed


@pytest.mark.parametrize(
    ("head_dims", "found"),
    [
        ([(200, 256, 0)], {256: 200}),
        ([(176, 128, 64)], {64: 48}),
        ([(104, 128, 0)], {128: 104}),
        ([(100, 128, 0)], {128: 104}),
        ([(256, 256, 0)], {}),
        ([(192, 128, 64)], {}),
        ([(160, 128, 32)], {}),  # of so few columns none is left out
        ([(40, 64, 0)], {}),
        ([(104, 128, 0), (120, 128, 0)], {128: 120}),
        ([(104, 128, 0), (128, 128, 0)], {}),
        ([(176, 128, 64), (104, 128, 0)], {64: 48}),
        ([(208, 256, 0), (88, 128, 0)], {256: 208, 128: 88}),
        ([(176, 128, 64), (64, 64, 0)], {}),
        ([(176, 128, 64), (96, 64, 32)], {}),
        ([(176, 128, 64), (40, 64, 0)], {64: 48}),
    ],
)
def test_the_widest_product_of_a_tile_says_how_wide_all_are(
    head_dims: list[tuple[int, int, int]], found: dict[int, int]
) -> None:
    assert trimmed_columns(*head_dims) == found


def hook() -> Any:
    return knobs.runtime.add_stages_inspection_hook


def test_the_hook_is_there_while_a_kernel_is_compiled() -> None:
    assert hook() is None
    with trimmed.products(Used()):
        assert hook() is None
    with trimmed.products(Used({256: 200})):
        stages: dict[str, Callable[..., str]] = {"ptx": lambda source, metadata: BY_REGISTERS + "1;"}
        hook()(None, stages, None, None, None)
        assert columns(stages["ptx"](None, {})) == [(200, 100)]
        assert hook()() == (trimmed.suffix(Used({256: 200})),) * 2
    assert hook() is None


def test_a_hook_that_is_there_runs_first_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*stage: Any) -> Any:
        if not stage:
            return "key", "hash"
        stage[1]["ptx"] = lambda source, metadata: BY_MEMORY + "1;"
        return None

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", theirs)
    with trimmed.products(Used({256: 208})):
        stages: dict[str, Callable[..., str]] = {}
        hook()(None, stages, None, None, None)
        assert columns(stages["ptx"](None, {})) == [(208, 104)]
        assert hook()() == tuple(f"{one}{trimmed.suffix(Used({256: 208}))}" for one in ("key", "hash"))
    assert hook() is theirs


def test_other_threads_compile_as_they_would_without_it() -> None:
    seen = dict[str, Any]()

    def elsewhere() -> None:
        stages: dict[str, Callable[..., str]] = {"ptx": lambda source, metadata: BY_REGISTERS + "1;"}
        hook()(None, stages, None, None, None)
        seen["columns"], seen["key"] = columns(stages["ptx"](None, {})), hook()()
        with trimmed.products(Used({256: 224})):
            seen["own"] = hook()()

    with trimmed.products(Used({256: 200})):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert hook()() == (trimmed.suffix(Used({256: 200})),) * 2  # another thread's end leaves it
    assert seen == {"columns": [(256, 128)], "key": ("", ""), "own": (trimmed.suffix(Used({256: 224})),) * 2}
    assert hook() is None


def test_a_hook_that_is_set_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    with trimmed.products(Used({256: 200})):
        knobs.runtime.add_stages_inspection_hook = theirs = lambda *_: ("", "")
    assert hook() is theirs


def test_its_own_hook_that_a_scope_of_knobs_left_is_not_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", trimmed._hook)
    with trimmed.products(Used({256: 200})):
        assert hook()() == (trimmed.suffix(Used({256: 200})),) * 2
    assert hook() is None


def test_another_edit_has_another_number() -> None:
    """Triton's cache and files of binaries know an edit by EDITION and ``suffix`` alone: increase it with the digest, unless
    what was edited so far is edited as before, and the rest has a suffix of its own, as ``rows`` has."""
    edits = "".join(map(inspect.getsource, (trimmed.edited, trimmed._runs, trimmed._trimmed))) + trimmed._WGMMA.pattern
    assert (trimmed.EDITION, hashlib.sha256(edits.encode()).hexdigest()[:8]) == (1, "cdad0da1")


def test_a_compile_without_the_hook_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    warned = list[str]()
    monkeypatch.setattr(compiler, "warn_once", warned.append)
    monkeypatch.setattr(trimmed, "EDITION", 0)  # compiled anew
    monkeypatch.setattr(trimmed, "products", lambda _used: nullcontext())
    variant, spec = registry.variant_named("sm90/bwd_dq_ds"), Specialization("bf16", 208, 208, "full")
    compiler.compile_kernel(variant, spec, variant.space.default(spec, 90), 90)
    assert len(warned) == 1 and "slower" in warned[0]


def test_it_is_gone_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), trimmed.products(Used({256: 200})):
        _ = 1 / 0
    assert hook() is None


#: Kernel, head dims, columns of results -> products that have them, products of scores and dP
CASES = [
    ("sm90/fwd", 208, 208, {208: 16}, 52),
    ("sm90/fwd", 224, 104, {104: 16}, 56),
    ("sm90/fwd", 176, 176, {128: 16, 48: 16}, 44),
    ("sm90/fwd_split", 104, 104, {104: 32}, 28),
    ("sm90/fwd_shares", 104, 104, {104: 32}, 28),
    ("sm90/fwd_grouped", 224, 224, {224: 16}, 56),
    ("sm90/fwd_one_tile", 200, 200, {200: 4}, 13),
    ("sm90/fwd_80_keys", 232, 232, {232: 20}, 60),
    ("sm90/bwd_fused", 104, 104, {104: 32, 64: 48}, 64 // 8 * 7),
    ("sm90/bwd_dkdv", 208, 208, {208: 12}, 80 // 16 * 13),
    ("sm90/bwd_dkdv", 176, 64, {128: 4, 64: 12}, 44),  # a tile of 64 columns is V's, too
    ("sm90/bwd_dkdv_ds", 176, 176, {128: 12, 48: 12}, 60 // 12 * 11),
    ("sm90/bwd_dq", 200, 200, {200: 16}, 128 // 16 * 13),
    ("sm90/bwd_dq", 208, 104, {208: 16}, 64 // 16 * 13 + 32 // 8 * 7),
    ("sm90/bwd_dq_ds", 200, 200, {200: 8}, 0),
    ("sm90/bwd_dq_split", 112, 112, {112: 16}, 64 // 8 * 7),
]  # fmt: skip
_PRODUCT = re.compile(r"m64n(\d+)k16\S* \{[^}]*\}, [^;]*, ([01]);")


@pytest.mark.parametrize(("name", "dim", "dim_v", "wanted", "sums"), CASES)
def test_kernels_multiply_the_columns_of_their_head_dims(
    name: str, dim: int, dim_v: int, wanted: dict[int, int], sums: int
) -> None:
    if name == "sm90/fwd_80_keys" and not TESTED:
        pytest.skip("this Triton does not compile it")
    variant, spec = registry.variant_named(name), Specialization("bf16", dim, dim_v, "full")
    config = variant.space.default(spec, 90)
    built = compiler.build(variant, spec, config, 90)
    command = [compiler.tool("nvdisasm"), "--print-code", "--no-dataflow", built.cubin_path]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    machine = Counter(int(wide) for wide in re.findall(r"HGMMA\.64x(\d+)x16", code))
    assert built.spills < 16

    ptx = compiler.compile_kernel(variant, spec, config, 90).asm["ptx"]
    products = [(int(wide), transposed == "1") for wide, transposed in _PRODUCT.findall(ptx)]
    assert Counter(wide for wide, transposed in products if transposed) == wanted
    assert Counter(wide for wide, _ in products) == machine
    terms = 8 if name == "sm90/bwd_fused" else 0
    assert sum(not transposed for _, transposed in products) == sums + terms


#: Kernel -> the head dims whose columns its results have, and those it sums over, but for what pieces of tiles leave out
SIDES = {
    "fwd": ("DV", ""), "fwd_split": ("DV", ""), "fwd_grouped": ("DV", ""), "bwd_fused": ("D DV", "D DV"),
    "bwd_dkdv": ("D DV", "D DV"), "bwd_dkdv_ds": ("D DV", "D DV"), "bwd_dq": ("D", "D DV"), "bwd_dq_split": ("D", "D DV"),
    "bwd_dq_ds": ("D", ""), "fwd_one_tile": ("DV", ""), "fwd_80_keys": ("DV", ""), "fwd_shares": ("DV", ""),
    "fwd_multistage": ("DV", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SIDES)
def test_no_pair_of_head_dims_loses_a_column(name: str) -> None:
    """Whatever tile has the width of another head dim's, and in all forms of parts."""
    variant, pairs = registry.variant_named(f"sm90/{name}"), itertools.product(range(8, 257, 8), repeat=2)
    forms = {"IN_PARTS": ("none", "qk", "both") if name == "fwd" else (False, True), "V_APART": (False, True)}
    seen = 0
    for dim, dim_v in pairs:
        spec = Specialization("bf16", dim, dim_v, "full")
        default = variant.space.default(spec, 90)
        for values in itertools.product(*(values if key in default else (None,) for key, values in forms.items())):
            config = {**default, **{key: value for key, value in zip(forms, values, strict=True) if value is not None}}
            if not all(rule.holds(config, spec, 90) for rule in variant.space.constraints):
                continue
            used, known, dims = (
                variant.used(spec, config),
                compiler._known(variant, spec, config),
                {"D": dim, "DV": dim_v},
            )
            for sides, widths, step in zip(SIDES[name], used[:2], (8, 16), strict=True):
                for side in sides.split():
                    first = known.get(f"PART_{side}", known[f"BLOCK_{side}"])
                    filled = -(-dims[side] // step) * step
                    for tile, wanted in ((first, min(first, filled)), (known[f"REST_{side}"], filled - first)):
                        assert tile == 0 or widths.get(tile, tile) >= wanted, (spec, config)
            seen += any(used)
    assert seen > 50


def test_a_narrower_kernel_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    variant, spec = registry.variant_named("sm90/fwd"), Specialization("bf16", 224, 224, "full")
    config = variant.space.default(spec, 90)
    keys = [compiler.source(variant, spec, config).hash()]
    monkeypatch.setattr(trimmed, "EDITION", trimmed.EDITION + 1)
    keys.append(compiler.source(variant, spec, config).hash())
    monkeypatch.setattr(trimmed, "suffix", lambda _widths: "")
    keys.append(compiler.source(variant, spec, config).hash())
    assert len(set(keys)) == 3
    assert all(len(bytes.fromhex(key)) == 32 for key in keys)  # as TRITON_KERNEL_DUMP wants it
    whole = Specialization("bf16", 256, 256, "full")
    assert trimmed.suffix(variant.used(whole, config)) == ""


def test_binaries_of_head_dims_that_pad_alike_are_filed_apart() -> None:
    """104 and 112 differ in nothing that is compiled in."""
    variant = registry.variant_named("sm90/fwd")
    specs = [Specialization("bf16", dim, dim, "full") for dim in (104, 112)]
    configs = [compiler.binary_config(variant, variant.space.default(spec, 90)) for spec in specs]
    values = [compiler.constexprs(variant, spec, config) for spec, config in zip(specs, configs, strict=True)]
    assert values[0] == values[1]
    codes = {precompiled.code_of(variant, spec, config, 90) for spec, config in zip(specs, configs, strict=True)}
    assert len(codes) == 2
