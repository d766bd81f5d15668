"""The binaries of one search task: which are compiled, which are under way, and whose launches wait for one."""

from __future__ import annotations

from fa2tune.compiling import compiler
from fa2tune.spec.problem import Config
from fa2tune.spec.variant import Variant
from fa2tune.tuning.search.candidates import Point, point
from fa2tune.tuning.search.compile_check import CompileResult


class Binaries:
    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._results: dict[Point, CompileResult | None] = {}  #: by binary; None while it compiles
        self._waiting: dict[Point, list[Config]] = {}  #: by binary that compiles, its other launches

    def of(self, config: Config) -> Point:
        """What the binary of a config depends on."""
        return point(compiler.binary_config(self.variant, config))

    def result(self, config: Config) -> CompileResult | None:
        """What came of its binary; None: not known, or not yet."""
        return self._results.get(self.of(config))

    def shares(self, config: Config) -> bool:
        """Whether its binary is known or under way; if not, it is from now on."""
        binary = self.of(config)
        known = binary in self._results
        if known and self._results[binary] is None:
            self._waiting.setdefault(binary, []).append(config)
        self._results.setdefault(binary, None)
        return known

    def compiled(self, config: Config, result: CompileResult) -> list[Config]:
        """The other launches that waited for this one's binary."""
        binary = self.of(config)
        if binary in self._results:
            self._results[binary] = result
        return self._waiting.pop(binary, [])
