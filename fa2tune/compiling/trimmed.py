"""Products of as many columns as a head dim has, where Gluon's tiles are powers of two wide.

A wgmma has any multiple of 8 columns up to 256, and sums over 16. Gluon asks for one as wide as its tile, and for as many of
them as it takes to sum over one: for a head dim of 200, of 256 columns and over 256. So the PTX of such kernels is edited
before ptxas has it. A wgmma names the columns that are used, and the first registers of its result. The others stay as they
were: zeros, as the right factor has them there, or what lies behind the head dim, where nothing is stored. And those are left
out that multiply columns of zeros. A block of keys that is no power of two is named likewise, by its rows of K; nothing reads
the columns behind it.

Triton has one hook for what comes between its stages. It is set while such a kernel is compiled, in however many threads, and
a hook that is there already runs first.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fa2tune.spec.variant import Used

#: Part of an edited kernel's key in Triton's cache, and in files of binaries: another number where ``edited`` changes.
EDITION = 1
SUMMED = 16  #: columns that a wgmma of 16-bit numbers sums over
#: A wgmma of 16-bit numbers: columns, kind, registers of the result; then the left factor, registers or a descriptor, the right
#: one's descriptor, a predicate, two signs and which of the factors in memory are transposed. The right one is where columns of
#: the result lie side by side in memory, otherwise those that are summed over do.
_WGMMA = re.compile(
    r"wgmma\.mma_async\S*\.m64n(?P<columns>\d+)k16(?P<kind>\S*) \{(?P<result>[^}]*)\}, "
    r"(?P<rest>(?:\{[^}]*\}|[^,{]+), [^;]*, (?P<transposed>[01]));"
)
_COMMIT = "wgmma.commit_group"

_lock = threading.Lock()
_compiling = 0  #: threads within ``products``
_before: Callable[..., Any] | None = None  #: the hook that was there
_of_thread = threading.local()  #: used: of the kernel that this thread compiles


def edited(ptx: str, used: Used) -> str:
    """PTX whose products have the columns that are used."""
    found, text, end = list(_WGMMA.finditer(ptx)), [], 0
    dropped = {
        place for run in _runs(ptx, found) for place in run[used.sums.get(SUMMED * len(run), 0) // SUMMED or len(run) :]
    }
    for place, product in enumerate(found):
        text += [ptx[end : product.start()], "" if place in dropped else _trimmed(product, used)]
        end = product.end()
    return "".join([*text, ptx[end:]])


def _runs(ptx: str, found: list[re.Match[str]]) -> Iterator[list[int]]:
    """Places of the products, without a transposed right factor, that one product of tiles is made of: those of one result that
    are waited for together, in the order of their columns."""
    run = list[int]()
    for place, product in enumerate(found):
        if product["transposed"] == "1":
            continue
        last = found[run[-1]] if run else None
        if last is None or last["result"] != product["result"] or _COMMIT in ptx[last.end() : product.start()]:
            if run:
                yield run
            run = []
        run.append(place)
    if run:
        yield run


def _trimmed(product: re.Match[str], used: Used) -> str:
    columns = int(product["columns"])
    width = (used.results if product["transposed"] == "1" else used.rows).get(columns, columns)
    registers = product["result"].split(",")[: width // 2]  # a thread of 128 has half a register of 64 rows of a column
    return f"wgmma.mma_async.sync.aligned.m64n{width}k16{product['kind']} {{{','.join(registers)}}}, {product['rest']};"


def suffix(used: Used) -> str:
    """What a kernel's key has besides its source: nothing, where whole tiles are used."""
    rows = f" {sorted(used.rows.items())}" if used.rows else ""
    return f" trimmed {EDITION} {sorted(used.results.items())} {sorted(used.sums.items())}{rows}" if any(used) else ""


def _hook(*stage: Any) -> Any:
    """As Triton calls it: with (backend, stages, options, language, capability) to change ``stages``; with nothing for what the
    key and the hash of a kernel have to tell."""
    used, before = getattr(_of_thread, "used", Used()), _before
    if not stage:
        known = before() if before is not None else ("", "")
        return tuple(f"{one}{suffix(used)}" for one in known)
    if before is not None:
        before(*stage)
    stages = stage[1]
    if any(used) and "ptx" in stages:
        made = stages["ptx"]
        stages["ptx"] = lambda source, metadata: edited(made(source, metadata), used)
    return None


@contextmanager
def products(used: Used) -> Iterator[None]:
    """Compile a kernel whose products have the columns that are used; where all are, no hook is set. A Triton without the hook
    compiles products of whole tiles, which give the same."""
    global _compiling, _before
    if not any(used):
        yield
        return
    from triton import knobs

    with _lock:
        if not _compiling:
            there = getattr(knobs.runtime, "add_stages_inspection_hook", None)
            # a scope of knobs that ended in another thread may have left this one
            _before = None if there is _hook else there
            knobs.runtime.add_stages_inspection_hook = _hook
        _compiling += 1
    _of_thread.used = used
    try:
        yield
    finally:
        _of_thread.used = Used()
        with _lock:
            _compiling -= 1
            if not _compiling:
                if knobs.runtime.add_stages_inspection_hook is _hook:  # else one has been set since
                    knobs.runtime.add_stages_inspection_hook = _before
                _before = None
