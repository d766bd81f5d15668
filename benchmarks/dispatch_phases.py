"""Which shared memory accesses of a warp-specialised binary are separated by a barrier of the whole block, read from its
SASS.

Triton dispatches partitions as follows. The default partition writes a state byte for each worker warp (the number of its
partition) and the values that the partitions capture. All warps meet at a barrier of the whole block (BAR.SYNC 1, which
names no count; warps without a partition take part). Each worker reads its byte (LDS.U8) and jumps through a table (BRX) to
its partition, which reads its captures. The warps meet again before and after the work of the partitions. The default
partition then writes "exit" to every state byte, and after one more barrier the workers read it. compute-sanitizer's
racecheck reports these reads and writes as hazards. They are none if no warp can read where another writes between the same
two barriers.

To prove that, this module walks the control flow of each role: the default partition, each partition of the table, and the
warps without a partition. An access gets the set of barrier counts that the paths to it can have passed. All warps take
part in each of these barriers, so accesses without a common count are ordered.

Assumed: a worker's first read of its byte finds its partition, the second finds "exit"; a barrier with a thread count whose
number is computed (one per stage of a ring) belongs to the kernel and is never number 1; a function that the compiler added
(the slow path of a division) returns to its caller. Checked, else Unproven is raised: there is one LDS.U8, one BRX and one
branch that separates workers from the default partition; every path of every role has passed the same number of whole-block
barriers at its EXIT; functions only compute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fa2tune.compiling import sass

ENOUGH = 8  #: whole-block barriers on a path: one more than any kernel has, so one stands in a loop
LOADS, STORES = ("LDS", "ATOMS"), ("STS", "ATOMS")
DEFAULT, IDLE = -1, -2  #: roles of warps outside the partitions; a partition's role is its place in the table
_UNKNOWN = ("CALL", "RET", "JMP", "JMX", "JMXU", "BRXU", "RTT", "RPCMOV", "LEPC")  #: jumps that no walk here can follow


class Unproven(ValueError):
    """This code is not as Triton's dispatch of partitions is known to be: nothing follows for its accesses."""


@dataclass(frozen=True, slots=True)
class Access:
    """A load, store or atomic of shared memory."""

    opcode: str  #: with its modifiers: "LDS.U8"
    operands: str
    intervals: frozenset[int]  #: whole-block barriers passed before it, over all paths of all roles; empty: not reached


Accesses = Mapping[int, Access]  #: of one binary, by address in its kernel


@dataclass(frozen=True, slots=True)
class _Instruction:
    address: int
    predicate: str
    opcode: str
    operands: str
    target: int | None  #: index of the instruction that a label among its operands stands before

    @property
    def meets(self) -> bool:
        """Whether all warps of the block must get here. Unproven: a barrier that cannot be distinguished from this one."""
        if not self.opcode.startswith("BAR") or re.match(r"0x(?!1\b)|R\d+, 0x", self.operands):
            return False  # that of one partition, or of some of the warps, orders nothing here
        if not self.opcode.startswith("BAR.SYNC") or self.operands != "0x1":
            raise Unproven(f"{self.address:#x}: {self.opcode} {self.operands}")
        return True

    @property
    def stays(self) -> bool:
        """Whether control may go on to what follows it."""
        leaves = self.opcode == "EXIT" or (self.opcode.startswith("BRA") and self.operands.startswith("`"))
        return bool(self.predicate) or not leaves


def _functions(text: str) -> tuple[str, set[str]]:
    """The kernel's own lines, and the names of functions behind them. Unproven: one that does more than compute, and return."""
    kernel, *parts = re.split(r"^(\$__internal_[\w$]+):$", text, flags=re.MULTILINE)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        lines = body.splitlines()
        opcodes = {match[3].partition(".")[0] for line in lines if (match := sass.INSTRUCTION.match(line))}
        labels = {match[1] for line in lines if (match := sass.LABEL.match(line))}
        others = opcodes & {"BAR", "BRX", "CALL", "EXIT", "SYNCS", *LOADS, *STORES} | opcodes & {*_UNKNOWN} - {"RET"}
        others |= {*sass.TARGET.findall(body)} - labels
        if others or "RET" not in opcodes:
            raise Unproven(f"{name}: {', '.join(sorted(others)) or 'no RET'}")
    return kernel, set(parts[::2])


def _parse(listing: str) -> tuple[list[_Instruction], list[int]]:
    """Of a disassembly: its instructions, and the table of its BRX as indices of instructions."""
    texts, tables = (sass.sections(listing, kind) for kind in (".text.", sass.JUMP_TABLE))
    if (len(texts), len(tables)) != (1, 1):
        raise Unproven(f"{len(texts)} functions, {len(tables)} jump tables")
    found: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    kernel, functions = _functions(texts[0])
    for line in kernel.splitlines():
        if match := sass.INSTRUCTION.match(line):
            found.append(match)
        elif match := sass.LABEL.match(line):
            labels[match[1]] = len(found)
    marks = [sass.TARGET.search(match[4]) for match in found]
    if foreign := {mark[1] for mark in marks if mark} - set(labels):
        raise Unproven(f"jumps out of the kernel: {', '.join(sorted(foreign))}")
    code = [_Instruction(int(match[1], 16), match[2] or "", match[3], match[4].strip(), labels[mark[1]] if mark else None)
            for match, mark in zip(found, marks, strict=True)]  # fmt: skip
    calls = {f"`({name})" for name in functions}
    code = [
        replace(one, opcode="NOP") if one.opcode == "CALL.REL.NOINC" and one.operands in calls else one for one in code
    ]
    at = {instruction.address: index for index, instruction in enumerate(code)}
    targets = sass.data_words(tables[0])
    if not targets or not set(targets) <= set(at):
        raise Unproven(f"not a jump table: {targets}")
    return code, [at[target] for target in targets]


class _Walk:
    """Every path of every role through one kernel."""

    def __init__(self, code: list[_Instruction], table: list[int]) -> None:
        self.code, self.table = code, table
        reads, jumps = ([i for i, one in enumerate(code) if one.opcode == name] for name in ("LDS.U8", "BRX"))
        if len(reads) != 1 or len(jumps) != 1 or reads[0] > jumps[0]:
            raise Unproven(f"{len(reads)} LDS.U8, {len(jumps)} BRX")
        (self.read,), (self.jump,) = reads, jumps
        if int(code[self.jump].operands.split()[-1], 16) + code[self.jump + 1].address:  # relative to what follows
            raise Unproven("the table of BRX is not of addresses")
        # the one predicate is that of warps of no partition: two barriers, and back to read the state again
        if len({one.predicate for one in code[self.read : self.jump + 1]} - {""}) > 1:
            raise Unproven("several predicates between LDS.U8 and BRX")
        self.exits = [index for index in table if self.only_exits(index)]
        self.entry = next((i for i, one in enumerate(code) if one.opcode.startswith("BRA") and one.predicate), 0)
        sides = {self.jump in self.reached(index): index for index in self.follow(self.entry)}
        if len(sides) != 2 or not self.exits:
            raise Unproven("no branch between default partition and workers, or no exit for these")
        self.worker, self.default = sides[True], sides[False]

    def follow(self, index: int) -> list[int]:
        """The next instructions, where nothing is known of predicates: the target of a branch last."""
        one = self.code[index]
        if one.opcode.partition(".")[0] in _UNKNOWN or (one.stays and index + 1 == len(self.code)):
            raise Unproven(f"{one.address:#x}: {one.opcode} {one.operands}")
        return [index + 1] * one.stays + ([] if one.target is None else [one.target])

    def reached(self, index: int) -> set[int]:
        """From here, without the jump by table."""
        found, todo = set[int](), [index]
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo += [] if index == self.jump else self.follow(index)
        return found

    def only_exits(self, index: int) -> bool:
        return all(self.code[one].opcode in ("NOP", "BRA", "EXIT") for one in self.reached(index))

    def skips(self, index: int, role: int, reads: int) -> bool | None:
        """Whether its predicate keeps a role, which has read its state byte so often, from an instruction. None: perhaps."""
        if not self.code[index].predicate:
            return False
        return (role != IDLE or reads != 1) if self.read < index < self.jump else None

    def next(self, index: int, role: int, reads: int) -> list[int]:
        """Where a role may go on."""
        if index == self.entry:
            return [self.default if role == DEFAULT else self.worker]
        if index == self.jump:
            if role == DEFAULT or reads not in (1, 2) or (role == IDLE and reads == 1):
                raise Unproven(f"role {role} jumps after {reads} reads of its state")
            return [self.table[role]] if reads == 1 else self.exits
        follows, skips = self.follow(index), self.skips(index, role, reads)
        return follows if skips is None or len(follows) == 1 else follows[:1] if skips else follows[-1:]

    def intervals(self, role: int) -> tuple[dict[int, set[int]], set[int]]:
        """Of each instruction, and the barriers passed at EXIT."""
        found: dict[int, set[int]] = {}
        ends, seen, todo = set[int](), set[tuple[int, int, int]](), [(0, 0, 0)]
        while todo:
            index, passed, reads = place = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            found.setdefault(index, set()).add(passed)
            one, skips = self.code[index], self.skips(index, role, reads)
            if one.opcode == "EXIT":
                ends.add(passed)
            if (one.meets and skips is None) or passed > ENOUGH:
                raise Unproven(f"{one.address:#x}: a whole-block barrier with a predicate or in a loop")
            after = passed + (one.meets and not skips), reads + (index == self.read)
            todo += [(follower, *after) for follower in self.next(index, role, reads)]
        return found, ends


def accesses(listing: str) -> dict[int, Access]:
    """Every access of shared memory in a disassembly, with its intervals. Raises Unproven."""
    code, table = _parse(listing)
    walk = _Walk(code, table)
    partitions = [number for number, index in enumerate(table) if index not in walk.exits]
    walked = {role: walk.intervals(role) for role in (DEFAULT, IDLE, *partitions)}
    counts = {role: sorted(ends) for role, (_, ends) in walked.items()}
    if len({tuple(ends) for ends in counts.values()}) != 1 or len(counts[DEFAULT]) != 1:
        raise Unproven(f"whole-block barriers at EXIT, by role: {counts}")
    return {
        one.address: Access(one.opcode, one.operands, frozenset().union(*(f.get(i, ()) for f, _ in walked.values())))
        for i, one in enumerate(code) if one.opcode.startswith(LOADS + STORES)
    }  # fmt: skip


def excused(binaries: Iterable[Accesses], read: int, write: int) -> bool:
    """Whether whole-block barriers keep this read and this write apart in each of a kernel's binaries that has both there."""
    pairs = [(one[read], one[write]) for one in binaries if read in one and write in one]
    both = [(a.intervals, b.intervals) for a, b in pairs if a.opcode.startswith(LOADS) and b.opcode.startswith(STORES)]
    return bool(both) and all(a and b and not a & b for a, b in both)
