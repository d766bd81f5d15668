"""The contract between a kernel file, its search space and the host: a kernel is described once, by one frozen Variant.

Pure data: importable without torch or triton.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fa2tune.problem import Config, Problem, Specialization

#: The ways a kernel can go, each with a row of its own. Portable kernels read tiles by pointer or by descriptor, as their
#: config entry LOADS says; of a warp-specialised kernel, whose config has none, some warps only load and others only compute.
POINTER, DESCRIPTOR, WARP_SPECIALIZED = "pointer", "descriptor", "warp_specialized"
WAYS = (POINTER, DESCRIPTOR, WARP_SPECIALIZED)
#: Config entries that are compile options; every other entry is a parameter of the kernel.
OPTIONS = ("num_warps", "num_stages", "maxnreg")


def way_of(config: Config) -> str:
    """Which way a config of a tuned kernel goes: with the kernel's name it tells the Variant."""
    return str(config.get("LOADS", WARP_SPECIALIZED))


def _of_its_arguments(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function`` of as many of the arguments as it takes: kernels that need no more say no more."""
    return function(*arguments[: _arity(function)])


@cache
def _arity(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)


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


#: Tensor -> (shape, element type "fp32", "bf16", "i32", or "" for the problem's dtype), or the name of another: its memory.
Workspaces = Mapping[str, tuple[tuple[int, ...], str] | str]


@dataclass(frozen=True, eq=False)
class Variant:
    """One kernel, described for whoever compiles, tunes or launches it.

    Parameters are recognised by name, so the kernel's own parameter list is the only list there is:
    tensors by the names in ``tensors``; what is annotated ``constexpr`` is compiled in; the rest are scalars, among them
    (in capitals) the dimensions of the search that a launch chooses.
    """

    name: str  #: "fwd", "bwd_dkdv", "fwd_hopper", ...
    kernel: Any  #: the @triton.jit or @gluon.jit function
    space: SearchSpace
    #: tensor parameter -> element type: "" for the problem's dtype, else "fp32", "bf16" or "i32"
    tensors: Mapping[str, str]
    #: tensor parameters that a descriptor may read or write -> block, as constexpr names or numbers: (rows, columns) stands
    #: for a block [1, 1, rows, columns] of a (batch, heads, rows, dim) tensor; any other length is the whole block
    descriptors: Mapping[str, tuple[str | int, ...]]
    #: programs to launch for (problem, config), or as many of ``programs``' arguments; one-dimensional (an x grid may reach
    #: 2^31 - 1)
    grid: Callable[..., int]
    #: float parameters, every other scalar is an integer
    floats: tuple[str, ...] = ("qk_scale", "softmax_scale")
    #: constexprs that follow from (specialization) or (specialization, config)
    constants: Callable[..., dict[str, Any]] = field(default=lambda spec: {})
    min_arch: int = 80  #: lowest compute capability it compiles for
    max_arch: int = 999  #: and highest
    serves: str = ""  #: kernel of problem.KERNELS that it is another way of; "": the one it is named after
    #: dimensions of the search that are no parameters of the kernel, because only the grid depends on them
    grid_dimensions: tuple[str, ...] = ()
    #: names of the variants whose kernels run right before and right after, untuned: their default configs and what
    #: ``passes_on(spec, config)`` says
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    passes_on: Callable[[Specialization, Config], dict[str, Any]] = field(default=lambda spec, config: {})
    #: whether a (config) wants these kernels, or (config, name) this one of them
    surrounded: Callable[..., bool] = field(default=lambda config: True)
    #: whether a config's kernel may start while the one before it runs, and itself waits for what that one makes
    early: Callable[[Config], bool] = field(default=lambda config: False)
    #: (problem, config) -> uninitialised memory that ``before``, kernel and ``after`` share
    workspaces: Callable[[Problem, Config], Workspaces] = field(default=lambda problem, config: {})
    #: integer parameters of these kernels that follow from (problem, config) or (problem, config, whether the kernel does start
    #: early: not every driver lets it), beside those that all kernels get
    scalars: Callable[..., dict[str, int]] = field(default=lambda problem, config: {})
    #: (problem, config of a row that serves it) -> config: without what pays only for problems more like the row's own
    suited: Callable[[Problem, Config], Config] = field(default=lambda problem, config: config)

    @property
    def filed_under(self) -> str:
        """The kernel name of its tuning keys."""
        return self.serves or self.name

    @property
    def ways(self) -> tuple[str, ...]:
        """Which ways its configs go."""
        return tuple(self.space.dimensions.get("LOADS", (WARP_SPECIALIZED,)))

    def programs(self, problem: Problem, config: Config, sm_count: int, early: bool = True) -> int:
        """Programs to launch; ``early``: as ``scalars`` has it."""
        return int(_of_its_arguments(self.grid, problem, config, sm_count, early))

    def runs_with(self, config: Config, names: tuple[str, ...]) -> list[str]:
        """Which of ``before`` or ``after`` run for a config."""
        return [name for name in names if _of_its_arguments(self.surrounded, config, name)]

    def integers(self, problem: Problem, config: Config, early: bool) -> dict[str, int]:
        """What ``scalars`` says."""
        found: dict[str, int] = _of_its_arguments(self.scalars, problem, config, early)
        return found

    def derived(self, spec: Specialization, config: Config) -> dict[str, Any]:
        """Constexprs that follow from specialization and config."""
        found: dict[str, Any] = _of_its_arguments(self.constants, spec, config)
        return found
