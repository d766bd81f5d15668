"""The kernels that are tuned by themselves: one table. A kernel's file may bring a name of its own, with what stands here for
the shipped ones, as literals in the call that VARIANT is."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fa2tune.spec.stated import calls, kernel_texts


@dataclass(frozen=True)
class Tuned:
    """What the host knows of a kernel by its name."""

    products: tuple[int, int]  #: matrix products for a visible pair: over the head dim of Q and K, over that of V
    title: str  #: for people
    #: of SHIPPED, whose loop over tiles it has, by which the model estimates it, and whose tensors it reads and writes; "": of
    #: none, and it is only timed
    loop: str
    #: tensors that it has to read or write, each once; of "dq_sums", float32, it reads and writes each. lse and delta are a
    #: float32 a row
    moved: tuple[str, ...] = ()
    #: whose columns its accumulators have, for each row or key that a tile owns: "q" for the head dim of Q and K, "v" for V's
    accumulators: tuple[str, ...] = ()
    strategy: tuple[str, ...] = ()  #: of the backward: its name, then its kernels, in order


_READ = ("q", "k", "v", "do", "lse")  #: by each kernel of a backward
#: Of a whole backward.
BACKWARD_MOVED = (*_READ, "o", "dq", "dk", "dv")
_SPLIT, _FUSED = ("split", "bwd_dq", "bwd_dkdv"), ("fused", "bwd_fused")
SHIPPED: Mapping[str, Tuned] = {
    "fwd": Tuned((1, 1), "forward", "fwd", ("q", "k", "v", "o", "lse"), ("v",)),
    "bwd_dkdv": Tuned((2, 2), "backward dK, dV", "bwd_dkdv", (*_READ, "delta", "dk", "dv"), ("q", "v"), _SPLIT),
    "bwd_dq": Tuned(
        (2, 1), "backward dQ", "bwd_dq", (*_READ, "o", "delta", "dq"), ("q",), _SPLIT
    ),  # it makes delta, too
    "bwd_fused": Tuned(
        (3, 2), "backward, fused", "bwd_fused", (*_READ, "delta", "dk", "dv", "dq_sums"), ("q", "v"), _FUSED
    ),
}
#: What a file says that brings a name.
BRINGS = ("products", "title", "loop", "strategy")


@cache
def tuned() -> Mapping[str, Tuned]:
    """By name: the shipped ones, then those that files of kernels/ bring. ValueError: what a file says is not allowed."""
    found = dict(SHIPPED)
    for path, text in kernel_texts().items():
        if "products=" in text:  # else there is nothing to parse
            for said in calls(text, where := f"kernels/{path}.py"):
                if any(name in said for name in BRINGS):
                    name, one = _brought(said, where)
                    if found.setdefault(name, one) != one:
                        raise ValueError(
                            f"{where}: serves: got {name!r}, which another file brings, too, and not the same"
                        )
    own = {name: one for name, one in found.items() if name not in SHIPPED}
    by_name = {one.strategy[0]: one.strategy for one in SHIPPED.values() if one.strategy}
    for name, one in own.items():
        if by_name.setdefault(one.strategy[0], one.strategy) != one.strategy:
            raise ValueError(f"{name}: strategy: got {one.strategy!r}, and there is {by_name[one.strategy[0]]!r}")
        if unknown := [each for each in one.strategy[1:] if each not in found or each == "fwd"]:
            known = ", ".join(each for each in found if each != "fwd")
            raise ValueError(f"{name}: strategy: got the kernel {unknown[0]!r:.40}, known are {known}")
    return found


def moved(kernel: str) -> tuple[str, ...]:
    """Tensors that a tuned kernel or "bwd", a whole backward, has to move. ValueError: there is no such kernel."""
    if kernel == "bwd":
        return BACKWARD_MOVED
    if kernel not in tuned():
        raise ValueError(f"kernel: got {kernel!r:.40}, known are {', '.join(tuned())}, bwd")
    return tuned()[kernel].moved


def strategies() -> dict[str, tuple[str, ...]]:
    """The strategies of the backward: the tuned kernels of each, in order."""
    order = {strategy[0]: strategy[1:] for strategy in (_SPLIT, _FUSED)}
    return order | {one.strategy[0]: one.strategy[1:] for one in tuned().values() if one.strategy}


def _brought(said: Mapping[str, ast.expr], where: str) -> tuple[str, Tuned]:
    """(name, what stands for it in the table)."""

    def given(argument: str, otherwise: Any, allowed: str, fits: Any) -> Any:
        try:
            value = ast.literal_eval(said[argument]) if argument in said else otherwise
        except ValueError:
            value = None
        if not fits(value):
            got = ast.unparse(said[argument]) if argument in said else "nothing"
            raise ValueError(f"{where}: {argument}: got {got:.60}, allowed is {allowed}, written out")
        return value

    name = given(
        "serves", "", f'a name that begins with "bwd_" and is none of {", ".join(SHIPPED)}, with {", ".join(BRINGS)}',
        lambda one: isinstance(one, str) and one.startswith("bwd_") and one.isidentifier() and one not in SHIPPED,
    )  # fmt: skip
    products = given(
        "products", None, "two numbers of matrix products, over the head dims of Q and of V",
        lambda one: isinstance(one, tuple) and len(one) == 2 and all(type(each) is int and each >= 0 for each in one),
    )  # fmt: skip
    strategy = given(
        "strategy", (), f"the name of a strategy and its kernels in order, {name} among them",
        lambda one: isinstance(one, tuple) and all(isinstance(each, str) and each.isidentifier() for each in one)
        and name in one[1:],
    )  # fmt: skip
    loop = given("loop", "", f'"" or one of {", ".join(SHIPPED)}', lambda one: one in ("", *SHIPPED))
    title = given("title", name, "a text", lambda one: isinstance(one, str) and one.strip() != "")
    like = SHIPPED[loop] if loop else None
    return name, Tuned(
        products, title, loop, like.moved if like else _READ, like.accumulators if like else (), strategy
    )
