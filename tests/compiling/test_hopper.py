"""Every warp-specialised variant compiles for sm_90 with no GPU present, within the limits, to the instructions it is made of:
by default, as the shipped rows have it, and in the forms that compute-sanitizer is to see. Their numerics need a GPU:
tests/gpu/test_specialized.py."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hopper_builds import TESTED, Asked, Built, builder, chosen, written_under_way

from fa2tune import gpus
from fa2tune.calling import dispatch
from fa2tune.calling.schedules import few_tiles
from fa2tune.compiling import compiler, fingerprint, limits, registry, sass
from fa2tune.rows import reader
from fa2tune.search_spaces.sm90 import bwd_fused, fwd
from fa2tune.spec.extent import DENSE, PACKED, RAGGED
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import BACKWARD, KERNELS, Config, Problem, Specialization, padded_head_dim
from fa2tune.spec.variant import SCORE, WARP_SPECIALIZED, WINDOW, Variant

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import hopper_cases
import sanitize

H200 = gpus.named("h200")
bf16 = partial(Specialization, "bf16")
VARIANTS = [
    variant for kernel in KERNELS for variant in registry.variants_of(kernel) if WARP_SPECIALIZED in variant.implementations
]  # fmt: skip
NAMED = {variant.name: variant for variant in VARIANTS}
GROUP_WARPS = 4  #: registers are handed to warps four at a time
#: Four float32 of a thread added to device memory at once.
WIDE_SUM = "REDG.E.ADD.F32x4"


class Case(NamedTuple):
    variant: Variant
    spec: Specialization
    settings: tuple[tuple[str, Any], ...]  #: of a config: what its binary depends on
    origin: str  #: what names it

    @property
    def config(self) -> Config:
        return dict(self.settings)

    def __str__(self) -> str:
        dims = f"{self.spec.head_dim}x{self.spec.head_dim_v}"
        mask = self.spec.mask
        return f"{self.variant.name}-{self.spec.dtype}-{dims}-{mask}-{self.origin}"


def case_of(variant: Variant, spec: Specialization, config: Config, origin: str) -> Case:
    return Case(variant, spec, tuple(sorted(compiler.binary_config(variant, config).items())), origin)


def legal(variant: Variant, spec: Specialization) -> tuple[dict[str, Any], ...]:
    return hopper_cases.legal_on(variant, spec, H200)


def defaults() -> Iterator[Case]:
    for number, variant in enumerate(VARIANTS):
        mask = number % 2 == 0
        for spec in (
            *(bf16(dim, dim, mask=("full", "causal")[mask ^ (dim == 128)]) for dim in (64, 128, 256)),
            Specialization("fp16", 64, 64, mask="causal", wide=True), bf16(72, 40, mask="causal"), bf16(72, 72, mask="full"),
        ):  # fmt: skip
            default = variant.space.default(spec, 90)
            if limits.before_compile(variant, spec, default, H200) is None:
                yield case_of(variant, spec, default, "default")


def named_by_rows() -> Iterator[Case]:
    """Every binary that a shipped row names and that may be launched."""
    for path in reader.shipped_paths():
        for row in reader.read(path):
            if (
                row.implementation == WARP_SPECIALIZED
                and registry.misfit(row.key.kernel, row.implementation, row.config) is None
            ):
                variant, spec = registry.variant_of(row.key.kernel, row.config), row.key.specialization()
                if limits.before_compile(variant, spec, row.config, H200) is None:
                    yield case_of(variant, spec, row.config, "row")


#: Dimensions that say how many tiles are under way in a ring, and nothing else: a divisor in the index of a slot
RINGS = {"STAGES", "K_STAGES", "V_STAGES", "P_STAGES"}


def code_of(case: Case) -> tuple[Any, ...]:
    """What the structure of its code follows from. Left out are the lengths of rings and the element type, which change
    operands and opcodes of the same instructions; of head dims what tiles are padded to counts."""
    dims = padded_head_dim(case.spec.head_dim), padded_head_dim(case.spec.head_dim_v)
    settings = tuple(entry for entry in case.settings if entry[0] not in RINGS)
    return case.variant.name, *dims, case.spec.mask, settings


def representatives(cases: Iterator[Case]) -> list[Case]:
    """One of each structure: all 65 binaries that the rows of 2026-11-21 name take 170 s of a core, these half of that. bf16
    where there is a choice, then what most rows name."""
    rows = Counter(cases)
    found: dict[tuple[Any, ...], Case] = {}
    for case in sorted(rows, key=lambda case: (case.spec.dtype != "bf16", -rows[case], str(case), case.settings)):
        found.setdefault(code_of(case), case)
    return list(found.values())


def once(cases: list[Case]) -> list[Case]:
    """Each binary named once, and numbered."""
    found: dict[tuple[Any, ...], Case] = {}
    for case in cases:
        found.setdefault((case.variant, case.spec, case.settings), case)
    return [case._replace(origin=f"{case.origin}{number}") for number, case in enumerate(found.values())]


def of_the_sanitizer() -> Iterator[Case]:
    """Forms that benchmarks/sanitize.py is to see, which runs with the tested compiler alone. Of rows, defaults and packed
    sequences every compiler's binaries serve."""
    for form in hopper_cases.FORMS if TESTED else ():
        yield case_of(
            NAMED[form.variant],
            bf16(form.dim, form.dim, "causal" if form.causal else "full"),
            form.config(NAMED[form.variant]),
            "form",
        )


def of_packed_sequences() -> Iterator[Case]:
    """The forms of the fused backward that rows name, each for packed sequences."""
    variant = NAMED["sm90/bwd_fused"]
    concatenated = {"ORDER": "together", "REDUCE": "vector", "BLOCK_M": 64, "num_warps": 8, "EXPONENTIALS_FIRST": False}
    added = {"ORDER": "together", "REDUCE": "tma"}  # by a warp of its own
    ends, early = {"BESIDE": True, "FINISH_BESIDE": True}, {"EARLY_START": True}
    longer = {"LONGER_FIRST": True}
    for dim, mask, settings in (
        (64, "causal", added), (64, "full", concatenated), (64, "band", {}), (128, "causal", concatenated), (128, "causal", {}),
        (128, "full", {}), (64, "causal", {**added, **ends}), (64, "full", ends), (128, "causal", {**concatenated, **ends}),
        (128, "full", {**concatenated, "BESIDE": True}), (64, "band", {**concatenated, **early}),
        (128, "causal", {**concatenated, **early}),
        (128, "full", {**added, **early}), (64, "causal", early), (96, "causal", early),
        (64, "causal", longer), (128, "causal", {**concatenated, **early, **longer}), (96, "full", {**early, **longer}),
    ):  # fmt: skip
        spec = bf16(dim, dim, mask, extent=RAGGED)
        config = {**variant.space.default(spec, 90), **settings}
        assert variant.space.broken(config, spec, 90) is None
        yield case_of(variant, spec, config, "packed")


def packed_splits() -> Iterator[Case]:
    """The split backward for packed sequences, in the forms that rows name."""
    for name in ("sm90/bwd_dq", "sm90/bwd_dkdv"):
        for dim, mask in (
            (64, "causal"), (64, "full"), (128, "causal"), (128, "band"), (192, "causal"), (256, "causal"), (256, "full"),
            (256, "band"), (256, "chunked"),
        ):  # fmt: skip
            spec = bf16(dim, dim, mask, extent=RAGGED)
            config = NAMED[name].space.default(spec, 90)
            assert limits.before_compile(NAMED[name], spec, config, H200) is None
            yield case_of(NAMED[name], spec, config, "packed")


def packed_forwards() -> Iterator[Case]:
    """The forms of the forward that rows name, each for packed sequences."""
    variant = NAMED["sm90/fwd"]
    three = {"BLOCK_M": 64, "BLOCK_N": 64, "PINGPONG": False, "NUMBERED": False, "maxnreg": 80, "Q_IN_REGISTERS": True}
    never = {"RESCALE": "never"}
    for dim, mask, settings in (
        (64, "causal", three), (64, "causal", {"BLOCK_M": 128, "Q_STAGES": 2}), (64, "causal", {}), (64, "full", {}),
        (128, "causal", {}), (128, "full", {}), (128, "band", {}), (256, "causal", {}), (96, "causal", {}),
        (64, "causal", {"BLOCK_N": 64, "STAGES": 3, **never}), (64, "full", {"Q_STAGES": 1, "STAGES": 3, **never}),
        (64, "causal", never), (64, "full", never), (64, "causal", {"BLOCK_M": 128, "Q_STAGES": 2, **never}),
        (128, "causal", never), (128, "full", {"Q_STAGES": 1, **never}), (128, "causal", "few tiles"),
        (128, "full", "few tiles"), (128, "band", "few tiles"), (96, "band", "few tiles"), (96, "causal", "few tiles"),
        (80, "full", "few tiles"),
    ):  # fmt: skip
        spec = bf16(dim, dim, mask, extent=RAGGED)
        config = fwd.few_tiles(spec) if isinstance(settings, str) else {**variant.space.default(spec, 90), **settings}
        assert limits.before_compile(variant, replace(spec, extent=DENSE), config, H200) is None
        yield case_of(variant, spec, config, "packed")


def of_few_tiles() -> Iterator[Case]:
    """The forward of calls of few tiles, which no row names."""
    for dims, mask in (
        ((32, 32), "full"), ((48, 48), "causal"), ((64, 64), "full"), ((80, 80), "causal"), ((96, 96), "full"),
        ((128, 128), "causal"), ((160, 160), "full"), ((72, 144), "causal"), ((192, 128), "full"), ((168, 168), "causal"),
    ):  # fmt: skip
        spec = bf16(*dims, mask)
        for config in few_tiles.configs(spec, 90):
            assert limits.before_compile(NAMED["sm90/fwd"], spec, config, H200) is None
            yield case_of(NAMED["sm90/fwd"], spec, config, "few tiles")
            if dims[0] in (64, 128, 160):  # as short calls have it
                yield case_of(NAMED["sm90/fwd"], spec, {**config, "DIVISORS": True}, "few tiles")


PACKED_CASES = [*packed_forwards(), *of_packed_sequences(), *packed_splits()]
CASES = once([*defaults(), *of_few_tiles(), *PACKED_CASES, *of_the_sanitizer(), *representatives(named_by_rows())])
every = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Built]]:
    """Case -> what becomes of it."""
    wanted: dict[Case, Asked] = {case: (case.variant.name, case.spec, case.settings) for case in chosen(request)}
    with builder([*wanted.values()]) as build:
        yield lambda case: build(wanted[case])


# ---- the description


def test_the_house_has_some() -> None:
    assert NAMED.get("sm90/fwd") is not None


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_it_is_described_so_that_it_binds(variant: Variant) -> None:
    portable = registry.portable_of(variant.serves)
    assert compiler.is_gluon(variant) and variant.implementations == (WARP_SPECIALIZED,)
    assert set(variant.descriptors) <= set(variant.tensors) <= set(variant.parameters)
    assert set(variant.grid_dimensions) <= set(variant.space.dimensions)
    assert {constraint.name for constraint in variant.space.constraints if not constraint.why} == set()
    assert fingerprint.kernel_hash(variant, "full") != fingerprint.kernel_hash(portable, "full")
    for name in (*variant.before, *variant.after):
        assert not registry.variant_named(name).serves
    problem = Problem("bf16", 2, 6, 3, 1000, 777, 128, 128, CAUSAL)
    spec = problem.specialization
    for config in legal(variant, spec)[::97]:
        assert variant.programs(problem, config, 132) >= 1
        values = compiler.constexprs(variant, spec, config)
        # compiled in: neither mask is bounded on the left, there is no score term, and no sequences are packed
        fixed = {*WINDOW, *SCORE, *PACKED} & set(variant.parameters)
        described = compiler.described(variant, spec, config)
        absent = set(variant.descriptors) - set(described)  # of a second part of a head dim: 128 has one
        assert absent == set(variant.rest_of)
        assert set(values) == set(variant.constexpr_names) | fixed | absent
        workspaces = variant.workspaces(problem, config)
        for name in described:
            block = compiler.block_of(variant, spec, config, name)
            assert all(side & (side - 1) == 0 and 1 <= side <= 256 for side in block), (name, block)
            if name in workspaces:
                shape = workspaces[name] if not isinstance(workspaces[name], str) else workspaces[workspaces[name]]
                assert len(shape[0]) == len(block)
    # every dimension has some use: a value of it that no legal config takes is noise
    unused = {(name, value) for name, values in variant.space.dimensions.items() for value in values}
    for dims, mask in product(((32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (96, 64)), ("full", "causal")):
        unused -= {entry for one in legal(variant, bf16(*dims, mask)) for entry in one.items()}
    assert not unused


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_what_tma_cannot_address_is_refused_with_a_reason(variant: Variant) -> None:
    good = bf16(128, 128, "causal")
    config = variant.space.default(good, 90)
    assert limits.before_compile(variant, good, config, H200) is None
    for spec in (bf16(128, 128, "causal", aligned=False), Specialization("fp32", 64, 64, "causal")):
        refused = limits.before_compile(variant, spec, config, H200)
        assert refused is not None and len(refused.why) > 20, spec
        assert not legal(variant, spec)
    for gpu in ("a100", "rtx-4090", "b200"):
        refused = limits.before_compile(variant, good, config, gpus.named(gpu))
        assert refused is not None and refused.name == "architecture"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("dim", range(16, 257, 8))
def test_the_default_is_legal_at_every_head_dim(variant: Variant, dim: int) -> None:
    for causal in (False, True):
        for dtype in ("bf16", "fp16"):
            spec = Specialization(dtype, dim, dim, "causal" if causal else "full")
            config = variant.space.default(spec, 90)
            assert set(config) == set(variant.space.dimensions)
            assert all(config[name] in values for name, values in variant.space.dimensions.items())
            refused = limits.before_compile(variant, spec, config, H200)
            assert refused is None or not legal(variant, spec), refused


def test_what_rows_name_may_be_launched() -> None:
    """All of them, those too that share the structure of another and are not compiled here."""
    rows = [
        row
        for path in reader.shipped_paths()
        for row in reader.read(path)
        if row.implementation == WARP_SPECIALIZED and row.key.kernel != BACKWARD
    ]
    assert rows
    for row in rows:
        assert registry.misfit(row.key.kernel, row.implementation, row.config) is None, row
        variant = registry.variant_of(row.key.kernel, row.config)
        assert limits.before_compile(variant, row.key.specialization(), row.config, H200) is None, row


def test_what_rows_name_is_among_the_cases() -> None:
    """Each structure of code that users are served, of every kernel."""
    served = list(named_by_rows())
    assert {case.variant for case in served} == set(VARIANTS)
    assert {code_of(case) for case in served} <= {code_of(case) for case in CASES}


# ---- what compute-sanitizer sees


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "gpu_of", lambda device: H200)


#: What must be among the cases of a variant, beside each value that is compiled in.
SEEN: dict[str, Callable[[Variant, Config, Problem], bool]] = {
    "concatenated groups, dQ by TMA": lambda v, c, p: c.get("REDUCE") == "tma" and c["num_warps"] == 2 * GROUP_WARPS,
    **{
        f"{order}, dQ by {reduce}, head dim {dim}": lambda v, c, p, order=order, reduce=reduce, dim=dim: (
            (c.get("ORDER"), c.get("REDUCE"), p.head_dim) == (order, reduce, dim) and takes_several(v, c, p)
        )
        for order, reduce, dim in (
            ("together", "tma", 64), ("together", "tma", 128), ("together", "vector", 64), ("together", "vector", 128),
            ("behind", "vector", 64), ("behind", "vector", 128), ("behind", "tma", 128), ("ahead", "vector", 64),
            ("ahead", "tma", 128),
        )
    },
    **{
        f"tiles from a counter, {name}": lambda v, c, p, warps=warps, order=order: (
            c.get("DYNAMIC") and (c["num_warps"], c["ORDER"]) == (warps, order) and takes_several(v, c, p)
        )
        for name, warps, order in (("an adder beside", GROUP_WARPS, "together"), ("none", GROUP_WARPS, "behind"),
                                   ("concatenated", 2 * GROUP_WARPS, "together"))
    },
    "tiles from a counter, no mask": lambda v, c, p: c.get("DYNAMIC") and p.mask == FULL and takes_several(v, c, p),
    **{
        f"prepared overlapped with tiles, {'causal' if causal else 'full'}, {dim}": lambda v, c, p, causal=causal, dim=dim: (
            c.get("BESIDE") and (p.mask == CAUSAL, p.head_dim) == (causal, dim) and takes_several(v, c, p)
        )
        for causal in (False, True) for dim in (64, 128)
    },
    **{
        f"dQ finished beside the tiles, by {reduce}, {warps} warps, {dim}": (
            lambda v, c, p, reduce=reduce, warps=warps, dim=dim: (
                c.get("FINISH_BESIDE") and (c["REDUCE"], c["num_warps"], p.head_dim) == (reduce, warps, dim)
                and takes_several(v, c, p)
            )
        )
        for reduce, warps, dim in (("vector", 4, 64), ("tma", 4, 64), ("vector", 8, 64), ("vector", 8, 128), ("vector", 4, 128),
                                   ("tma", 8, 128))
    },
    "K of two tiles": lambda v, c, p: (
        "DYNAMIC" in c and v.constants(p.specialization, c)["K_STAGES"] == 2 and takes_several(v, c, p)
    ),
    "pairs of tiles": lambda v, c, p: bool(c.get("PAIRS")),
    "several pairs a program": lambda v, c, p: bool(c.get("PAIRS")) and takes_several(v, c, p),
    "several tiles a program, concatenated": lambda v, c, p: c["num_warps"] == 2 * GROUP_WARPS and takes_several(v, c, p),
    "several tiles a program, apart": lambda v, c, p: "ORDER" in c and c["num_warps"] == GROUP_WARPS and takes_several(v, c, p),
    "the next tile's Q": lambda v, c, p: c.get("Q_STAGES") == 2 and takes_several(v, c, p),
    "two programs a multiprocessor": lambda v, c, p: v.name == "sm90/fwd" and c["maxnreg"] == 128 and takes_several(v, c, p),
    "three programs a multiprocessor": lambda v, c, p: v.name == "sm90/fwd" and c["maxnreg"] == 80 and takes_several(v, c, p),
    **{
        f"named barriers, {count} programs a multiprocessor": lambda v, c, p, registers=registers: (
            c.get("NUMBERED") and c["maxnreg"] == registers and takes_several(v, c, p)
        )
        for count, registers in (("two", 128), ("three", 80))
    },
    **{
        f"K and V at named barriers, {'in turn' if turns else 'out of turn'}, {'causal' if causal else 'full'}":
            lambda v, c, p, turns=turns, causal=causal: (
                c.get("NUMBERED") and c["PINGPONG"] == turns and (p.mask == CAUSAL) == causal and takes_several(v, c, p)
            )
        for turns in (False, True) for causal in (False, True)
    },
    **{
        f"scores that norms bound, {'causal' if causal else 'full'}, {dim}": lambda v, c, p, causal=causal, dim=dim: (
            c.get("RESCALE") == "never" and (p.mask == CAUSAL, p.head_dim) == (causal, dim) and takes_several(v, c, p)
        )
        for causal in (False, True) for dim in (64, 128, 256)
    },
}  # fmt: skip


def takes_several(variant: Variant, config: Config, problem: Problem) -> bool:
    """Whether there are more tiles, or pairs of them, than programs."""
    return variant.programs(problem, config, limits.MANY_SMS) > variant.programs(problem, config, H200.sm_count)


@pytest.mark.usefixtures("on_an_h200")
def test_the_sanitizer_sees_every_form() -> None:
    cases = hopper_cases.small_cases()
    for variant, config, problem in cases:
        assert limits.before_compile(variant, problem.specialization, config, H200) is None
    assert [name for name, holds in SEEN.items() if not any(holds(*case) for case in cases)] == []
    for variant in VARIANTS:
        specs = {problem.specialization for one, _, problem in cases if one is variant}
        seen = {entry for one, config, _ in cases if one is variant for entry in config.items()}
        able = {entry for spec in specs for c in legal(variant, spec) for entry in c.items() if entry not in seen}
        assert specs
        assert not {entry for entry in able if entry[0] not in compiler.runtime_names(variant)}
    assert len(cases) == sum(len(hopper_cases.small_cases((kernel,))) for kernel in KERNELS), (
        "kernel by kernel, as it runs"
    )


@pytest.mark.usefixtures("on_an_h200")
def test_a_form_that_is_no_longer_legal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = hopper_cases.Form("sm90/bwd_fused", 128, False, {"ORDER": "behind", "num_warps": 8})
    monkeypatch.setattr(hopper_cases, "FORMS", (*hopper_cases.FORMS, lost))
    with pytest.raises(ValueError, match=r"sm90/bwd_fused.*behind.*joined_groups_go_together"):
        hopper_cases.small_cases()


@pytest.mark.usefixtures("on_an_h200")
def test_a_case_that_no_longer_compiles_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_cases, "compilable", lambda cases: cases[1:])
    with pytest.raises(RuntimeError, match=r"^1 of \d+ cases do not compile: .*BLOCK_M"):
        hopper_cases.small(("fwd",))


def test_the_sanitizer_runs_the_small_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "ran a case\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert sanitize.check("compute-sanitizer", "fwd", sanitize.TOOLS, 60, tmp_path)
    small = [sys.executable, hopper_cases.__file__, "small", "fwd"]
    alone, *watched = commands
    assert alone == small
    assert [command[-len(small) :] for command in watched] == [small] * len(sanitize.TOOLS)
    assert [command[:3] for command in watched] == [["compute-sanitizer", "--tool", tool] for tool in sanitize.TOOLS]


# ---- the binary


@every
def test_it_compiles_within_the_limits(case: Case, built: Callable[[Case], Built]) -> None:
    binary = built(case).binary
    assert limits.after_compile(binary, H200) is None, binary
    assert limits.blocks_per_sm(binary, H200) >= 1
    assert binary.num_warps > case.config["num_warps"], "partitions count, not the default one alone"
    assert binary.registers * binary.num_warps * limits.WARP_THREADS <= H200.registers_per_sm
    assert binary.shared_bytes <= H200.shared_per_block


@every
def test_partitions_share_out_no_more_registers_than_there_are(case: Case, built: Callable[[Case], Built]) -> None:
    """Warps that ask for more than the block's pool holds wait for ever."""
    binary, ttgir = built(case).binary, built(case).ttgir
    found = re.search(r"requestedRegisters = array<i32: ([\d, ]+)>", ttgir)
    warps = [int(count) for count in re.findall(r"partition\d+\(.*?\) num_warps\((\d+)\)", ttgir)]
    assert found and warps
    asked = [int(registers) for registers in found[1].split(",")]
    # the workers' warps fill whole groups together; the default partition has what is left
    workers = sum(count * registers for count, registers in zip(warps, asked, strict=True))
    default = case.config["num_warps"]
    padding = binary.num_warps - default - sum(warps)
    pool = binary.registers * binary.num_warps
    assert 0 <= padding < GROUP_WARPS
    assert workers + 24 * default + min(asked) * padding <= pool
    assert all(24 <= registers <= 256 and registers % 8 == 0 for registers in asked)


@pytest.mark.parametrize("case", [case for case in CASES if case.variant.name == "sm90/bwd_fused"], ids=str)
def test_its_shared_memory_is_as_reckoned(case: Case, built: Callable[[Case], Built]) -> None:
    assert built(case).binary.shared_bytes <= bwd_fused.shared_bytes(case.config, case.spec)


@every
def test_its_instructions_are_those_meant(case: Case, built: Callable[[Case], Built]) -> None:
    text = built(case).listing
    assert "HGMMA" in text and not re.search(r"\bHMMA", text)
    assert "UTMALDG" in text and "SYNCS" in text and "USETMAXREG" in text
    assert "LDGSTS" not in text
    assert "UTMASTG" in text, "results leave by TMA"
    reduce = case.config.get("REDUCE")
    assert ("UTMAREDG" in text) == (reduce == "tma")
    assert (WIDE_SUM in text) == (reduce == "vector")
    if reduce == "tma":
        assert "STS.128" in text, "dQ is staged without bank conflicts"
    narrow = re.findall(rf"\b(?:RED|REDG|ATOMG)\.(?!{WIDE_SUM.partition('.')[2]})\S+", text)
    beside, finish = bool(case.config.get("BESIDE")), bool(case.config.get("FINISH_BESIDE"))
    counters = bool(case.config.get("DYNAMIC")) + finish
    if case.spec.ragged:
        counters += 2 * finish  # programs that are done, and whether all are
    if case.variant.serves == "fwd" and case.spec.ragged:
        counters += min(2, len(narrow))  # one a tile, whose loop's first trip may stand by itself
        assert narrow
    assert len(narrow) == counters, "only tiles are counted, taken or done; nothing is summed a word at a time"
    early = case.variant.serves if case.config.get("EARLY_START") else None  # dq comes first, dkdv waits for it
    ordered = case.variant.serves == "fwd" and case.spec.ragged  # it waits for the kernel that orders its tiles
    waits = {name: name in text for name in ("ACQBULK", "LDG.E.STRONG.GPU", "PREEXIT")}
    assert waits == {
        "ACQBULK": ordered or beside or early in ("bwd_fused", "bwd_dkdv"),
        "LDG.E.STRONG.GPU": beside,
        "PREEXIT": finish or early in ("bwd_fused", "bwd_dq"),
    }, "for flags, and for the kernel that sets them; the one that waits for its counts, or for its end, may start"


@pytest.mark.parametrize("finish", [{}, {"FINISH_BESIDE": True, "REDUCE": "vector", "DYNAMIC": True}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_what_is_prepared_beside_is_told_in_order(dim: int, causal: bool, finish: Config) -> None:
    """Main may start once flags are cleared, for all to see; a flag is set once all it stands for can be seen."""
    mask = "causal" if causal else "full"
    fused, spec = registry.variant_named("sm90/bwd_fused"), Specialization("bf16", dim, dim, mask)
    config = {**fused.space.default(spec, 90), "BESIDE": True, **finish}
    assert fused.space.broken(config, spec, 90) is None
    ((beside, settings), *others), _ = compiler.around(fused, spec, config, 90)
    assert beside.name == "sm90/bwd_prepare_overlapped" and others == []
    with builder([(beside.name, spec, tuple(settings.items()))]) as built:
        made = built((beside.name, spec, tuple(settings.items())))
    assert limits.after_compile(made.binary, H200) is None and made.binary.stack_bytes == 0
    assert limits.blocks_per_sm(made.binary, H200) == 1, "its programs are spread out, and leave no room for main's"
    names = [operation.partition(" ")[0] for operation in made.operations]
    start = names.index("PREEXIT")
    cleared = max(place for place, name in enumerate(names) if name == "STG.E")  # terms go 16 bytes at a time
    assert names.count("PREEXIT") == 1 and "MEMBAR.ALL.GPU" in names[cleared:start]
    (told,) = (place for place, name in enumerate(names) if name == "STG.E.STRONG.GPU")
    stored = max(place for place in range(told) if names[place] in ("UTMASTG.4D", "DEPBAR.LE"))
    assert names[stored] == "DEPBAR.LE" and "MEMBAR.ALL.GPU" in names[stored:told], "zeros are there, then the flag"
    assert "UTMALDG.4D" in names and not {"LDG.E.STRONG.GPU", "ACQBULK"} & set(names), "it waits for nothing"


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_dq_is_finished_beside_in_order(dim: int) -> None:
    """The last tile's sums are seen before any is read, and the kernel after comes after main."""
    fused, spec = registry.variant_named("sm90/bwd_fused"), Specialization("bf16", dim, dim, "full")
    config = {**fused.space.default(spec, 90), "REDUCE": "vector", "BESIDE": True, "FINISH_BESIDE": True}
    assert fused.space.broken(config, spec, 90) is None
    _, ((finish, settings), *others) = compiler.around(fused, spec, config, 90)
    asked = Problem("bf16", 1, 1, 1, 64, 64, dim, dim, FULL)
    assert finish.name == "sm90/bwd_finish" and others == [] and finish.early(asked, settings, 132)
    with builder([(finish.name, spec, tuple(settings.items()))]) as built:
        made = built((finish.name, spec, tuple(settings.items())))
    assert limits.after_compile(made.binary, H200) is None and made.binary.stack_bytes == 0
    assert limits.blocks_per_sm(made.binary, H200) >= 4, "memory is to be kept busy where others have left"
    names = [operation.partition(" ")[0] for operation in made.operations]
    asked = names.index("LDG.E.STRONG.GPU")
    read = min(place for place, name in enumerate(names) if name.startswith("LDG") and "STRONG" not in name)
    forgotten = names.index("CCTL.IVALL", asked)
    assert forgotten < names.index("BAR.SYNC.DEFER_BLOCKING", forgotten) < read, "a head's count, then its sums"
    written = max(place for place, name in enumerate(names) if name.startswith("STG"))
    assert names.count("ACQBULK") == 1 and names.index("ACQBULK") > written and "PREEXIT" not in names


#: Of packed sequences the same code stands after another wait, for what the producer tells.
COUNTING = [case for case in CASES if case.config.get("FINISH_BESIDE") and not case.spec.ragged]


@pytest.mark.parametrize("case", COUNTING, ids=str)
def test_a_tile_is_counted_once_it_is_added(case: Case, built: Callable[[Case], Built]) -> None:
    """For all to see. The warp that counts starts what waits for it: what stands between is its own."""
    operations = built(case).operations
    names = [operation.partition(" ")[0] for operation in operations]
    start, counted = names.index("PREEXIT"), names.index("REDG.E.ADD.STRONG.GPU")
    assert names.count("PREEXIT") == names.count("REDG.E.ADD.STRONG.GPU") == 1 and start < counted
    own = names[start:counted]
    seen = len(own) - 1 - own[::-1].index("MEMBAR.ALL.GPU")
    if case.config["REDUCE"] == "tma":  # its own: beside the waits for what they read, one for all that they do
        added = max(place for place, name in enumerate(own) if name.startswith("UTMAREDG"))
        assert own[added:seen].count("DEPBAR.LE") == 2
        return
    (waited,) = (one for one in operations[start : start + seen] if one.startswith("SYNCS.PHASECHK"))
    barrier = re.search(r"\+(0x[0-9a-f]+)\]", waited)
    assert barrier, "the groups come to tiles_done, in shared memory"
    arrivals = [place for place, one in enumerate(operations) if one.startswith("SYNCS.ARRIVE")]
    comes = [place for place in arrivals if f"+{barrier[1]}]" in operations[place]]
    assert len(comes) == (1 if case.config["num_warps"] == 2 * GROUP_WARPS else 2), "once in each group's code"
    added = [place for place, name in enumerate(names) if WIDE_SUM in name]
    stored = [place for place, name in enumerate(names) if name.startswith("UTMASTG")]
    for come in comes:
        last = max(place for place in added if place < come)
        assert "BAR.SYNC.DEFER_BLOCKING" in names[last:come], "with all its warps"
        over = next(place for place in stored if place > come)
        assert not any(come < place < over for place in added), "nothing is added between this and dV's store"


def test_multiprocessors_that_are_left_to_helpers() -> None:
    """Where main has many tiles, or a mask: as many as go on preparing, so that no program of main starts late and keeps the
    epilogue from starting."""
    fused = registry.variant_named("sm90/bwd_fused")
    lengths = (1, 128, 512, 2048, 16384)
    for rows, keys, causal, sm_count in product(lengths, (77, *lengths), (False, True), (1, 2, 16, 114, 132)):
        asked = Problem("bf16", 64, 32, 32, rows, keys, 64, 64, CAUSAL if causal else FULL)
        config = {**fused.space.default(asked.specialization, 90), "DYNAMIC": True, "BESIDE": True}
        finish = {**config, "FINISH_BESIDE": True}
        told = fused.scalars(asked, finish, True)
        go_on = min(-(-sm_count * told["rows_worth"] // told["keys_seen"]), sm_count)
        main = fused.programs(asked, finish, sm_count)
        assert main == max(sm_count - go_on, 1), (rows, keys, causal, sm_count)
        assert fused.programs(asked, config, sm_count) == fused.programs(asked, finish, sm_count, early=False)
        alone = fused.scalars(asked, finish, False)
        assert alone["rows_worth"] >= alone["keys_seen"], "alone, all prepare"


@pytest.mark.parametrize(
    ("heads", "keys", "main"), [(16, 1024, 128), (33, 512, 132), (512, 1024, 124), (33, 1024, 132), (1, 128, 1)]
)
def test_helpers_cost_the_main_kernel_no_round(heads: int, keys: int, main: int) -> None:
    """Of 132 multiprocessors 8 are their share at 1024 keys, 15 at 512, 44 at 128."""
    fused = registry.variant_named("sm90/bwd_fused")
    asked = Problem("bf16", 1, heads, heads, 1024, keys, 64, 64, FULL)
    finish = {**fused.space.default(asked.specialization, 90), "DYNAMIC": True, "BESIDE": True, "FINISH_BESIDE": True}
    assert fused.programs(asked, finish, 132) == main


@pytest.mark.parametrize("lengths", [(1, 1), (7, 7), (5, 9), (9, 5), (300, 1), (1, 300)])
def test_keys_that_a_row_sees(lengths: tuple[int, int]) -> None:
    rows, keys = lengths
    seen = [min(max(row + 1 + keys - rows, 0), keys) for row in range(rows)]
    asked = Problem("bf16", 2, 6, 3, rows, keys, 64, 64, CAUSAL)
    assert asked.keys_seen == pytest.approx(sum(seen) / rows)
    assert replace(asked, mask=FULL).keys_seen == keys


@every
def test_no_product_waits_for_the_one_before(case: Case, built: Callable[[Case], Built]) -> None:
    """ptxas says so (C7510 to C7514) where it has to serialise wgmma: then the kernel is lost."""
    said = built(case).said
    assert "Compiling entry function" in said, "it was heard"
    assert not re.findall(r"C75\d\d", said)


@pytest.mark.parametrize("case", [case for case in CASES if case.variant.name == "sm90/bwd_fused"], ids=str)
def test_operands_of_products_under_way_stay_in_their_registers(case: Case, built: Callable[[Case], Built]) -> None:
    """The ones that terms are multiplied by are kept for no wait in the source: it is ptxas that leaves them alone."""
    written, of_ones = written_under_way(built(case).operations)
    assert not written
    assert of_ones >= (8 if case.config["num_warps"] == GROUP_WARPS else 4), "of S and dP, in either loop of each code"


# ---- exponentials beside products

#: Scores a thread has of the smallest tile, 64 x 64 in a group of four warps: a loop with as many exponentials is a main loop
SCORES = 64 * 64 // (GROUP_WARPS * limits.WARP_THREADS)
#: Of a main loop's exponentials, how many run beside the group's own product where that is claimed. ptxas may move a few
#: behind the wait, for their registers' sake (1.0 of what claims it, Triton 3.6 and 3.9); where it gives an overlap
#: up, a loop of the kernel is left with next to none.
BESIDE = 0.8


def beside_its_own(case: Case) -> bool:
    """Whether a config claims that the exponentials of a group run while a product of its own, dP, is in flight.

    The dimension EXPONENTIALS_FIRST asks ptxas for it, which does as it likes: in the order "together" with vector reductions
    it can be relied on, apart or concatenated, with both Tritons. Elsewhere it is so in some loops, and moves the wait above
    most exponentials in others (docs/experiments.md), in the other kernels in all of them."""
    config = case.config
    return bool(config.get("EXPONENTIALS_FIRST") and (config["ORDER"], config["REDUCE"]) == ("together", "vector"))


def beside_anothers(case: Case) -> bool:
    """Whether it rests on groups that are apart, so that one exponentiates while another's products run. (Of groups
    concatenated in one partition, without the overlap above, nothing is claimed; nor in the order "ahead", where ptxas scatters
    exponentials among the steps of dP.)"""
    apart = case.config["num_warps"] == GROUP_WARPS and case.config.get("ORDER") != "ahead"
    return apart and not beside_its_own(case)


def groups_that_exponentiate(case: Case) -> int:
    if case.variant.serves == "fwd":
        return int(case.config["BLOCK_M"]) // 64
    return 1 if case.config.get("OWN") == "products" else 2


def test_some_configs_claim_each_kind_of_overlap() -> None:
    for claim in (beside_its_own, beside_anothers):
        assert "sm90/bwd_fused" in {case.variant.name for case in CASES if claim(case)}, claim


@pytest.mark.parametrize("case", [case for case in CASES if beside_its_own(case)], ids=str)
def test_exponentials_run_beside_a_product_of_the_group(case: Case, built: Callable[[Case], Built]) -> None:
    """Between an HGMMA and the wait for it stand most of the MUFU.EX2 of each main loop: of either group, masked or not."""
    rich = [loop for loop in sass.loops(built(case).listing) if loop.mufu >= SCORES]
    # what holds several main loops is a loop over tiles
    mains = [loop for loop in rich if loop.products == min(loop.products for loop in rich)]
    assert len(mains) >= 2
    pending, mufu = sass.PHASE.index("pending"), sass.PHASE.index("mufu")
    for loop in mains:
        assert sum(phase[mufu] for phase in loop.phases if phase[pending] != 0) >= BESIDE * loop.mufu, loop.phases


@pytest.mark.parametrize("case", [case for case in CASES if beside_anothers(case)], ids=str)
def test_no_group_waits_for_another_among_its_exponentials(case: Case, built: Callable[[Case], Built]) -> None:
    """Each group has exponentials of its own, and between the first and the last of a block no BAR but one of its own warps."""
    operations = built(case).operations
    met: list[str] = []
    stretches = 0
    pieces = re.split(r"^HGMMA.*\n?", "\n".join(operations), flags=re.MULTILINE)
    # ptxas may issue a product step by step among them
    for stretch in ("".join(found) for some, found in groupby(pieces, lambda piece: "MUFU.EX2" in piece) if some):
        exponentials = [match.start() for match in re.finditer(r"^MUFU\.EX2", stretch, re.MULTILINE)]
        if len(exponentials) >= SCORES:
            stretches += 1
            met += re.findall(r"^BAR\.(?!ARV).*", stretch[exponentials[0] : exponentials[-1]], re.MULTILINE)
    assert stretches >= groups_that_exponentiate(case)
    own = rf"BAR\.SYNC\.DEFER_BLOCKING 0x[0-9a-f]+, {GROUP_WARPS * limits.WARP_THREADS:#x}"
    assert [barrier for barrier in met if not re.fullmatch(own, barrier)] == []
