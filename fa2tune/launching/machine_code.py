"""The hash of machine code that a row keeps (``Row.binary_hash``): by it today's sources are compared with what was measured.

It covers every kernel that a config runs, in order, and what each launch has to know (shared memory, warps, descriptors): the
kernels before and after it, and, of the fused backward, bwd_delta, which its whole backward runs. Not the grid, nor what else a
launch passes at run time.

64 hexadecimal digits: ``FORMAT``, 28 of the PTX, 28 of the machine code. Two hashes agree where either part does: on a busy
host ptxas places the spills of one and the same PTX differently, and other PTX may become the same instructions. Rows name
the Triton that compiled them, which has to be the same.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from fa2tune.compiling import compiler, registry
from fa2tune.compiling.support import companion
from fa2tune.launching import ported
from fa2tune.launching.launch import image_of
from fa2tune.rows.row import PORTED, Row
from fa2tune.spec.problem import FUSED, STRATEGIES, Config, Specialization
from fa2tune.spec.roles import BWD_DELTA
from fa2tune.spec.variant import Variant

#: First digits of a hash that is made as said above. Rows made before it hold the SHA-256 of a cubin, which is no such hash.
FORMAT = "00000001"
_PART = (64 - len(FORMAT)) // 2
_STRINGS, _SYMBOLS, _NO_BITS = 3, 2, 8  #: types of sections of an ELF file; the last has no bytes in it


def known(binary_hash: str | None) -> bool:
    """Whether a row's hash can be compared."""
    return binary_hash is not None and binary_hash.startswith(FORMAT)


def agree(one: str, other: str) -> bool:
    """Whether two hashes that can be compared are of the same machine code."""
    return any(one[start:][:_PART] == other[start:][:_PART] for start in (len(FORMAT), len(FORMAT) + _PART))


def kept(held: str, now: str) -> str:
    """The hash of a row that agrees with today's: its PTX is what to compare with from now on, its code what was measured."""
    return now[: len(FORMAT) + _PART] + held[len(FORMAT) + _PART :]


def arch_of(row: Row) -> int:
    """Compute capability of the code that a row rests on: of a ported one not its GPU's."""
    return ported.CODE if row.obtained == PORTED else row.key.arch


def of_config(kernel: str, spec: Specialization, config: Config, arch: int) -> tuple[str, str]:
    """(hash, ""), or ("", why there is none), for a child process. What the host is to blame for is raised."""
    try:
        variant = registry.variant_of(kernel, config)
        return digest(compiled(variant, spec, variant.space.completed(config), arch)), ""
    except compiler.CompileError as error:
        return "", str(error)


def compiled(variant: Variant, spec: Specialization, config: Config, arch: int) -> list[Any]:
    """What Triton makes of everything that the hash of a config covers, or has in its cache. CompileError."""
    before, after = compiler.around(variant, spec, config, arch)
    sequence = [*before, (variant, config), *after]
    if variant.serves in STRATEGIES[FUSED]:
        delta = companion(BWD_DELTA, spec, arch)
        sequence.append((delta, delta.space.default(spec, arch)))
    return [compiler.compile_kernel(one, spec, its_config, arch) for one, its_config in sequence]


def digest(kernels: Iterable[Any]) -> str:
    """The hash of what ``compiled`` gave."""
    ptx, code = hashlib.sha256(), hashlib.sha256()
    for one in kernels:
        image = image_of(one)
        launch = repr({**asdict(image), "name": "", "cubin": b""}).encode()
        for part, content in ((ptx, _ptx(one.asm["ptx"], image.name)), (code, _code(image.cubin, image.name))):
            for piece in (launch, *content):
                part.update(len(piece).to_bytes(8, "little") + piece)
    return FORMAT + ptx.hexdigest()[:_PART] + code.hexdigest()[:_PART]


def _ptx(text: str, name: str) -> Iterator[bytes]:
    """Without comments, which quote names of the source, and the kernel's own name."""
    bare = re.sub(r"//.*", "", text).replace(name, "kernel")
    yield "\n".join(" ".join(line.split()) for line in bare.splitlines() if line.strip()).encode()


def _code(cubin: bytes, name: str) -> Iterator[bytes]:
    """Every section, without what is there for names alone."""
    (start,), (size, count, strings) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + size * number) for number in range(count)]
    names = headers[strings][4]
    for called, kind, flags, _, offset, length, _, info, alignment, _ in headers:
        if kind in (_STRINGS, _SYMBOLS):
            continue
        begin = names + called
        title = cubin[begin : cubin.index(b"\0", begin)].replace(name.encode(), b"kernel")
        # compute capabilities up to 8.x have the number of registers in the upper bits, and below the number of a symbol
        yield repr((title, kind, flags, length, info >> 24, alignment)).encode()
        yield b"" if kind == _NO_BITS else cubin[offset : offset + length]
