"""What serves one kernel of a call: derived once, where a row is chosen, and carried to the launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fa2tune.compiling.registry import variant_of
from fa2tune.rows.lookup import Answer
from fa2tune.rows.row import Row, over_portable
from fa2tune.spec.problem import Config
from fa2tune.spec.variant import Variant

#: How a call is served whose config the schedule model has for few tiles, or in another form than the row's, for counting.
BY_FEW_TILES, BY_FORM = "schedule model, few tiles", "schedule model, another form"


@dataclass(frozen=True)
class Choice:
    """A kernel's implementation and config for one problem, and the row they come from."""

    variant: Variant
    config: Config  #: of the launch: every dimension of the search, fitted to the problem
    row: Row | None = None  #: whose config it is; None: of no row
    #: the row that the lookup names, and its place there: of another length bucket than ``row`` where that suits the problem's
    #: batch, heads and lengths better
    answer: Answer | None = None
    #: whether ``config`` is one that the schedule model has for calls of few tiles: the row's kernel runs, with another config
    few_tiles: bool = False
    #: the row's own config, where ``config`` is another form of it that suits this call's batch, heads and lengths better
    otherwise: Config | None = None

    @property
    def of_row(self) -> Choice:
        """With the row's own config."""
        return self if self.otherwise is None else replace(self, config=self.otherwise, otherwise=None, few_tiles=False)

    @property
    def step(self) -> str:
        """For counting. Of the lookup: "problem exact, GPU exact, measured, fresh, shipped layer", ..., or "default"; of a
        config that no row has, BY_FEW_TILES or BY_FORM."""
        if self.estimated:
            return BY_FEW_TILES if self.few_tiles else BY_FORM
        return self.answer.step if self.answer else "default"

    @property
    def estimated(self) -> bool:
        """Whether ``config`` is one that no row has."""
        return self.few_tiles or self.otherwise is not None or bool(self.config.get("IN_ORDER"))

    @property
    def triton(self) -> str:
        """The version of Triton whose machine code the row was measured with; "": there is no row."""
        return self.row.triton if self.row else ""

    @property
    def lead(self) -> float | None:
        """How many times as fast the answer is as the portable winner of its key; None: it is that, or no row's config runs."""
        return over_portable(self.answer.row, self.answer.layer.rows) if self.answer and not self.estimated else None


def choice_of(kernel: str, given: Config | Choice) -> Choice:
    """``given``, or the choice that a bare config of a kernel is. ValueError: this version has no such implementation."""
    return given if isinstance(given, Choice) else Choice(variant_of(kernel, given), given)


#: By kernel, in the order of their launches.
Chosen = Mapping[str, Config | Choice]
