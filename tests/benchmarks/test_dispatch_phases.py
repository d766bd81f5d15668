"""Which of racecheck's hazards benchmarks/sanitize.py excuses: Triton's dispatch of partitions, read off a binary, and no
other. Needs no GPU."""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path

import pytest

from fa2tune.compiling import compiler, registry, sass
from fa2tune.spec.problem import Specialization

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import dispatch_phases
import sanitize
from dispatch_phases import Access, Unproven

BODIES = frozenset({2})  #: the interval of the partitions' own work
KERNEL = "fwd_hopper_kernel"


def listing_of(name: str) -> str:
    variant, spec = registry.variant_named(name), Specialization("bf16", 64, 64, mask="causal")
    return sass.disassembly(compiler.build(variant, spec, variant.space.default(spec, 90), 90).cubin_path)


@pytest.fixture(scope="module")
def listing() -> str:
    return listing_of("sm90/fwd")


@pytest.fixture(scope="module")
def accesses(listing: str) -> dict[int, Access]:
    """Which checks the dispatch on the way."""
    return dispatch_phases.accesses(listing)


def offset(access: Access) -> int:
    """In shared memory, less what registers add."""
    match = re.search(r"\+(0x[0-9a-f]+)\]", access.operands)
    return int(match[1], 16) if match else 0


def state(accesses: dict[int, Access]) -> tuple[int, list[int]]:
    """Addresses of the one read of the state bytes and of the writes to them."""
    (read,) = (at for at, access in accesses.items() if access.opcode == "LDS.U8")
    first = offset(accesses[read]) + 4  # the first worker is the block's fifth warp
    writes = [at for at, one in accesses.items() if one.opcode.startswith("STS") and offset(one) in (first, first + 4)]
    return read, writes


def report(read: int, *writes: int) -> list[str]:
    said = [f"========= Error: Race reported between Read access at {KERNEL}+{read:#x}"]
    return [
        *said,
        *(f"=========     and Write access at {KERNEL}+{write:#x} [4 hazards]" for write in writes),
        "========= ",
    ]


def swapped(line: str) -> str:
    return re.sub("Read|Write", lambda kind: "Write" if kind[0] == "Read" else "Read", line)


def test_barriers_of_the_block_keep_reads_of_the_state_apart_from_its_writes(accesses: dict[int, Access]) -> None:
    read, writes = state(accesses)
    assert accesses[read].intervals == {1, 4}
    assert {interval for write in writes for interval in accesses[write].intervals} == {0, 3}
    assert all(dispatch_phases.excused([accesses], read, write) for write in writes)


def test_captures_are_written_before_they_are_read(accesses: dict[int, Access]) -> None:
    captures = [at for at, one in accesses.items() if one.opcode.startswith("LDS") and one.intervals == {1}]
    assert captures
    assert all(
        dispatch_phases.excused([accesses], at, write)
        for at in captures for write, one in accesses.items()
        if one.opcode.startswith("STS") and offset(one) == offset(accesses[at]) and not one.intervals & BODIES
    )  # fmt: skip


def test_a_pair_inside_the_partitions_is_not_excused() -> None:
    """In the one kernel of these whose partitions load what they store."""
    accesses = dispatch_phases.accesses(listing_of("sm90/bwd_dkdv"))
    inside = [(at, one.opcode[:3]) for at, one in accesses.items() if one.intervals == BODIES]
    reads, writes = ([at for at, opcode in inside if opcode == kind] for kind in ("LDS", "STS"))
    assert reads and writes
    assert not any(dispatch_phases.excused([accesses], a, b) for a, b in product(reads, writes))


def test_every_binary_that_has_the_pair_must_agree(accesses: dict[int, Access]) -> None:
    read, (write, *_) = state(accesses)
    other = {read: Access("LDS", "", BODIES), write: Access("STS", "", BODIES)}
    elsewhere = {read: Access("LDS", "", BODIES)}
    never = {read: Access("LDS", "", frozenset()), write: Access("STS", "", BODIES)}
    assert dispatch_phases.excused([accesses, elsewhere], read, write)
    assert not dispatch_phases.excused([accesses, other], read, write)
    assert not dispatch_phases.excused([never], read, write)
    assert not dispatch_phases.excused([elsewhere], read, write)
    assert not dispatch_phases.excused([accesses], write, read)
    assert not dispatch_phases.excused([], read, write)


def test_a_barrier_short_proves_nothing(listing: str) -> None:
    meetings = [match.span() for match in re.finditer(r"BAR\.SYNC\S* 0x1 ;", listing)]
    assert len(meetings) > 5
    for start, end in meetings:
        with pytest.raises(Unproven):
            dispatch_phases.accesses(f"{listing[:start]}NOP ;{listing[end:]}")


def test_a_function_that_only_computes_is_passed_over() -> None:
    """The rare cases of a division, in the one kernel that divides."""
    fused, spec = registry.variant_named("sm90/bwd_fused"), Specialization("bf16", 64, 64, mask="causal")
    config = {**fused.space.default(spec, 90), "BESIDE": True}
    ((variant, settings),), _ = compiler.around(fused, spec, config, 90)
    listing = sass.disassembly(compiler.build(variant, spec, settings, 90).cubin_path)
    assert len(re.findall(r"CALL\.REL\.NOINC `\(\$__internal", listing)) == 1
    found = dispatch_phases.accesses(listing)
    read, writes = state(found)
    assert writes and all(dispatch_phases.excused([found], read, write) for write in writes)
    called = listing.index("\n$__internal_")
    kernel, function = listing[:called], listing[called:]
    inside, outside = (re.findall(r"^(\.L_\w+):", text, re.MULTILINE)[0] for text in (function, kernel))
    for does_more in ("BAR.SYNC.DEFER_BLOCKING 0x1 ;", "LDS R3, [R4] ;", "EXIT ;", f"BRA `({outside}) ;"):
        with pytest.raises(Unproven, match="internal"):
            dispatch_phases.accesses(kernel + re.sub(r"MUFU\.RCP [^;]*;", does_more, function, count=1))
    with pytest.raises(Unproven, match="out of the kernel"):
        dispatch_phases.accesses(re.sub(r"CALL\.REL\.NOINC [^;]*;", f"BRA `({inside}) ;", kernel, count=1) + function)


def test_a_kernel_without_partitions_proves_nothing() -> None:
    with pytest.raises(Unproven):
        dispatch_phases.accesses(listing_of("portable/fwd"))


def test_reports_are_checked_pair_by_pair(
    accesses: dict[int, Access], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, (write, *_) = state(accesses)
    body = next(at for at, one in accesses.items() if one.opcode.startswith("STS") and one.intervals == BODIES)
    monkeypatch.setattr(sanitize, "binaries_in", lambda cache, kernels: {kernel: [accesses] for kernel in kernels})
    good, bad = report(read, write), report(body, write, body)
    of = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)".format
    assert sanitize.check_races([*good, *good, of(2, 2)], Path())
    assert "2 of 2 hazards left out" in capsys.readouterr().out
    assert not sanitize.check_races([*good, *bad, of(2, 2)], Path())
    said = capsys.readouterr().out
    assert "1 of 2 hazards left out" in said and all(line in said for line in bad[:-1]) and good[0] not in said
    mirrored = [swapped(line) for line in report(write, read)]  # "between Write access at ... and Read access at ..."
    assert sanitize.check_races([*mirrored, of(1, 1)], Path())
    assert not sanitize.check_races([*good, of(2, 2)], Path())  # a report cut short
    assert not sanitize.check_races([*report(read), of(1, 1)], Path())  # a read with nothing
    assert not sanitize.check_races([line.replace("Read", "Write") for line in [*good, of(1, 1)]], Path())
    assert not sanitize.check_races([*good, "========= Warning: results might be incorrect", of(1, 1)], Path())
