"""The contract between a kernel file, its search space and the host: a kernel is described once, by one frozen Variant.

Pure data: importable without torch or triton.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from fa2tune.spec.maskfile import LAST_KEY
from fa2tune.spec.problem import Config, Problem, Specialization
from fa2tune.spec.tuned import tuned

#: The implementations of a kernel, each with a row of its own. Portable kernels read tiles by pointer or by descriptor, as
#: their config entry LOADS says. Any other kernel names itself in its config by the one value of a dimension IMPLEMENTATION.
POINTER, DESCRIPTOR, WARP_SPECIALIZED = "pointer", "descriptor", "warp_specialized"
PORTABLE = "portable"  #: of a whole backward: none of its kernels is warp-specialised
IMPLEMENTATIONS = (POINTER, DESCRIPTOR, WARP_SPECIALIZED)
IMPLEMENTATION = "IMPLEMENTATION"
#: What a config, or a search space, is of that has neither. So rows, studies and files of binaries hold those of kernels/sm90,
#: from before kernels named themselves: with one entry more they would be other configs.
UNNAMED = WARP_SPECIALIZED
WARP_THREADS = 32
WARP_GROUP = 4  #: warps that issue one wgmma together, one in each quarter of an SM
WARPGROUP_THREADS = WARP_GROUP * WARP_THREADS
#: Config entries that are compile options; every other entry is a parameter of the kernel.
OPTIONS = ("num_warps", "num_stages", "maxnreg")


def implementation_of(config: Config) -> str:
    """Which implementation a config of a tuned kernel is of: with the kernel's name it tells the Variant."""
    return str(config.get("LOADS") or config.get(IMPLEMENTATION, UNNAMED))


def in_order(names: Iterable[str]) -> list[str]:
    """Implementations without repetition: IMPLEMENTATIONS first, then the others by name."""
    known = {name: place for place, name in enumerate(IMPLEMENTATIONS)}
    return sorted(set(names), key=lambda name: (known.get(name, len(known)), name))


class Added(tuple[Any, ...]):
    """Values of a dimension that the search has gained: ``older`` is what every config from before was compiled with."""

    older: Any


def added(*values: Any, older: Any) -> Added:
    """A dimension's values, with the one that describes configs from before there was this dimension. ValueError: it is none of
    them."""
    if older not in values:
        raise ValueError(f"older: got {older!r}, allowed are {', '.join(map(repr, values))}")
    found = Added(values)
    found.older = older
    return found


@dataclass(frozen=True)
class Constraint:
    """A named rule a config must keep, with its reason. ``holds(config, spec, arch)``: arithmetic only, no compile."""

    name: str  #: rows and studies count by it what was dropped, so it stays as it is
    short: str  #: what is dropped, in a few words, for tables; the same wherever the name is
    why: str  #: a sentence
    holds: Callable[[Config, Specialization, int], bool]


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """Finite, typed: a tuple of values per dimension, the kernel's own constraints, and the documented default."""

    name: str
    dimensions: Mapping[str, tuple[Any, ...]]
    constraints: tuple[Constraint, ...]
    default: Callable[[Specialization, int], Config]  #: (specialization, arch) -> a point of this space
    #: padded head dim, the larger of both, from which the default serves in place of the portable kernel's where no row does;
    #: 0: it never does
    default_from: int = 0
    #: compute capabilities on which it does; none named: all that the kernel compiles for
    default_on: tuple[int, ...] = ()

    def is_default(self, width: int, arch: int) -> bool:
        """Whether the default serves a padded head dim on a compute capability in place of the portable kernel's."""
        return 0 < self.default_from <= width and (not self.default_on or arch in self.default_on)

    @property
    def single(self) -> bool:
        """Whether it is one point, so that nothing is searched."""
        return all(len(values) == 1 for values in self.dimensions.values())

    @property
    def implementations(self) -> tuple[str, ...]:
        """Which implementations its configs are of."""
        return tuple(self.dimensions.get("LOADS") or self.dimensions.get(IMPLEMENTATION, (UNNAMED,)))

    def __post_init__(self) -> None:
        documented = self.default
        object.__setattr__(self, "default", lambda spec, arch: self.completed(documented(spec, arch)))

    def completed(self, config: Config) -> dict[str, Any]:
        """``config`` with what it lacks of the dimensions that the search has gained since (``added``)."""
        lacking = {name: value for name, value in self._gained.items() if name not in config}
        return {**config, **lacking}

    @cached_property
    def _gained(self) -> dict[str, Any]:
        """Dimension that the search has gained -> the value of configs from before."""
        return {name: values.older for name, values in self.dimensions.items() if isinstance(values, Added)}

    def points(self) -> Iterator[dict[str, Any]]:
        """Every combination, legal or not, in a fixed order."""
        for values in itertools.product(*self.dimensions.values()):
            yield dict(zip(self.dimensions, values, strict=True))

    def broken(self, config: Config, spec: Specialization, arch: int) -> Constraint | None:
        """The first constraint that ``config`` breaks, or None."""
        if not self._gained.keys() <= config.keys():
            config = self.completed(config)
        return next((c for c in self.constraints if not c.holds(config, spec, arch)), None)


#: Constexpr parameter of a kernel -> device function of the mask's file.
HOOKS = {
    "KEY_RANGE": "key_range", "QUERY_RANGE": "query_range", "KEEP": "keep", "SEES": "sees",
    "BLOCKS_BELOW": "blocks_below", "FIRST_BLOCK": "first_block", "CLEAR_BLOCKS": "clear_blocks", "HIDE": "hide",
    "SEES_A_KEY": "sees_a_key", "QUERY_BLOCKS": "query_blocks", "HIDE_QUERIES": "hide_queries",
}  # fmt: skip
#: The same, of a function that a mask's file may lack, in which case the parameter is None.
OPTIONAL_HOOKS = {"LAST_KEY": LAST_KEY}
#: The same of the score term's file.
SCORE_HOOKS = {"APPLY": "apply", "GRAD": "grad"}
#: Run-time integers of a mask that has any; of another they are compiled in as 0, so they cost nothing.
WINDOW = ("window_left", "window_right")
#: Run-time numbers of a score term, in the same way.
SCORE = ("score_first", "score_second")

#: Folder of the kernels that any GPU can run. Every other folder is an architecture.
PORTABLE_FOLDER = "portable"
#: What each callback of a Variant takes. One that does not use a parameter names it with an underscore.
SIGNATURES = {
    "grid": ("problem", "config", "sm_count", "early"), "constants": ("spec", "config"), "passes_on": ("spec", "config"),
    "passes_before": ("spec", "config"), "used": ("spec", "config"),
    "surrounded": ("config", "name"), "early": ("problem", "config", "sm_count"), "workspaces": ("problem", "config"),
    "scalars": ("problem", "config", "early"), "fitted": ("spec", "config"), "suited": ("problem", "config"),
}  # fmt: skip

#: Tensor -> (shape, element type "fp32", "bf16", "i32", or "" for the problem's dtype), or the name of another: its memory.
Workspaces = Mapping[str, tuple[tuple[int, ...], str] | str]


class Used(NamedTuple):
    """Of products of tiles that are powers of two wide, how many of the first columns a head dim fills, by the tile's width
    where those are fewer (compiling/trimmed.py)."""

    #: of results, in steps of 8: where the right factor has them side by side in memory
    results: Mapping[int, int] = MappingProxyType({})
    #: that are summed over, in steps of 16: where both factors have them side by side in memory, and zeros behind them
    sums: Mapping[int, int] = MappingProxyType({})
    #: of results whose right factor is not transposed, as those of Q K^T: rows of K that lie there
    rows: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Variant:
    """One kernel, described for compiling, tuning and launching it. Whether it computes a call on a GPU:
    ``compiling.support.supports(variant, spec, gpu)``.

    Parameters are recognised by name, so the kernel's own parameter list is the only list there is:
    tensors by the names in ``tensors``; what is annotated ``constexpr`` is compiled in; the rest are scalars, among them
    (in capitals) the dimensions of the search that a launch chooses.
    """

    kernel: Any  #: the @triton.jit or @gluon.jit function
    space: SearchSpace
    #: tensor parameter -> element type: "" for the problem's dtype, else "fp32", "bf16" or "i32"
    tensors: Mapping[str, str]
    #: tensor parameters that a descriptor may read or write -> block, as constexpr names or numbers: (rows, columns) stands
    #: for a block [1, 1, rows, columns] of a (batch, heads, rows, dim) tensor; any other length is the whole block
    descriptors: Mapping[str, tuple[str | int, ...]]
    #: (problem, config, streaming multiprocessors, whether it starts early) -> programs to launch; one-dimensional (an x
    #: grid may reach 2^31 - 1)
    grid: Callable[[Problem, Config, int, bool], int]
    #: float parameters, every other scalar is an integer
    floats: tuple[str, ...] = ("qk_scale", "softmax_scale", *SCORE)
    #: (specialization, config) -> constexprs that follow from them
    constants: Callable[[Specialization, Config], dict[str, Any]] = field(default=lambda spec, config: {})
    #: (specialization, config) -> which columns of its products are used
    used: Callable[[Specialization, Config], Used] = field(default=lambda spec, config: Used())
    min_arch: int = 80  #: lowest compute capability it compiles for
    max_arch: int = 999  #: and highest
    #: tensor parameter -> another, of whose memory it is one more descriptor: of the columns behind the other's block. Compiled
    #: in as None where its own block has none
    rest_of: Mapping[str, str] = field(default_factory=dict)
    name: str = ""  #: its path in kernels/: "portable/fwd", "sm90/fwd", ...; given by registry.Variants
    #: kernel of tuned.tuned() that it implements, written as ``serves="..."`` in its file; "": none, it runs around others
    serves: str = ""
    #: where ``serves`` is a name that it brings: what stands of the shipped ones in tuned.SHIPPED, written in the same way
    products: tuple[int, int] | None = None
    title: str = ""
    loop: str = ""
    strategy: tuple[str, ...] = ()
    #: role of roles.ROLES that it has, written in the same way; "": none
    role: str = ""
    #: path of the fused kernel that computes the same from configs of the same dimensions, without DQ_BUFFERS, dQ summed in any
    #: order, where this one has a fixed order; written in the same way
    ordered_form_of: str = ""
    #: dimensions of the search that are no parameters of the kernel, because only grids or ``scalars`` depend on them, its own
    #: or those of what runs after it
    grid_dimensions: tuple[str, ...] = ()
    #: paths of the kernels that run right before and right after, untuned: their default configs and what
    #: ``passes_on(spec, config)`` says
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    #: of those before it, the ones that packed calls alone want, whatever ``surrounded`` says
    packed_before: tuple[str, ...] = ()
    passes_on: Callable[[Specialization, Config], dict[str, Any]] = field(default=lambda spec, config: {})
    #: besides, to those before it alone
    passes_before: Callable[[Specialization, Config], dict[str, Any]] = field(default=lambda spec, config: {})
    #: (config, path) -> whether a config wants this one of them
    surrounded: Callable[[Config, str], bool] = field(default=lambda config, name: True)
    #: (problem, config, streaming multiprocessors) -> whether the kernel is to start while the one before it runs; it waits
    #: itself for what that one makes
    early: Callable[[Problem, Config, int], bool] = field(default=lambda problem, config, sm_count: False)
    #: (problem, config) -> uninitialised memory that ``before``, kernel and ``after`` share
    workspaces: Callable[[Problem, Config], Workspaces] = field(default=lambda problem, config: {})
    #: (problem, config, whether the kernel does start early: not every driver lets it) -> integer parameters of these kernels,
    #: besides those that all kernels get
    scalars: Callable[[Problem, Config, bool], dict[str, int]] = field(default=lambda problem, config, early: {})
    #: (specialization, config of a row of other head dims that are padded alike, or without its score term) -> config for it
    fitted: Callable[[Specialization, Config], Config] = field(default=lambda spec, config: config)
    #: (problem, config of a row that serves it) -> config: without what pays only for problems more like the row's own
    suited: Callable[[Problem, Config], Config] = field(default=lambda problem, config: config)

    def __post_init__(self) -> None:
        for name, arguments in SIGNATURES.items():
            taken = inspect.signature(getattr(self, name)).parameters.values()
            by_place = all(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in taken)
            if not by_place or tuple(each.name.removeprefix("_") for each in taken) != arguments:
                kernel, named = getattr(self.kernel, "fn", self.kernel), ", ".join(each.name for each in taken)
                raise TypeError(
                    f"Variant of {getattr(kernel, '__name__', kernel)}: {name} takes ({named}), it has to take "
                    f"({', '.join(arguments)})"
                )

    @property
    def module(self) -> str:
        """Its file, as Python imports it."""
        return f"fa2tune.kernels.{self.name.replace('/', '.')}"

    @property
    def portable(self) -> bool:
        """Whether it is the portable kernel, whose default is the one to beat and serves where nothing else does: that by
        pointer or descriptor. A kernel has one, in whichever folder; its other implementations name themselves."""
        return set(self.implementations) <= {POINTER, DESCRIPTOR}

    @property
    def short_name(self) -> str:
        """Its path without the folder of portable kernels, as studies, failure records, files of binaries and errors say. Where
        the kernel's name (``serves``) is shown, too, ``name`` is: "fwd" is the kernel, "portable/fwd" an implementation."""
        return self.name.removeprefix(f"{PORTABLE_FOLDER}/")

    @property
    def implementations(self) -> tuple[str, ...]:
        """Which implementations its configs are of."""
        return self.space.implementations

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The kernel's parameter names, in order."""
        return tuple(inspect.signature(self.kernel.fn).parameters)

    @cached_property
    def constexpr_names(self) -> frozenset[str]:
        """The kernel's parameters annotated ``constexpr``, of Triton's language or Gluon's."""
        annotated = inspect.signature(self.kernel.fn).parameters.values()
        return frozenset(p.name for p in annotated if getattr(p.annotation, "__name__", "") == "constexpr")

    @property
    def modelled(self) -> bool:
        """Whether the analytic model can estimate it: a loop over tiles that Triton pipelines, of a kind that it knows."""
        if self.serves and not tuned()[self.serves].loop:
            return False
        return {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "maxnreg"} <= set(self.space.dimensions)

    def runs_on(self, arch: int) -> bool:
        """Whether it compiles for a compute capability (90: 9.0)."""
        return self.min_arch <= arch <= self.max_arch

    def programs(self, problem: Problem, config: Config, sm_count: int, early: bool = True) -> int:
        """Programs to launch; ``early``: as ``scalars`` has it."""
        return int(self.grid(problem, config, sm_count, early))

    def runs_with(self, config: Config, names: tuple[str, ...]) -> list[str]:
        """Which of ``before`` or ``after`` run for a config."""
        return [name for name in names if self.surrounded(config, name)]
