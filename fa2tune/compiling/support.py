"""Whether a kernel computes a call on a GPU (``supports``), and which one does of those with a role (``companion``).

Of several that do, the one of the most specific architecture is taken (``registry.having_role``); two of the same are an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from fa2tune.compiling import registry
from fa2tune.compiling.compiler import interpreted, is_gluon
from fa2tune.gpus import Gpu
from fa2tune.spec.problem import Specialization
from fa2tune.spec.roles import ROLES
from fa2tune.spec.variant import PORTABLE_FOLDER, Variant

#: Compute capability that Triton's interpreter passes for.
INTERPRETED_ARCH = 80
#: Hooks of a mask that kernels ask about scores, so that those are what a score term is asked about, too.
SEES_SCORES = frozenset(("KEEP", "HIDE", "HIDE_QUERIES"))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a kernel or a config is dropped."""

    name: str  #: short, for counting
    why: str  #: a sentence with the numbers


def _capability(arch: int) -> str:
    """90 -> "9.0"."""
    return f"{arch // 10}.{arch % 10}"


def unsupported(variant: Variant, spec: Specialization, gpu: Gpu) -> Refusal | None:
    """Why no config of a kernel computes calls like these on this GPU, or None."""
    if interpreted() and is_gluon(variant):
        return Refusal("interpreter", f"{variant.short_name} is written in Gluon, which has no interpreter")
    if not variant.runs_on(gpu.arch):
        if variant.max_arch == variant.min_arch:
            needed = f"exactly {_capability(variant.min_arch)}"
        elif gpu.arch < variant.min_arch:
            needed = f"{_capability(variant.min_arch)} or newer"
        else:
            needed = f"{_capability(variant.max_arch)} or older"
        return Refusal(
            "architecture", f"{variant.short_name} needs compute capability {needed}; {gpu.name} has {gpu.capability}"
        )
    if variant.role and not _in_space(variant.role, variant.name, spec, gpu.arch):
        return Refusal("call", f"the search space of {variant.short_name} has no config for such calls")
    if (why := registry.refused_mask(variant, spec)) is not None:
        return Refusal("mask", why)
    if (why := registry.refused_score(variant, spec)) is not None:
        return Refusal("score", why)
    if (why := registry.refused_scale(variant, spec)) is not None:
        return Refusal("scale", why)
    return None


def _in_space(role: str, name: str, spec: Specialization, arch: int) -> bool:
    """Whether the search space of a kernel with a role has a config for such calls."""
    asked = ROLES[role].asked
    return not asked or bool(getattr(registry.space_file(name), asked)(spec, arch))


def supports(variant: Variant, spec: Specialization, gpu: Gpu) -> bool:
    """Whether some config of a kernel computes calls like these on this GPU."""
    return unsupported(variant, spec, gpu) is None


def _computes(role: str, name: str, spec: Specialization, arch: int) -> bool:
    """Whether a kernel with a role does. The file of one that any GPU can run is not run for that: it computes every mask,
    score term and scale."""
    if not registry.texts()[name].runs_on(arch) or not _in_space(role, name, spec, arch):
        return False
    if name.startswith(f"{PORTABLE_FOLDER}/"):
        return True
    variant = registry.variants().get(name)  # None: this Triton has no such kernel
    if variant is None or (interpreted() and is_gluon(variant)):
        return False
    sees_scores = not SEES_SCORES.isdisjoint(variant.constexpr_names)
    if spec.scored and sees_scores and "APPLY" not in variant.constexpr_names:
        return False
    return registry.refused_mask(variant, spec) is None and registry.refused_scale(variant, spec) is None


def companion_path(role: str, spec: Specialization, arch: int) -> str | None:
    """The kernel with a role of roles.ROLES that computes such a call, by path; None: none does. ``arch``: a compute capability
    (90: 9.0), or 0 for Triton's interpreter. ValueError: two of the same architectures do."""
    found, arch = None, arch or INTERPRETED_ARCH
    for name in registry.having_role(role):
        if found is not None and registry.rank(name) != registry.rank(found):
            break
        if not _computes(role, name, spec, arch):
            continue
        if found is not None:
            raise ValueError(
                f"role {role}: {found} and {name} both compute such a call on {_capability(arch)}; one has to state other "
                "min_arch or max_arch"
            )
        found = name
    return found


def companion(role: str, spec: Specialization, arch: int) -> Variant:
    """The same as a Variant. ValueError: there is none, too."""
    if (name := companion_path(role, spec, arch)) is None:
        known = ", ".join(registry.having_role(role)) or "none"
        raise ValueError(
            f"role {role}: no kernel computes such a call on {_capability(arch)}; kernels that have it: {known}"
        )
    return registry.variant_named(name)


def companion_space(role: str, spec: Specialization, arch: int) -> ModuleType | None:
    """The file of its search space, with the functions that roles.ROLES names; None: no kernel computes such a call."""
    name = companion_path(role, spec, arch)
    return None if name is None else registry.space_file(name)


def companion_most(role: str, spec: Specialization, arch: int, dimension: str) -> int:
    """The largest value that a dimension of its search space has; 0: no kernel computes such a call."""
    space = companion_space(role, spec, arch)
    return 0 if space is None else max(space.SPACE.dimensions[dimension])
