"""The contract between a kernel file, its search space and the host: a kernel is described once, by one frozen Variant.

Pure data: importable without torch or triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fa2tune.problem import Config, Problem, Specialization

#: Names of the two ways a tile is read, values of the config entry LOADS.
POINTER, DESCRIPTOR = "pointer", "descriptor"
#: Config entries that are compile options; every other entry is a parameter of the kernel.
OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Constraint:
    """A named rule a config must keep, with its reason. ``holds(config, spec, arch)``: arithmetic only, no compile."""

    name: str
    why: str
    holds: Callable[[Config, Specialization, int], bool]


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """Finite, typed: a tuple of values per dimension, the kernel's own constraints, and the documented default."""

    name: str
    dimensions: Mapping[str, tuple[Any, ...]]
    constraints: tuple[Constraint, ...]
    default: Callable[[Specialization, int], Config]  #: (specialization, arch) -> a point of this space

    def points(self) -> Iterator[dict[str, Any]]:
        """Every combination, legal or not, in a fixed order."""
        for values in itertools.product(*self.dimensions.values()):
            yield dict(zip(self.dimensions, values, strict=True))

    def broken(self, config: Config, spec: Specialization, arch: int) -> Constraint | None:
        """The first constraint that ``config`` breaks, or None."""
        return next((c for c in self.constraints if not c.holds(config, spec, arch)), None)


@dataclass(frozen=True, eq=False)
class Variant:
    """One kernel, described for whoever compiles, tunes or launches it.

    Parameters are recognised by name, so the kernel's own parameter list is the only list there is:
    tensors by the names in ``tensors``; what is annotated ``tl.constexpr`` is compiled in; the rest are scalars, among them
    (in capitals) the dimensions of the search that a launch chooses.
    """

    name: str  #: kernel name as filed in the cache: "fwd", "bwd_dkdv", ...
    kernel: Any  #: the @triton.jit function
    space: SearchSpace
    #: tensor parameter -> element type: "" for the problem's dtype, else "fp32"
    tensors: Mapping[str, str]
    #: tensor parameters that a descriptor may read -> (rows constexpr, columns constexpr) of its block
    descriptors: Mapping[str, tuple[str, str]]
    #: programs to launch for (problem, config), one-dimensional (an x grid may reach 2^31 - 1)
    grid: Callable[[Problem, Config], int]
    #: float parameters, every other scalar is an integer
    floats: tuple[str, ...] = ("qk_scale", "softmax_scale")
    #: constexprs that follow from the specialization, not from the config
    constants: Callable[[Specialization], dict[str, Any]] = field(default=lambda spec: {})
    min_arch: int = 80  #: lowest compute capability it compiles for
