"""What makes a row stale: hashes of kernel source and search space, and the versions of the toolchain."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from fa2tune.compiling import binaries, composition
from fa2tune.compiling.registry import having_role, implementations, variant_named, variants_of
from fa2tune.rows.row import backward_implementation, hashed_as
from fa2tune.spec.mask import BAND
from fa2tune.spec.maskfile import ROW_MASKS, hooks_of
from fa2tune.spec.problem import BACKWARD, FUSED, KERNELS, STRATEGIES
from fa2tune.spec.roles import BWD_DELTA
from fa2tune.spec.score import NONE
from fa2tune.spec.standins import is_module
from fa2tune.spec.variant import HOOKS, OPTIONAL_HOOKS, SCORE_HOOKS, WARP_SPECIALIZED, Variant

#: Files below fa2tune/ that decide what is hashed, and how.
SOURCES = (
    "compiling/compiler.py", "compiling/composition.py", "compiling/fingerprint.py", "compiling/registry.py", "rows/row.py",
    "spec/maskfile.py", "spec/problem.py", "spec/roles.py", "spec/scorefile.py", "spec/standins.py", "spec/stated.py",
    "spec/tuned.py", "spec/variant.py",
)  # fmt: skip


#: Masks whose hooks rows are measured with.
MEASURED_MASKS = (*ROW_MASKS, BAND)


@cache
def source_digest() -> str:
    """sha256 of every byte that the hashes below may depend on, comments included: where it is known, they are."""
    here = Path(__file__).parent.parent
    folders = [
        Path(str(importlib.import_module(f"fa2tune.{name}").__path__[0])) for name in ("kernels", "search_spaces")
    ]
    paths = [here / name for name in SOURCES]
    paths += sorted(path for folder in folders for path in folder.rglob("*.py") if is_module(path))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


@cache
def _known() -> Mapping[str, str]:
    """Hashes that a trusted file of binaries holds for just these sources, by name: made here they take 0.2 s."""
    digest, found = source_digest(), dict[str, str]()
    for _, file in binaries.trusted().files:
        found |= file.sources.get(digest, {})
    return found


@cache
def kernel_hash(variant: Variant, mask: str, score: str = NONE.name) -> str:
    """Hash of the source that a kernel's binaries are composed of for a mask (a file of kernels/masks/) and a score term (of
    kernels/scores/), and of the same of the kernels that run around it; 16 hex digits."""
    known = _known().get(f"{variant.short_name} {mask}") if score == NONE.name else None
    return known or _hashed(variant, mask, score)


def _hashed(variant: Variant, mask: str, score: str = NONE.name) -> str:
    roots, points = [], ""
    for one in (variant, *map(variant_named, (*variant.before, *variant.after))):
        roots += [(one.kernel.fn.__module__, one.kernel.fn.__name__), (one.module, "VARIANT")]
        of_masks = HOOKS | OPTIONAL_HOOKS
        called = [of_masks[name] for name in sorted(one.constexpr_names & set(of_masks))]
        # one that the file lacks is optional, or the kernel is not run
        hooks = [name for name in called if name in hooks_of(mask)]
        roots += [(f"fa2tune.kernels.masks.{mask}", name) for name in (hooks and [*hooks, "MASK"])]
        terms = [SCORE_HOOKS[name] for name in sorted(one.constexpr_names & set(SCORE_HOOKS))]
        roots += [(f"fa2tune.kernels.scores.{score}", name) for name in (terms and [*terms, "SCORE"])]
        if one.space.single:  # no row has its config
            points += repr(sorted(one.space.dimensions.items()))
    return hashlib.sha256("".join([*composition.composed(roots), points]).encode()).hexdigest()[:16]


#: (strategy, implementation) of the rows of whole backwards.
_BACKWARDS = [(strategy, backward_implementation(special)) for strategy in STRATEGIES for special in (False, True)]


@cache
def backward_hash(strategy: str, implementation: str, mask: str, named: tuple[str, ...] = ()) -> str:
    """Hash of every kernel that a whole backward of this strategy and implementation may run; 16 hex digits. ``named``: the
    implementations of its kernels that name themselves; the others do not count."""
    names = [*having_role(BWD_DELTA)] if strategy == FUSED else []
    for kernel in STRATEGIES[strategy]:
        wanted = {*named, *({implementation} & {WARP_SPECIALIZED})}
        names += [one.name for one in variants_of(kernel) if one.portable or wanted & set(one.implementations)]
    return hashlib.sha256("".join(kernel_hash(variant_named(name), mask) for name in names).encode()).hexdigest()[:16]


def _name_of(variant: Variant, mask: str) -> str:
    return hashed_as(variant.serves, "" if variant.portable else variant.implementations[0], mask)


class _Hashes(Mapping[str, str]):
    """Name -> hash, made when it is asked for: reading and hashing all kernels would be most of a first call's time in here."""

    def __init__(self) -> None:
        self._made = dict[str, str]()

    def __getitem__(self, name: str) -> str:
        if name not in self._made:
            self._made[name] = _known().get(name) or self._make(name)
        return self._made[name]

    @staticmethod
    def _make(name: str) -> str:
        without_mask, _, mask = name.rpartition(" ")
        if mask not in MEASURED_MASKS:  # of another mask there are no rows
            raise KeyError(name)
        kernel, *filed_as = without_mask.split(" ")
        if kernel == BACKWARD and len(filed_as) == 2:
            strategy, (implementation, *named) = filed_as[0], filed_as[1].split("+")
            known = {name for one in STRATEGIES.get(strategy, ()) for name in implementations(one)}
            if (strategy, implementation) in _BACKWARDS and set(named) <= known:
                return backward_hash(strategy, implementation, mask, tuple(named))
        for variant in variants_of(kernel):
            if _name_of(variant, mask) == name:
                return kernel_hash(variant, mask)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        for mask in MEASURED_MASKS:
            yield from dict.fromkeys(_name_of(variant, mask) for kernel in KERNELS for variant in variants_of(kernel))
            yield from (hashed_as(BACKWARD, name, mask, strategy) for strategy, name in _BACKWARDS)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def kernel_hashes() -> Mapping[str, str]:
    """Of every kernel and of every variant of a whole backward, for each mask that rows are measured with: what a row has to
    name to be fresh. Keys as ``row.hashed_as`` has them; each value is made when it is asked for."""
    return _Hashes()


@cache
def space_hash(variant: Variant) -> str:
    """Hash of the search space: its dimensions and the names of its constraints; 16 hex digits."""
    space = variant.space
    text = repr((space.name, sorted(space.dimensions.items()), [constraint.name for constraint in space.constraints]))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def triton_version() -> str:
    """Triton's version, read off its file: an import takes 0.05 to 0.2 s, and processes with compiled kernels need none. "": it
    is not installed, or does not say."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return ""
    with suppress(OSError):
        text = Path(found.origin).read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^__version__ = ['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return match[1]
    with suppress(Exception):  # a broken Triton raises what it likes; a compile reports it
        return str(importlib.import_module("triton").__version__)
    return ""


@cache
def driver_version() -> str:
    """Version of the NVIDIA kernel driver, e.g. "580.159.04"; "" without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return _driver_version_by_nvml()
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else ""


def _driver_version_by_nvml() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # no library, no driver, or one that does not answer: the version is not known
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)
