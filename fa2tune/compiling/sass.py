"""What a binary's inner loops are made of, read off its SASS: instructions per pipe, product FLOPs, bytes of shared memory.

All counts are per warp and per trip round the loop as the machine code has it; what a warp group of four issues together
(HGMMA) is shared out over its warps.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fa2tune.compiling.compiler import tool
from fa2tune.spec.variant import WARP_GROUP, WARP_THREADS

LEAST_MASK = 4  #: compares and selects a thread runs for its share of the smallest tile, 16 x 32 by 128 threads


#: What a phase of a trip holds, in this order: a stretch of the loop that starts with products being issued or with a wait for
#: them. ``pending``: products that may still be in flight when it goes on, -1: it waits for none. The rest as in Loop, the
#: products' own traffic in ``product_bytes`` and only the other in ``shared_bytes``.
PHASE = (
    "pending", "tensor_flops", "product_bytes", "products", "mufu", "fp32", "alu", "issue", "shared_bytes", "local_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loop:
    """One path round an innermost loop that runs products."""

    tensor_flops: float = 0.0  #: of HMMA and HGMMA; 0 for UTCHMMA, whose shape is not in its mnemonic
    mma: str = ""  #: "HGMMA", "HMMA", "UTCHMMA"; "" where products run as FFMA
    mufu: int = 0  #: special functions: exp2, reciprocal, log2
    fp32: int = 0  #: float32 adds, products, FMAs, and the integer products of the same pipe
    ffma: int = 0  #: of which float32 FMAs
    alu: int = 0  #: min / max, compares, selects, logic, integer adds, conversions
    compares: int = 0  #: of which compares and selects: a masked loop has more of them
    issue: int = 0  #: all instructions
    shared_bytes: float = 0.0  #: read by products, read and written by loads and stores, shuffles included
    local_bytes: int = 0  #: spills: LDL and STL
    copies: int = 0  #: LDG and LDGSTS; not UTMALDG, which one thread issues for all
    atomics: int = 0  #: REDG and ATOMG
    barriers: int = 0  #: block-wide: BAR, and waits for TMA and tensor memory (SYNCS)
    products: int = 0  #: HMMA and HGMMA
    product_bytes: float = 0.0  #: of shared_bytes: what products read themselves
    shuffles: int = 0  #: SHFL
    meetings: int = 0  #: BAR alone: where the warps of a block must meet
    arrivals: int = 0  #: waits for data asked for: DEPBAR of copies, SYNCS of TMA
    phases: tuple[
        tuple[float, ...], ...
    ] = ()  #: of a loop with HGMMA, whose products run beside what follows; see PHASE


LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z0-9_.a-z]+)\s*([^;]*)")
JUMP_TABLE = ".nv.constant2"  #: section of addresses that BRX jumps by
TARGET = re.compile(r"`\((\.L_\w+)\)")
_WIDTH = re.compile(r"\.(64|128)(?:\.|$)")
_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)")
_HMMA_SHAPE = re.compile(r"\.(16)(8)(4|8|16|32)\.")

_FP32 = {"FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "IMAD", "HFMA2", "HADD2", "HMUL2"}
_COMPARES = {"ISETP", "FSETP", "SEL", "FSEL", "PLOP3", "FMNMX", "FMNMX3"}
_NOT_ALU = {
    "BRA", "BRX", "EXIT", "NOP", "BSYNC", "BSSY", "WARPSYNC", "DEPBAR", "LDGDEPBAR", "BAR", "SYNCS", "WARPGROUP", "ELECT",
    "S2R", "S2UR", "CS2R", "R2UR", "LDC", "MEMBAR", "FENCE", "ERRBAR", "CCTL", "RET", "CALL", "YIELD", "KILL", "LDTM", "STTM",
    "R2P",
}  # fmt: skip
_ATOMICS = {"RED", "REDG", "ATOM", "ATOMG"}
_BARRIERS = {"BAR", "SYNCS", "WARPGROUP"}


@dataclass(frozen=True, slots=True)
class _Instruction:
    opcode: str  #: with its modifiers: "LDS.128"
    operands: str
    predicated: bool


def _width(opcode: str) -> int:
    """Bytes a warp moves with a load or store: 4, 8 or 16 a thread."""
    match = _WIDTH.search(opcode)
    return WARP_THREADS * (int(match[1]) // 8 if match else 4)


def _matrix_bytes(opcode: str) -> int:
    """Bytes an LDSM or STSM moves: .4 four 8 x 8 matrices of 16-bit elements."""
    return 128 * next((n for n in (4, 2) if opcode.endswith(f".{n}") or f".{n}." in opcode), 1)


def _tally(body: list[_Instruction]) -> Loop:
    pipes: Counter[str] = Counter()
    flops, shared, reads, local, mma = 0.0, 0.0, 0.0, 0, ""
    for instruction in body:
        opcode = instruction.opcode
        base = opcode.partition(".")[0]
        if base == "HGMMA":
            m, n, k = (int(side) for side in _SHAPE.search(opcode).groups())  # type: ignore[union-attr]
            mma = base
            flops += 2 * m * n * k / WARP_GROUP
            # B comes from shared memory, A too unless a register precedes the descriptor; TF32 elements have 4 bytes
            a_shared = instruction.operands.split(",")[1].strip().startswith("gdesc")
            reads += (n + (m if a_shared else 0)) * k * (4 if "TF32" in opcode else 2) / WARP_GROUP
            pipes["products"] += 1
        elif base == "HMMA":
            m, n, k = (int(side) for side in _HMMA_SHAPE.search(opcode + ".").groups())  # type: ignore[union-attr]
            mma = base
            flops += 2 * m * n * k
            pipes["products"] += 1
        elif base.startswith("UTC") and "MMA" in base:
            mma = "UTCHMMA"
        elif base == "MUFU":
            pipes["mufu"] += 1
        elif base in _FP32:
            pipes["fp32"] += 1
            pipes["ffma"] += (base == "FFMA") + 2 * (base == "FFMA2")
        elif base in ("LDSM", "STSM"):
            shared += _matrix_bytes(opcode)
        elif base in ("LDS", "STS"):
            shared += _width(opcode)
        elif base == "SHFL":
            shared += 4 * WARP_THREADS
            pipes["shuffles"] += 1
        elif base in ("LDL", "STL"):
            local += _width(opcode)
        elif base in ("LDG", "LDGSTS"):
            pipes["copies"] += 1
            if base == "LDGSTS":
                shared += _width(opcode)
        elif base in _ATOMICS:
            pipes["atomics"] += 1
        elif base in _BARRIERS:
            pipes["barriers"] += base != "WARPGROUP"
            pipes["meetings"] += base == "BAR"
            pipes["arrivals"] += opcode.startswith("SYNCS.PHASECHK")
        elif base == "DEPBAR":
            pipes["arrivals"] += 1
        elif base not in _NOT_ALU and not base.startswith("U"):
            pipes["alu"] += 1
            pipes["compares"] += base in _COMPARES
    numbers: dict[str, Any] = dict(pipes)
    return Loop(
        tensor_flops=flops, mma=mma, issue=len(body), shared_bytes=shared + reads, product_bytes=reads, local_bytes=local,
        **numbers,
    )  # fmt: skip


_WARP_GROUP_WAIT = re.compile(r"gsb0,\s*(0x[0-9a-f]+|\d+)")


def _phases(body: list[_Instruction]) -> tuple[tuple[float, ...], ...]:
    """One trip of a loop with HGMMA, cut where products are issued or waited for; empty for other loops. What comes before the
    first cut belongs to the last phase: the loop goes round."""
    cuts: list[tuple[int, int]] = []  # index, products that may still be in flight
    issuing = False
    for index, instruction in enumerate(body):
        product = instruction.opcode.startswith("HGMMA")
        if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
            match = _WARP_GROUP_WAIT.search(instruction.operands)
            cuts.append((index, int(match[1], 0) if match else 0))
            issuing = False
        elif product and not issuing:
            cuts.append((index, -1))
            issuing = True
        if "gsb" in instruction.operands and product:  # the last of a group
            issuing = False
    if not any(instruction.opcode.startswith("HGMMA") for instruction in body):
        return ()
    found = []
    for number, (start, pending) in enumerate(cuts):
        last = number + 1 == len(cuts)
        stretch = body[start:] + body[: cuts[0][0]] if last else body[start : cuts[number + 1][0]]
        tally = _tally(stretch)
        values = {"pending": pending, "shared_bytes": tally.shared_bytes - tally.product_bytes}
        found.append(tuple(values[name] if name in values else getattr(tally, name) for name in PHASE))
    return tuple(found)


def _loop(body: Sequence[_Instruction]) -> Loop:
    return replace(_tally(list(body)), phases=_phases(list(body)))


def disassembly(cubin_path: str | Path) -> str:
    """A cubin's code and data sections. Without data-flow analysis: nothing here needs it, and it is slow."""
    command = [tool("nvdisasm"), "--no-dataflow", str(cubin_path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def sections(listing: str, kind: str) -> list[str]:
    """Of a disassembly, those whose names begin with ``kind``: ".text." for code, JUMP_TABLE."""
    found = re.split(r"^\s*\.section\s+(?=\.)", listing, flags=re.MULTILINE)[1:]
    return [one for one in found if one.startswith(kind)]


def data_words(section: str) -> list[int]:
    """The 32-bit words of a data section."""
    data = bytes(int(byte, 16) for line in re.findall(r"\.byte\s+(.*)", section) for byte in line.split(","))
    return [int.from_bytes(data[start : start + 4], "little") for start in range(0, len(data), 4)]


def _parse(listing: str) -> tuple[list[_Instruction], dict[str, int]]:
    """Instructions in order, and label -> index of the instruction that follows it."""
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if match := INSTRUCTION.match(line):
            instructions.append(_Instruction(match[3], match[4], match[2] is not None))
        elif match := LABEL.match(line):
            labels[match[1]] = len(instructions)
    return instructions, labels


@dataclass(frozen=True, slots=True)
class _Body:
    """Instruction indices of a natural loop."""

    all: frozenset[int]
    plain: frozenset[int]  #: without blocks that a path round can avoid


def _works(instruction: _Instruction) -> bool:
    base = instruction.opcode.partition(".")[0]
    return base in _ATOMICS or base == "FFMA" or "MMA" in base


def _add_jumps_by_table(successors: list[set[int]], jumps: list[int]) -> None:
    """The blocks ``jumps`` end in an indirect jump, whose targets stand in a table outside the code: the roles of a
    warp-specialised kernel. Its targets are taken to be the blocks, in order, that nothing else reaches."""
    reached: set[int] = set()

    def reach(start: int) -> None:
        stack = [start]
        while stack:
            if (block := stack.pop()) not in reached:
                reached.add(block)
                stack.extend(successors[block])

    reach(0)
    for jump in jumps:
        for block in range(len(successors)):
            if block not in reached:
                successors[jump].add(block)
                reach(block)


def _natural_loops(instructions: list[_Instruction], labels: dict[str, int]) -> Iterator[_Body]:
    """A back edge makes a loop only if its target dominates it, which leaves out the jumps back from cold code (spinning on a
    TMA barrier) laid out behind the kernel."""
    targets: dict[int, int] = {}
    ends: set[int] = set()
    for index, instruction in enumerate(instructions):
        if instruction.opcode.startswith("BRA") and (match := TARGET.search(instruction.operands)):
            if match[1] in labels:
                targets[index] = labels[match[1]]
                ends.add(index)
        elif instruction.opcode.startswith(("EXIT", "BRX")):
            ends.add(index)
    starts = sorted({0, *targets.values(), *(end + 1 for end in ends if end + 1 < len(instructions))})
    block_at = {start: number for number, start in enumerate(starts)}
    spans = list(zip(starts, [*starts[1:], len(instructions)], strict=True))
    successors: list[set[int]] = []
    for number, (_, end) in enumerate(spans):
        last, follows = end - 1, set()
        unconditional = not instructions[last].predicated and ".U" not in instructions[last].opcode
        if last in targets and targets[last] in block_at:
            follows.add(block_at[targets[last]])
            # "BRA.DIV" and predicated branches, and those with a predicate among their operands, may fall through
            unconditional = unconditional and instructions[last].operands.strip().startswith("`")
        if not (last in ends and unconditional) and number + 1 < len(spans):
            follows.add(number + 1)
        successors.append(follows)
    _add_jumps_by_table(
        successors, [n for n, (_, end) in enumerate(spans) if instructions[end - 1].opcode.startswith("BRX")]
    )
    predecessors: list[set[int]] = [set() for _ in spans]
    for number, follows in enumerate(successors):
        for follower in follows:
            predecessors[follower].add(number)
    everything = set(range(len(spans)))
    dominators = [everything.copy() for _ in spans]
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for number in range(1, len(spans)):
            incoming = [dominators[p] for p in predecessors[number]]
            if not incoming:  # unreachable: has no say in what dominates others
                continue
            new = set.intersection(*incoming) | {number}
            if new != dominators[number]:
                dominators[number], changed = new, True
    bodies: dict[int, set[int]] = {}
    always: dict[int, set[int]] = {}
    for number, follows in enumerate(successors):
        for header in follows & dominators[number]:
            always[header] = always.get(header, dominators[number]) & dominators[number]
            body, stack = bodies.setdefault(header, {header}), [number]
            while stack:
                block = stack.pop()
                if block not in body:
                    body.add(block)
                    stack.extend(predecessors[block])

    def indices(blocks: set[int]) -> frozenset[int]:
        return frozenset(index for block in blocks for index in range(*spans[block]))

    for header, body in bodies.items():
        # branches around atomic adds and products guard the end of a tensor: as good as always taken
        worked = {block for block in body if any(_works(instructions[index]) for index in range(*spans[block]))}
        yield _Body(indices(body), indices(body & always[header] | worked))


def _paths(body: _Body, instructions: list[_Instruction]) -> list[Loop]:
    """The plain path round a loop, and, where it branches around a mask, the masked one. Other branches guard rare things: a
    spin on a barrier."""
    plain, whole = (_loop([instructions[index] for index in sorted(path)]) for path in (body.plain, body.all))
    return [plain, whole] if whole.compares - plain.compares >= LEAST_MASK else [plain]


def loops(listing: str) -> tuple[Loop, ...]:
    """The innermost loops of a disassembly that run products, in the order of their addresses, a loop with a mask behind a
    branch as two: those with matrix instructions, or, in a kernel without any, those with at least half as many FFMAs as the
    richest."""
    instructions, labels = _parse(listing)
    found = sorted(_natural_loops(instructions, labels), key=lambda body: min(body.all))
    tallies = [_tally([instructions[index] for index in sorted(body.all)]) for body in found]
    if any(tally.mma for tally in tallies):
        holds = [bool(tally.mma) for tally in tallies]
    else:
        richest = max((tally.ffma for tally in tallies), default=0)
        holds = [tally.ffma > 0 and 2 * tally.ffma >= richest for tally in tallies]
    rich = [body for body, keep in zip(found, holds, strict=True) if keep]
    innermost = [body for body in rich if not any(other.all < body.all for other in rich)]
    return tuple(path for body in innermost for path in _paths(body, instructions))


@lru_cache(maxsize=4096)
def counts(cubin_path: str) -> tuple[Loop, ...]:
    """The product loops of a cubin; empty for a kernel without any. Runs nvdisasm (0.3 s) once per path."""
    # without data-flow analysis: nothing here needs it, and it is slow
    command = [tool("nvdisasm"), "--print-code", "--no-dataflow", cubin_path]
    return loops(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
