"""A compiled kernel, and what its launch has to know. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MapFormat:
    """How the compiled kernel wants one of its TMA descriptors."""

    swizzle: int  #: CUtensorMapSwizzle
    element_bytes: int
    element_type: int  #: CUtensorMapDataType
    block: tuple[int, ...]  #: elements of the block that one copy moves, slowest dimension first


@dataclass(frozen=True)
class Image:
    """A compiled kernel."""

    name: str  #: in the cubin
    cubin: bytes
    shared: int  #: bytes of dynamic shared memory per block
    warps: int  #: per block, those of all partitions
    ctas: int  #: blocks per cluster; 1: no cluster
    cooperative: bool
    programmatic: bool  #: may start before the kernel before it has ended
    maps: tuple[MapFormat, ...]  #: of its descriptors, in the order of its parameters
