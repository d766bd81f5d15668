"""Which kernels there are, and which kernel a config is of."""

from __future__ import annotations

import ast
import importlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from fa2tune.compiling import binaries, hostside
from fa2tune.compiling.composition import STATED
from fa2tune.spec.extent import RAGGED
from fa2tune.spec.maskfile import hooks_of, mask_named
from fa2tune.spec.problem import KERNELS, Config, Specialization
from fa2tune.spec.roles import ROLES, lacking
from fa2tune.spec.score import NONE
from fa2tune.spec.stated import calls, kernel_texts
from fa2tune.spec.tuned import BRINGS, tuned
from fa2tune.spec.variant import DESCRIPTOR, HOOKS, OPTIONAL_HOOKS, PORTABLE_FOLDER, Variant, implementation_of

log = logging.getLogger("fa2tune")


class Stated(NamedTuple):
    """What a kernel's file says of itself in the call that VARIANT is, by the fields of ``Variant``."""

    serves: str = ""
    role: str = ""
    ordered_form_of: str = ""
    min_arch: int = Variant.min_arch
    max_arch: int = Variant.max_arch

    def runs_on(self, arch: int) -> bool:
        return self.min_arch <= arch <= self.max_arch


def stated(text: str, where: str) -> Stated:
    """What a kernel's file says. ``where``: the file, for errors. ValueError: what it says is no literal, or no kernel, role or
    architecture."""
    found: set[Stated] = set()
    for said in calls(text, where):
        found.add(Stated(**{name: _literal(name, said[name], where) for name in Stated._fields if name in said}))
    if len(found) > 1:
        for name, of_each in zip(Stated._fields, zip(*found, strict=True), strict=True):
            if len({*of_each}) > 1:
                raise ValueError(
                    f"{where}: {name}: got {' and '.join(map(repr, sorted(of_each)))}, a file holds one kernel"
                )
    return next(iter(found), Stated())


def _literal(name: str, said: ast.expr, where: str) -> Any:
    """The value of a field of ``Stated``."""
    value = said.value if isinstance(said, ast.Constant) else None
    if name in ("min_arch", "max_arch"):
        fits, allowed = type(value) is int, "integers"
    elif name == "ordered_form_of":
        fits, allowed = isinstance(value, str), "paths of kernels"
    else:
        known = KERNELS if name == "serves" else tuple(ROLES)
        fits, allowed = value in ("", *known), ", ".join(f'"{one}"' for one in known)
    if not fits:
        raise ValueError(f"{where}: {name}: got {ast.unparse(said):.60}, allowed are {allowed}, written out")
    return value


@cache
def texts() -> Mapping[str, Stated]:
    """What the file of each kernel says of it, by its path: kernels/<folder>/<name>.py is "<folder>/<name>". None is run."""
    found = {name: stated(text, f"kernels/{name}.py") for name, text in kernel_texts().items()}
    for name, text in found.items():
        if (free := text.ordered_form_of) and free not in found:
            raise ValueError(f"kernels/{name}.py: ordered_form_of: got {free!r:.60}, which is no kernel's path")
    return found


@cache
def _triton_imports() -> bool:
    try:
        importlib.import_module("triton")
    except Exception:  # a broken Triton raises what it likes
        return False
    return True


class Variants(Mapping[str, Variant]):
    """Every kernel, by its path. Its file holds ``VARIANT``, and is run when that is needed.

    Where this Triton lacks what the kernels of an architecture are written with, they are absent, and a log line says so."""

    def __init__(self) -> None:
        self.stated = dict(texts())
        self._read: dict[str, Variant | None] = {}

    def _of(self, name: str) -> Variant | None:
        """What one file holds. ValueError: it is another kernel than its text says, or lacks what its role asks."""
        if name not in self._read:
            module = name.replace("/", ".")
            found = self._without_triton(module) or self._with_triton(module)
            if found is not None:
                object.__setattr__(found, "name", name)
                self._check(found)
            self._read[name] = found
        return self._read[name]

    def _check(self, variant: Variant) -> None:
        name, text = variant.name, self.stated[variant.name]
        for one in STATED:
            if (own := getattr(variant, one)) != (said := getattr(text, one)):
                raise ValueError(
                    f"kernels/{name}.py: its Variant has {one} {own!r}, which the call that VARIANT is has to say as "
                    f'{one}="{own}", got {said!r}'
                )
        if variant.products is not None:
            brought = tuned()[variant.serves]
            for one in BRINGS:
                if (own := getattr(variant, one)) not in ("", getattr(brought, one)):
                    raise ValueError(
                        f"kernels/{name}.py: its Variant has {one} {own!r}, which the call that VARIANT is has to say as a "
                        f"literal, got {getattr(brought, one)!r}"
                    )
        if text.role and (text.min_arch, text.max_arch) != (variant.min_arch, variant.max_arch):
            raise ValueError(
                f"kernels/{name}.py: its Variant has min_arch {variant.min_arch} and max_arch {variant.max_arch}, which the "
                f"call that VARIANT is has to say, got {text.min_arch} and {text.max_arch}"
            )
        if text.role:
            space = space_file(name) if ROLES[text.role].functions else None
            if lacks := list(lacking(text.role, variant, space)):
                raise ValueError(
                    f"kernels/{name}.py: role {text.role}: it lacks {', '.join(lacks)} (fa2tune/spec/roles.py)"
                )

    @staticmethod
    def _without_triton(module_name: str) -> Variant | None:
        """Where kernels may be found compiled; None: this one takes Triton."""
        if not binaries.trusted().files or os.environ.get("TRITON_INTERPRET", "0") == "1":
            return None
        try:
            return hostside.variant(module_name)
        except Exception as error:  # whatever a kernel file does with a stand-in
            log.info("kernels.%s cannot be read without Triton: %s", module_name, error)
            return None

    @staticmethod
    def _with_triton(module_name: str) -> Variant | None:
        if not _triton_imports():  # what is wanted of it can be told, and a compile says what is missing
            return hostside.variant(module_name)
        try:
            module = importlib.import_module(f"fa2tune.kernels.{module_name}")
        except (ImportError, AttributeError) as error:
            if module_name.startswith(f"{PORTABLE_FOLDER}."):
                raise
            why = f"{type(error).__name__}: {error}"
            log.warning("fa2tune: left out, as this Triton cannot import it: kernels.%s (%s)", module_name, why)
            return None
        found: Variant = module.VARIANT
        return found

    def _whole(self, names: Iterable[str]) -> dict[str, Variant]:
        """Theirs, without those whose neighbours are absent."""
        found = {name: variant for name in names if (variant := self._of(name)) is not None}
        return {
            name: variant
            for name, variant in found.items()
            if all(self.get(one) for one in (*variant.before, *variant.packed_before, *variant.after))
        }

    def serving(self, kernel: str) -> Iterable[Variant]:
        """Those that implement a kernel of problem.KERNELS."""
        return self._whole(name for name, text in self.stated.items() if text.serves == kernel).values()

    def __getitem__(self, name: str) -> Variant:
        return self._whole([name] if name in self.stated else [])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole(self.stated))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def variants() -> Mapping[str, Variant]:
    """Every kernel variant, by name."""
    return Variants()


def variant_named(name: str) -> Variant:
    """The kernel of a path below kernels/, as "sm90/fwd". ValueError: there is none."""
    try:
        return variants()[name]
    except KeyError:
        raise ValueError(f"kernel: got {name!r}, known are {', '.join(variants())}") from None


@cache
def implementations(kernel: str) -> Mapping[str, Variant]:
    """The implementations of a kernel, by name, each with its Variant: the portable ones first."""
    known = variants()
    serving = known.serving(kernel) if isinstance(known, Variants) else known.values()
    of_kernel = [variant for variant in serving if variant.serves == kernel]
    if len(portable := sorted(variant.name for variant in of_kernel if variant.portable)) > 1:
        raise ValueError(
            f"kernel {kernel}: {' and '.join(portable)} are both portable, as their configs have LOADS; "
            "all but one have to name themselves by a dimension IMPLEMENTATION"
        )
    found: dict[str, Variant] = {}
    for variant in sorted(of_kernel, key=lambda variant: not variant.portable):
        for name in variant.implementations:
            if found.setdefault(name, variant) is not variant:
                raise ValueError(f"kernel {kernel}: {found[name].name} and {variant.name} are both {name}")
    return found


def portable_of(kernel: str) -> Variant:
    """The portable Variant of a kernel. ValueError: there is no such kernel."""
    found = next((variant for variant in implementations(kernel).values() if variant.portable), None)
    if found is None:
        raise ValueError(f"kernel: got {kernel!r:.40}, known are {', '.join(KERNELS)}")
    return found


def variants_of(kernel: str) -> tuple[Variant, ...]:
    """Every Variant that serves as this kernel, the portable one first."""
    return tuple(dict.fromkeys(implementations(kernel).values()))


def variant_of(kernel: str, config: Config) -> Variant:
    """The Variant that a config of a kernel is of. ValueError: this version has none."""
    implementation, known = implementation_of(config), implementations(kernel)
    if implementation not in known:
        raise ValueError(f"kernel {kernel}: got a {implementation!r:.40} config, known are {', '.join(known)}")
    return known[implementation]


def completed(kernel: str, config: Config) -> dict[str, Any]:
    """A config from a file with what it lacks of the dimensions that its search has gained since."""
    return variant_of(kernel, config).space.completed(config)


class Misfit(ValueError):
    """A config from a file is no point of the search space of the implementation it is filed as. The message says why."""


def fitting(kernel: str, filed_as: str, config: Config) -> tuple[Variant, dict[str, Any]]:
    """The Variant of a config from a file, and the config ``completed``. Misfit."""
    try:
        variant = variant_of(kernel, config)
    except ValueError as error:
        raise Misfit(str(error)) from None
    if (implementation := implementation_of(config)) != filed_as:
        raise Misfit(f"it is filed as {filed_as:.40}, and its config is a {implementation} one")
    dimensions, found = variant.space.dimensions, variant.space.completed(config)
    if set(found) != set(dimensions):
        raise Misfit(f"its config does not name the dimensions of {variant.short_name}")
    for name, value in found.items():  # a file is data from somewhere else
        if not any(type(value) is type(known) and value == known for known in dimensions[name]):
            raise Misfit(
                f"its config has {name} {value!r:.40}, which is not a value of {variant.short_name}'s search space"
            )
    return variant, found


def misfit(kernel: str, filed_as: str, config: Config) -> str | None:
    """Why ``fitting`` refuses a config; None: it does not."""
    try:
        fitting(kernel, filed_as, config)
    except Misfit as odd:
        return str(odd)
    return None


@cache  # asked for each point of a search space
def _mask_hooks(variant: Variant) -> tuple[frozenset[str], tuple[str, ...]]:
    """(what a kernel, and those before and after it, call of a mask's file; those of them that know of a mask its last key
    alone)."""
    every = (variant, *filter(None, map(variants().get, (*variant.before, *variant.after))))
    asked = {one.short_name: one.constexpr_names & set(HOOKS) for one in every}
    by_last_key = (one.short_name for one in every if one.constexpr_names & set(OPTIONAL_HOOKS))
    return (
        frozenset(HOOKS[name] for names in asked.values() for name in names),
        tuple(name for name in by_last_key if not asked[name]),
    )


def refused_mask(variant: Variant, spec: Specialization) -> str | None:
    """Why a kernel cannot compute a call's mask, or None. One that calls no hook but LAST_KEY has rows see all keys up to that
    one, or all: no other mask that is bounded."""
    asked, by_last_key = _mask_hooks(variant)
    has_last_key = set(OPTIONAL_HOOKS.values()) <= hooks_of(spec.mask)
    if by_last_key and not has_last_key and any(mask_named(spec.mask).bounded.values()):
        return f"{by_last_key[0]} computes masks without bounds or with a last key, and {spec.mask} has bounds alone"
    if lacking := sorted(asked - hooks_of(spec.mask)):
        return f"kernels/masks/{spec.mask}.py does not define {', '.join(lacking)}, which {variant.short_name} calls"
    return None


def refused_score(variant: Variant, spec: Specialization) -> str | None:
    """Why a tuned kernel cannot compute a call's score term, or None."""
    hooks = {"APPLY"} if variant.serves == "fwd" else {"APPLY", "GRAD"}
    if spec.score != NONE.name and variant.serves and not hooks <= set(variant.constexpr_names):
        return f"{variant.short_name} computes no score term, and the call has {spec.score}"
    return None


def refused_scale(variant: Variant, spec: Specialization) -> str | None:
    """Why a forward cannot compute a call's negative softmax_scale, or None. Kernels get the size of the scale, and the sign as
    NEGATE. A backward, which takes ``do``, gets both in softmax_scale."""
    forward = {"q", "k"} <= {*variant.tensors} and "do" not in variant.tensors
    if spec.negate and forward and "NEGATE" not in variant.constexpr_names:
        return f"{variant.short_name} has no parameter NEGATE, and the call has a negative softmax_scale"
    return None


def portable_config(kernel: str, spec: Specialization, arch: int) -> Config:
    """Of the portable variant: by pointer where descriptors cannot have packed sequences."""
    return portable_of(kernel).space.default(replace(spec, aligned=False) if spec.ragged else spec, arch)


def rank(name: str) -> tuple[bool, int, int]:
    """The less, the more specific: kernels of an architecture before those that any GPU can run, and of these the ones of the
    newest first, then of the fewest."""
    text = texts()[name]
    return name.startswith(f"{PORTABLE_FOLDER}/"), -text.min_arch, text.max_arch


@cache
def having_role(role: str) -> tuple[str, ...]:
    """The kernels that have a role of roles.ROLES, by path, the most specific first. Their files are not run. ValueError: there
    is no such role."""
    if role not in ROLES:
        raise ValueError(f"role: got {role!r:.40}, known are {', '.join(ROLES)}")
    return tuple(sorted((name for name, text in texts().items() if text.role == role), key=rank))


def space_file(name: str) -> ModuleType:
    """The file of a kernel's search space, which has the kernel's own path."""
    return importlib.import_module(f"fa2tune.search_spaces.{name.replace('/', '.')}")


def role_kernel(role: str, implementation: str) -> str | None:
    """The path of the kernel with a role whose configs are of an implementation; None: there is none. ValueError: there are
    several. Files of kernels are not run."""
    found = [name for name in having_role(role) if implementation in space_file(name).SPACE.implementations]
    if len(found) > 1:
        raise ValueError(f"role {role}: {' and '.join(found)} are both {implementation}")
    return next(iter(found), None)


def ordered_form(variant: Variant) -> Variant | None:
    """The kernel that computes the same as a fused one with dQ summed in a fixed order; None: there is none. ValueError: there
    are several, or it is of other dimensions."""
    found = [name for name, text in texts().items() if text.ordered_form_of == variant.name]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} are both ordered forms of {variant.name}")
    if not found or (form := variants().get(found[0])) is None:
        return None
    if odd := {*form.space.dimensions} ^ {*variant.space.dimensions, "DQ_BUFFERS"}:
        raise ValueError(
            f"kernels/{form.name}.py: its dimensions are not DQ_BUFFERS and those of {variant.name}: {', '.join(sorted(odd))}"
        )
    return form


def in_any_order(variant: Variant) -> Variant:
    """Of a kernel with a fixed order, the one without; another as it is."""
    return variant_named(variant.ordered_form_of) if variant.ordered_form_of else variant


def refused_extent(variant: Variant, spec: Specialization, config: Config) -> str | None:
    """Why a tuned kernel cannot compute sequences of their own lengths, or None."""
    if spec.extent != RAGGED or not variant.serves:
        return None
    if "RAGGED" not in variant.constexpr_names:
        return f"{variant.short_name} computes sequences of one length, and the call has packed ones"
    if implementation_of(config) == DESCRIPTOR:
        return "a descriptor reads past the end of a packed sequence, into the next one"
    return None
