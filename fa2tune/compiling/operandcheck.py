"""Operand check: the address in shared memory of every tensor-core operand must be computed on each path that reaches it. Reads
machine code; needs no GPU.

ptxas 12.8 (Triton 3.6; not ptxas 12.9 of Triton 3.9) breaks this in sm90/fwd: where two loops multiply the same tile one after
the other, the second takes half of the address from the path into the first, also where that path is not taken. The registers
then hold nothing, or a much older value (docs/hopper.md).

It breaks portable kernels, too, whose K and V take turns in one place and are swizzled differently: V's addresses then come
from a register that holds something else (docs/experiments/defects.md).

An HGMMA reads its operands by descriptors in uniform registers. The check follows them back, over copies and constant offsets
and along every path. It reports one that comes from a register which nothing has written, or from one as a special register
was read into it, or an argument of the kernel, or a product: no correct code was seen to have any of these. Other stale values
look like correct ones, and code with calls is not checked, so not every fault is found: it found all 36 wrong binaries of 374
that an H100 ran, and three of portable kernels among 408 of which an H200 ran most.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fa2tune.compiling import compiler, sass
from fa2tune.compiling.compiler import Binary, CompileError
from fa2tune.logs import warn_once
from fa2tune.rows.whole import publish
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import Variant

ARCH = 90  #: whose products are HGMMA
NOWHERE = -1  #: the place of a register's value before the kernel writes it
UNIFORM_REGISTERS = 64
_UNIFORM = re.compile(r"\bUR(\d+)\b")
#: Two registers of A and two of B, those of A unused where registers hold it
_DESCRIPTORS = re.compile(r"gdesc\[UR(\d+)\]")
_PREDICATE = re.compile(r"!?U?P(?:T|\d+)")
#: Besides those that begin with U: opcodes whose first operand that is no predicate may be a uniform register they write
_WRITERS = ("R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX", "ELECT", "LDCU")
_NO_WRITERS = ("UTMA", "UBLK", "UCGABAR", "USETMAXREG", "UISETP", "UPLOP3")
_WIDTHS = {".64": 2, ".WIDE": 2, ".128": 4}  #: modifier -> registers written
_BY_TABLE = ("BRX", "BRXU")
_ELSEWHERE = ("CALL", "RET", "JMP", "JMX", "JMXU", "RTT")  #: jumps that are not followed here


@dataclass(frozen=True, slots=True)
class _PlacedInstruction:
    address: int
    predicated: bool
    opcode: str
    operands: str
    written: tuple[int, ...]  #: uniform registers
    read: tuple[int, ...]

    @property
    def passes_on(self) -> bool:
        """Whether it copies a uniform register, offsets it by a constant, or adds the carry of such a sum."""
        if self.opcode == "UMOV":
            return True
        return self.opcode.startswith("UIADD3") and len(self.read) <= 2 and bool(
            re.search(r", -?0x[0-9a-f]+", self.operands) or ".X" in self.opcode
        )  # fmt: skip


def _instruction(match: re.Match[str]) -> _PlacedInstruction:
    opcode, operands = match[3], match[4].strip()
    base, parts = opcode.partition(".")[0], [part.strip() for part in operands.split(",")]
    written: tuple[int, ...] = ()
    if base in _WRITERS or (base.startswith("U") and not base.startswith(_NO_WRITERS)):
        place = next((i for i, part in enumerate(parts) if not _PREDICATE.fullmatch(part)), None)
        if place is not None and (target := re.fullmatch(r"UR(\d+|Z)", parts[place])):
            del parts[place]
            if target[1] != "Z":
                width = next((count for modifier, count in _WIDTHS.items() if modifier in opcode), 1)
                written = tuple(range(int(target[1]), int(target[1]) + width))
    rest = ",".join(parts)
    if descriptors := _DESCRIPTORS.search(rest):
        first = int(descriptors[1])
        read = tuple(range(first + (2 if re.match(r"R\d+,R\d+[.\w]*,", rest) else 0), first + 4))
    else:
        wide = base.startswith("U") and opcode.endswith(".64")
        read = tuple(n for one in _UNIFORM.findall(rest) for n in range(int(one), int(one) + 1 + wide))
    return _PlacedInstruction(int(match[1], 16), match[2] is not None, opcode, operands, written, read)


def _flow(listing: str) -> tuple[list[_PlacedInstruction], list[list[int]]]:
    """Instructions, and of each where control may go on; no instructions, where a jump cannot be followed."""
    code: list[_PlacedInstruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if match := sass.INSTRUCTION.match(line):
            code.append(_instruction(match))
        elif match := sass.LABEL.match(line):
            labels[match[1]] = len(code)
    at = {one.address: index for index, one in enumerate(code)}
    table = [
        at[word] for data in sass.sections(listing, sass.JUMP_TABLE) for word in sass.data_words(data) if word in at
    ]
    follows = []
    for index, one in enumerate(code):
        base = one.opcode.partition(".")[0]
        if base in _ELSEWHERE or (base in _BY_TABLE and not table):
            return [], []
        target = sass.TARGET.search(one.operands) if base in ("BRA", "WARPSYNC") else None
        goes = table if base in _BY_TABLE else [labels[target[1]]] if target and target[1] in labels else []
        ends = base in ("EXIT", *_BY_TABLE) or (base == "BRA" and one.operands.startswith("`"))
        follows.append([*goes, index + 1] if (one.predicated or not ends) and index + 1 < len(code) else list(goes))
    return code, follows


def _is_no_base(one: _PlacedInstruction) -> bool:
    """Whether it writes what has no part of shared memory's base: a kernel's argument, or a product to which nothing is
    added."""
    return one.opcode.startswith("ULDC") or (one.opcode.startswith("UIMAD") and one.operands.endswith("URZ"))


def _is_none(code: Sequence[_PlacedInstruction], where: int) -> bool:
    """Whether what was written there is no address."""
    return where == NOWHERE or code[where].opcode == "S2UR"


def _reaching(
    code: Sequence[_PlacedInstruction], follows: Sequence[Sequence[int]]
) -> list[frozenset[tuple[int, int]] | None]:
    """Before each instruction: (uniform register, index of what may have written it last); None where nothing leads."""
    before: list[frozenset[tuple[int, int]] | None] = [None] * len(code)
    before[0] = frozenset((register, NOWHERE) for register in range(UNIFORM_REGISTERS))
    todo = [0]
    while todo:
        index = todo.pop()
        one, known = code[index], before[index]
        assert known is not None
        if one.written:
            # what a predicate may skip leaves older values, yet counts as written where these were none
            kept = (
                (register, where) for register, where in known
                if register not in one.written or (one.predicated and not _is_none(code, where))
            )  # fmt: skip
            known = frozenset([*kept, *((register, index) for register in one.written)])
        for follower in follows[index]:
            there = before[follower]
            merged = known if there is None else there if known <= there else there | known
            if merged is not there:
                before[follower] = merged
                todo.append(follower)
    return before


@dataclass(frozen=True, slots=True)
class UnsoundOperand:
    """An operand of a product whose address is not computed on every path."""

    address: int  #: of the HGMMA
    register: int  #: uniform
    writers: tuple[str, ...]  #: what may have written it last

    def __str__(self) -> str:
        return f"HGMMA at {self.address:#x} takes UR{self.register} from {' or '.join(self.writers)}"


def unsound(listing: str) -> tuple[UnsoundOperand, ...]:
    """Operands of a disassembly with its data sections, in the order of addresses. Empty where a jump cannot be followed."""
    code, follows = _flow(listing) if "HGMMA" in listing else ([], [])
    if not code:
        return ()
    before = _reaching(code, follows)
    found = []
    for index, product in enumerate(code):
        if not product.opcode.startswith("HGMMA") or before[index] is None:
            continue
        low = product.read[::2]  # the address is in the low word of a descriptor
        todo = [(index, register, register in low, True) for register in product.read]
        seen = set(todo)
        while todo:
            place, register, base, unchanged = todo.pop()
            writers = sorted(where for which, where in before[place] or () if which == register)
            if any(
                where == NOWHERE or (unchanged and _is_none(code, where)) or (base and _is_no_base(code[where]))
                for where in writers
            ):
                named = tuple("nothing" if w == NOWHERE else f"{code[w].opcode} {code[w].operands}" for w in writers)
                found.append(UnsoundOperand(product.address, register, named))
            more = {
                (w, other, base, unchanged and code[w].opcode == "UMOV")
                for w in writers if w != NOWHERE and code[w].passes_on for other in code[w].read
            }  # fmt: skip
            todo += more - seen
            seen |= more
    return tuple(found)


@cache
def _version() -> str:
    """Of the check: a changed one takes no verdicts of another."""
    sources = (Path(str(file)).read_bytes() for file in (__file__, sass.__file__))
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def _stored(path: Path, digest: str) -> tuple[UnsoundOperand, ...] | None:
    """The verdict in a file; None: there is none of this check and of a cubin with this SHA-256."""
    try:
        version, of, found = json.loads(path.read_text())
        if (version, of) == (_version(), digest):
            return tuple(UnsoundOperand(int(one), int(register), tuple(writers)) for one, register, writers in found)
    except (OSError, ValueError, TypeError):  # none, or a damaged one
        pass
    return None


@lru_cache(maxsize=4096)
def _check(cubin_path: str) -> tuple[UnsoundOperand, ...]:
    """The verdict lies beside the cubin, in Triton's cache: the same users can write both."""
    path = Path(cubin_path)
    kept, digest = path.with_suffix(".operands"), hashlib.sha256(path.read_bytes()).hexdigest()
    if (known := _stored(kept, digest)) is not None:
        return known
    found = unsound(sass.disassembly(cubin_path))
    text = json.dumps([_version(), digest, [astuple(one) for one in found]])

    def fill(file: Path) -> None:
        file.write_text(text)

    with suppress(OSError):  # then the next process checks it again
        publish(kept, fill)
    return found


def check(binary: Binary) -> tuple[UnsoundOperand, ...]:
    """``unsound`` of a binary; empty for another compute capability than 9.0. Takes 0.5 to 2 s, once per cubin."""
    return _check(binary.cubin_path) if binary.arch == ARCH else ()


def _warn(why: str) -> None:
    warn_once(
        "machine code that Triton compiles for Hopper is launched without the check for operands at wrong addresses, which a "
        f"fault of ptxas may cause: {why}"
    )


def compile_kernel(variant: Variant, spec: Specialization, config: Config, arch: int) -> Any:
    """``compiler.compile_kernel``, for a launch. A search checks the candidates of a row. Their code for other masks, for
    packed sequences or of another Triton, and that of configs without a row, is made when it is asked for, and checked
    here: all code for 9.0. Raises CompileError also where an operand is unsound. Without an nvdisasm that reads the
    code it is launched unchecked, and one warning says so."""
    compiled = compiler.compile_kernel(variant, spec, config, arch)
    if arch == ARCH:
        path = next(str(path) for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
        try:
            found = _check(path)
        except OSError as error:
            _warn(str(error))
        except subprocess.CalledProcessError as error:  # an nvdisasm that does not know this code
            _warn(f"{error.cmd[0]} ended with status {error.returncode}: {(error.stderr or '').strip()[-200:]}")
        else:
            if found:
                raise CompileError(f"{variant.short_name} is miscompiled: {found[0]}")
    return compiled
