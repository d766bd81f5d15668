"""Which row and config serve each kernel of a call: the lookup ladder, with the limits of every row checked again.

A ``Chooser`` has the choices for one problem. What depends on its length bucket and specialization alone (``Known``) is worked
out once in a process, so that a decoding loop, whose length is new at each step, looks up no rows. Where no row serves, the
documented default config does (``default`` in the kernel's search space), and a log line says so once per key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain

from fa2tune.calling.defaults import better_default, portable_default, small_tiles
from fa2tune.calling.kinds import (
    PORTABLE_ROWS,
    WARP_SPECIALIZED_ROWS,
    Kind,
    kind_of,
    kinds_in_turn,
    kinds_of,
    other_kind,
)
from fa2tune.calling.schedules import (
    bands_schedule,
    few_blocks_schedule,
    forward_schedule,
    fused_schedule,
    ordered,
    packed_schedule,
    query_parts_schedule,
    split_backward_schedule,
    turns_schedule,
    window_schedule,
)
from fa2tune.compiling import limits, measured_code
from fa2tune.compiling.choice import Choice, choice_of
from fa2tune.compiling.compiler import uses_descriptors
from fa2tune.compiling.registry import Misfit, fitting, variant_of
from fa2tune.gpus import Gpu
from fa2tune.logs import warn_once
from fa2tune.rows import lookup, reader
from fa2tune.rows.row import PREDICTED, Row, backward_implementation
from fa2tune.spec.key import DENSE_FAMILY, TuningKey, family_of
from fa2tune.spec.problem import BACKWARD, FUSED, SPLIT, STRATEGIES, Config, Problem
from fa2tune.spec.variant import WARP_SPECIALIZED, Variant, implementation_of

#: (the row that serves, or None; what stood before it and cannot)
Lookup = tuple[lookup.Answer | None, tuple[lookup.Refused, ...]]


@cache
def layers() -> list[reader.Layer]:
    """The cache layers, read once per process."""
    return reader.layers()


@cache
def toolchain() -> lookup.Toolchain:
    """What is running here, for the life of this process."""
    return measured_code.toolchain()


def key_of(problem: Problem, kernel: str, gpu: Gpu) -> TuningKey:
    """The key of a dense row that fits this problem exactly."""
    return TuningKey(
        gpu.name, gpu.sm_count, gpu.arch, kernel, problem.dtype, problem.precision, problem.head_dim, problem.head_dim_v,
        problem.mask.row_mask, problem.bucket,
    )  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    """A kernel's row for a problem."""

    given: Row
    row: Row  #: with every dimension of the search, as for the problem's head dims and (packed sequences) forms
    variant: Variant | None  #: None: the row is of none that is here
    refused: str | None  #: why it cannot serve; None: it can


@dataclass(frozen=True)
class Known:
    """What was worked out for a problem and holds for every one of the same keys, specialization and addressing, whatever its
    batch, heads and lengths. Threads may share it: a value is the same in whichever thread it is worked out."""

    layers: Sequence[reader.Layer]
    node: lookup.Toolchain
    fitted: dict[int, Fitted] = field(default_factory=dict)  #: by identity of the row, which it holds
    of_all_lengths: dict[int, list[Fitted]] = field(default_factory=dict)  #: rows beside one, it first, by its identity
    found: dict[tuple[object, ...], Lookup] = field(
        default_factory=dict
    )  #: by kernel and kind, backward and deterministic
    better_defaults: dict[str, Config | None] = field(default_factory=dict)


#: Of the layers of this process, so that a new length looks nothing up. Bounded: a full one is emptied.
_KNOWN: dict[tuple[object, ...], Known] = {}
KNOWN_KEPT = 512
(FUSED_KERNEL,) = STRATEGIES[FUSED]


def _known(problem: Problem, gpu: Gpu, layers: Sequence[reader.Layer], node: lookup.Toolchain) -> Known:
    place = key_of(problem, BACKWARD, gpu), problem.specialization, problem.tma, gpu, id(layers), id(node)
    if (found := _KNOWN.get(place)) is None:
        if len(_KNOWN) >= KNOWN_KEPT:
            _KNOWN.clear()
        found = _KNOWN[place] = Known(layers, node)
    return found


def forget() -> None:
    """Read the cache layers anew when they are asked for next."""
    layers.cache_clear()
    _KNOWN.clear()


class Chooser:
    """The choices for the kernels of one problem on one GPU."""

    def __init__(
        self, problem: Problem, gpu: Gpu, among: Sequence[reader.Layer] | None = None,
        node: lookup.Toolchain | None = None,
    ) -> None:  # fmt: skip
        """``among``: None for the layers of this process; ``node``: what is running where the call will be, None for here."""
        self.problem, self.gpu = problem, gpu
        self.layers = layers() if among is None else among
        self.node = node or toolchain()
        self._spec = problem.specialization
        self._ladders: dict[TuningKey, lookup.Ladder] = {}
        self._chosen: dict[tuple[str, Kind | None], Choice] = {}
        own = self.layers is not layers() or self.node is not toolchain()
        self._known = (Known if own else partial(_known, problem, gpu))(self.layers, self.node)

    def of(self, problem: Problem) -> Chooser:
        """The same for a problem that may be this one, or have the same keys: nothing is then worked out again."""
        if problem == self.problem:
            return self
        other = Chooser(problem, self.gpu, self.layers, self.node)
        other._ladders = self._ladders
        return other

    def ladder(self, kernel: str) -> lookup.Ladder:
        """Every row that could serve a kernel, or the whole backward, best first."""
        dense = key_of(self.problem, kernel, self.gpu)
        key = dense.with_(family=family_of(self.problem))
        if key not in self._ladders:
            own = () if key == dense else lookup.of_family(key, self.gpu.silicon, self.layers, self.node)
            rest = lookup.candidates(dense, self.gpu.silicon, self.layers, self.node)
            self._ladders[key] = lookup.Ladder(chain(own, rest))
        return self._ladders[key]

    def fitted(self, row: Row) -> Fitted:
        """A kernel's row for this problem, or why it cannot serve: its limits are checked again here."""
        if (found := self._known.fitted.get(id(row))) is None:
            found = self._known.fitted[id(row)] = self._fit(row)
        return found

    def _fit(self, row: Row) -> Fitted:
        problem = self.problem
        try:
            variant, config = fitting(row.key.kernel, row.implementation, row.config)
        except Misfit as odd:
            return Fitted(row, row, None, str(odd))
        if self._spec.scored or not lookup.same_columns(row.key, problem.head_dim, problem.head_dim_v):
            config = dict(variant.fitted(self._spec, config))
        if problem.extent.ragged:
            config = dict(variant.suited(problem, config))
        ours = row if config == row.config else replace(row, config=config)
        if uses_descriptors(variant, config) and not problem.tma:
            why = "a descriptor cannot address these tensors: base or strides are not multiples of 16 bytes, or a row's is 0"
            return Fitted(row, ours, variant, why)
        refused = limits.before_compile(variant, self._spec, config, self.gpu)
        return Fitted(row, ours, variant, refused.why if refused else None)

    def better_default(self, kernel: str) -> Config | None:
        """As ``defaults.better_default`` has it."""
        found = self._known.better_defaults
        if kernel not in found:
            found[kernel] = better_default(kernel, self.problem, self.gpu)
        return found[kernel]

    def _refusal(self, row: Row, kind: Kind | None) -> str | None:
        """Why a kernel's row cannot serve, where those of a kind are asked for."""
        if (other := other_kind(row, kind)) is not None:
            return other
        found = kind_of(row.implementation)
        if found == WARP_SPECIALIZED_ROWS and forward_schedule.portable_is_faster(row.key.kernel, self.problem):
            return f"portable kernels were measured to be faster with {self.problem.score.kind}"
        # measurements stand behind that default (see fa2tune.calling.defaults), none behind the prediction
        if row.obtained == PREDICTED and found == PORTABLE_ROWS and (better := self.better_default(row.key.kernel)):
            name = kind_of(implementation_of(better)).words
            return f"it was only predicted, for a portable kernel: the {name} default was measured to be faster"
        return self.fitted(row).refused

    def find(self, kernel: str, kind: Kind | None = None) -> Lookup:
        """The best row of the ladder for one kernel. ``kind``: of which it has to be."""
        asked, found = (kernel, kind), self._known.found
        if asked not in found:
            found[asked] = lookup.choose(self.ladder(kernel), lambda row: self._refusal(row, kind))
        return found[asked]

    def find_preferring(self, kernel: str, kind: Kind | None) -> Lookup:
        """The same; where no row of that kind can serve, a portable one stands in."""
        found = (self.find(kernel, one) for one in kinds_in_turn(kind))
        return next((one for one in found if one[0]), None) or self.find(kernel, kinds_in_turn(kind)[-1])

    def find_backward(self, deterministic: bool) -> Lookup:
        """The best row for a whole backward."""
        large = packed_schedule.sums_too_large(self.problem, self.gpu)
        asked, found = (BACKWARD, deterministic, large), self._known.found
        if asked not in found:
            refusal = partial(self.strategy_refusal, deterministic=deterministic, large=large)
            found[asked] = lookup.choose(self.ladder(BACKWARD), refusal)
        return found[asked]

    def strategy_refusal(self, row: Row, deterministic: bool, large: bool = False) -> str | None:
        """Why a whole backward's row cannot serve, or None. ``large``: as ``packed_schedule.sums_too_large`` has it."""
        if row.strategy not in STRATEGIES:
            return f"the strategy {row.strategy!r:.40} is not known to this version"
        if row.warp_specialized != (WARP_SPECIALIZED in row.config.values()):
            kind = "a" if row.warp_specialized else "no"
            return f"it is filed as {row.filed_as}, with {kind} warp-specialised kernel, which contradicts its config"
        if row.implementation != backward_implementation(row.warp_specialized):
            return f"the implementation {row.implementation!r:.40} is not known to this version"
        if row.barred:
            return row.barred
        if row.strategy != SPLIT and deterministic:
            how = (
                "it sums dQ in no fixed order"
                if row.strategy == FUSED
                else "nothing says that it sums in a fixed order"
            )
            return f"{how}, and deterministic=True asks for one"
        if row.strategy == FUSED and large:
            return (
                "its sums of dQ, 128 rows for each sequence at least, would take too much memory for so many short ones"
            )
        guessed = row.obtained == PREDICTED and row.strategy == SPLIT
        if guessed and not (deterministic or large) and (better := self._fused_behind()):
            return f"it was only predicted, for split kernels: the fused {better} kernel was measured to be faster"
        for kernel in STRATEGIES[row.strategy]:
            asked = kinds_of(row).get(kernel)
            if asked and asked.special and not self.find(kernel, asked)[0]:
                return f"no row of its {asked.words} {kernel} can serve this problem"
        return None

    def _fused_behind(self) -> str:
        """The implementation of the fused kernel of the best row that was not predicted, if of a near problem, else of the
        documented default; "": these are split, or of portable kernels."""
        raced = (one.row for one in self.ladder(BACKWARD) if one.row.obtained != PREDICTED)
        best = next((row for row in raced if self.strategy_refusal(row, False) is None), None)
        if best is None:
            config = self.better_default(FUSED_KERNEL)
            return kind_of(implementation_of(config)).words if config else ""
        kind = kinds_of(best).get(FUSED_KERNEL)
        return kind.words if kind and kind.special else ""

    def strategy(self, deterministic: bool) -> tuple[str, Mapping[str, Kind]]:
        """(strategy, kernel -> the kind of its row), by the row of the whole backward; a kernel that the row does not name
        chooses by itself. Where there is no row: "fused" if that is the documented default, else "split"."""
        answer, _ = self.find_backward(deterministic)
        if answer is not None:
            return answer.row.strategy, kinds_of(answer.row)
        large = packed_schedule.sums_too_large(self.problem, self.gpu)
        return FUSED if not (deterministic or large) and self._is_fused_by_default() else SPLIT, {}

    def _is_fused_by_default(self) -> bool:
        """Whether the documented default of the fused kernel, or a row of the same kernel, would serve."""
        config = self.better_default(FUSED_KERNEL)
        return config is not None and self.choose(FUSED_KERNEL).variant is variant_of(FUSED_KERNEL, config)

    def choose(self, kernel: str, kind: Kind | None = None) -> Choice:
        """The choice for one kernel: by the best row of the ladder, else the default. ``kind``: of which it is to be, where
        such a row can serve."""
        if (kernel, kind) not in self._chosen:
            self._chosen[kernel, kind] = self._choose(kernel, kind)
        return self._chosen[kernel, kind]

    def _choose(self, kernel: str, kind: Kind | None) -> Choice:
        answer, _ = self.find_preferring(kernel, kind)
        if answer is not None:
            return self.suited(answer)
        problem, gpu = self.problem, self.gpu
        warn_once(
            f"no tuned row for {kernel} on {gpu.name} (head dim {problem.head_dim}, {problem.dtype}): default config"
        )
        return self.default(kernel)

    def default(self, kernel: str) -> Choice:
        """The documented one."""
        config = self.better_default(kernel)
        return choice_of(kernel, config) if config else self.portable_default(kernel)

    def portable_default(self, kernel: str) -> Choice:
        return choice_of(kernel, portable_default(kernel, self.problem, self.gpu.arch))

    def in_small_tiles(self, kernel: str) -> Choice:
        """What serves where no other config compiles."""
        return choice_of(kernel, small_tiles(kernel, self.problem, self.gpu.arch))

    def _of_all_lengths(self, answer: lookup.Answer) -> list[Fitted]:
        """The answer's row, then those of other lengths that could serve."""
        found, row = self._known.of_all_lengths, answer.row
        if id(row) not in found:
            others = map(self.fitted, self._others(answer))
            found[id(row)] = [self.fitted(row), *(one for one in others if one.refused is None)]
        return found[id(row)]

    def _others(self, answer: lookup.Answer) -> Iterator[Row]:
        """Of the answer's file; where that has a row for windows or packed sequences, behind them the dense ones."""
        yield from lookup.of_other_lengths(answer, self.node)
        row = answer.row
        if row.key.family == DENSE_FAMILY:
            return
        alike = (one for one in self.ladder(row.key.kernel) if one.row.key.family == DENSE_FAMILY)
        for one in alike:
            if one.row.filed_as == row.filed_as and self.fitted(one.row).refused is None:
                yield one.row
                yield from lookup.of_other_lengths(lookup.Answer(**vars(one)), self.node)
                return

    def among(self, kernel: str) -> Iterator[Choice]:
        """By each row that ``choose`` may take for a kernel, whatever a call's batch, heads and lengths are."""
        answer, _ = self.find_preferring(kernel, None)
        for one in self._of_all_lengths(answer) if answer else []:
            assert one.variant is not None  # of what could serve
            yield Choice(one.variant, one.variant.suited(self.problem, one.row.config), one.given, answer)

    def suited(self, answer: lookup.Answer) -> Choice:
        """The config for this batch, these heads and lengths, and the row it comes from: the answer's, or of another length."""
        problem, own = self.problem, self.fitted(answer.row)
        variant = own.variant
        assert variant is not None  # of an answer
        if problem.extent.ragged and forward_schedule.covers(variant) and packed_schedule.covers_mask(problem):
            return self._suited_to_packed(answer, own)
        if problem.extent.ragged and packed_schedule.covers_backward(variant) and problem.mask.measured:
            choice = Choice(variant, own.row.config, answer.row, answer)
            choice = packed_schedule.of_backward(problem, answer.row.key.kernel, choice, self.gpu)
            return query_parts_schedule.with_parts(problem, choice, self.gpu)
        by_schedule = forward_schedule.covers(variant) and not problem.extent.ragged
        by_work = not fused_schedule.recorded(problem.mask) and answer.row.warp_specialized
        if not by_schedule and not by_work:
            choice = Choice(variant, variant.suited(problem, own.row.config), answer.row, answer)
            choice = fused_schedule.of_dense(problem, choice, self.gpu)
            choice = few_blocks_schedule.in_step(problem, choice, self.gpu)
            choice = bands_schedule.in_bands(problem, choice, self.gpu)
            return query_parts_schedule.with_parts(problem, choice, self.gpu)
        rows = {id(one.row): one for one in self._of_all_lengths(answer)}
        served, *able = (one.row for one in rows.values())
        if by_schedule:
            model = window_schedule if window_schedule.covers(problem) else forward_schedule
            row, config = model.best(problem, served, able, self.gpu.sm_count)
            few = forward_schedule.is_for_few_tiles(problem, config, row)
            if model is forward_schedule:
                config = forward_schedule.with_divisors(problem, row, config, self.gpu.sm_count)
            otherwise = variant.suited(problem, row.config) if few or config.get("DIVISORS") else None
            return Choice(variant, config, rows[id(row)].given, answer, few, otherwise)
        found = rows[id(forward_schedule.of_like_work(problem, served, able))]
        assert found.variant is not None
        choice = Choice(found.variant, found.variant.suited(problem, found.row.config), found.given, answer)
        if problem.extent.ragged and packed_schedule.covers_backward(found.variant):
            return packed_schedule.of_backward(problem, answer.row.key.kernel, choice, self.gpu)
        return choice

    def _suited_to_packed(self, answer: lookup.Answer, own: Fitted) -> Choice:
        """The same for a forward of packed sequences. Their forms do not depend on lengths, so a fitted row has them
        (``_fit``)."""
        problem, gpu, variant = self.problem, self.gpu, own.variant
        assert variant is not None
        rows = {id(one.row): one for one in self._of_all_lengths(answer)}
        if not problem.mask.measured:
            like = forward_schedule.of_like_work(problem, own.row, [one.row for one in rows.values()])
            rows = {id(like): rows[id(like)], **rows}
        served, *able = ((one.given, one.row.config) for one in rows.values())
        row, config = packed_schedule.best(problem, served, able, gpu)
        few = packed_schedule.is_for_few_tiles(problem, config, row, gpu.arch)
        return Choice(variant, config, row, answer, few, served[1] if few else None)


def choose(
    problem: Problem, kernel: str, gpu: Gpu, kind: Kind | None = None, among: Sequence[reader.Layer] | None = None,
    node: lookup.Toolchain | None = None,
) -> Choice:  # fmt: skip
    """``Chooser.choose`` for one kernel of a problem."""
    return Chooser(problem, gpu, among, node).choose(kernel, kind)


def choose_in_order(chooser: Chooser) -> Choice | None:
    """The choice of the fused kernel for a deterministic backward, with dQ summed in a fixed order; None: the split kernels
    serve."""
    strategy, kinds = chooser.strategy(False)
    if strategy != FUSED:
        return None
    free = chooser.choose(ordered.KERNEL, kinds.get(ordered.KERNEL))
    in_order = turns_schedule if turns_schedule.covers(free.variant) else ordered
    return in_order.instead_of(chooser.problem, free, chooser.gpu)


def choose_backward(chooser: Chooser, deterministic: bool, in_order: bool = True) -> tuple[str, dict[str, Choice]]:
    """Strategy of a backward, and the choice for each of its kernels. ``in_order``: a deterministic one may be fused."""
    if deterministic and in_order and (found := choose_in_order(chooser)) is not None:
        return FUSED, {ordered.KERNEL: found}
    strategy, kinds = chooser.strategy(deterministic)
    choices = {kernel: chooser.choose(kernel, kinds.get(kernel)) for kernel in STRATEGIES[strategy]}
    return strategy, split_backward_schedule.in_short_form(chooser.problem, choices, chooser.gpu)


def strategy_of(
    problem: Problem, gpu: Gpu, deterministic: bool, among: Sequence[reader.Layer] | None = None,
    node: lookup.Toolchain | None = None,
) -> tuple[str, Mapping[str, Kind]]:  # fmt: skip
    """``Chooser.strategy`` of a problem."""
    return Chooser(problem, gpu, among, node).strategy(deterministic)
