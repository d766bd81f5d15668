"""Which GPU a name means: a driver's name, a catalogue name, a slice; and what stands in for a GPU that is not listed.

Importable without torch. The figures are in ``catalogue.py``, what the driver says without torch in ``devices.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from fa2tune.catalogue import ALIASES, CATALOGUE, GIB, KIB, LIMITS, MIB, REFERENCES, REGISTERS_PER_SM, Gpu

__all__ = [
    "GIB",
    "KIB",
    "LISTED",
    "MIB",
    "MIN_ARCH",
    "Gpu",
    "catalogue",
    "identify",
    "named",
    "present",
    "same_silicon",
    "use",
    "visible",
]

MIN_ARCH = 80  #: the lowest compute capability that the kernels run on, 10 * major + minor
LISTED = "`fa2tune gpus` lists them all"  #: in errors


def catalogue() -> tuple[Gpu, ...]:
    """Every GPU known by name."""
    return CATALOGUE


@cache
def _by_name() -> dict[str, Gpu]:
    found = {gpu.name: gpu for gpu in CATALOGUE}
    return found | {alias: found[name] for alias, name in ALIASES.items()}


@cache
def _by_driver_name() -> dict[str, tuple[Gpu, ...]]:
    """Driver's name in small letters -> the entries of that name, which differ in SMs or memory."""
    found: dict[str, tuple[Gpu, ...]] = {}
    for gpu in CATALOGUE:
        for name in gpu.driver_names:
            found[name.lower()] = (*found.get(name.lower(), ()), gpu)
    return found


def _model(driver_name: str) -> str:
    """A driver's name as the catalogue has it, in small letters: without the maker and the MIG profile."""
    return driver_name.lower().partition(" mig ")[0].strip().removeprefix("nvidia ").strip()


def is_called(gpu: Gpu, name: str) -> bool:
    """Whether ``name`` can mean ``gpu``: its own name, the alias of its family ("a100") or what its driver calls it. "h200"
    means the whole GPU, "NVIDIA H200 MIG 3g.71gb" a slice of it."""
    model, by_name = _model(name), _by_name()
    if model in ALIASES:
        return gpu.name.startswith(f"{model}-")
    if model in by_name and " mig " not in name.lower():
        return gpu.name == model
    return model in map(_model, gpu.driver_names)


def _share(gpu: Gpu, sm_count: int) -> Gpu:
    """``gpu`` with fewer SMs. Memory and its bandwidth are taken in proportion: MIG's memory slices do not follow from the
    SM count alone."""
    if sm_count == gpu.sm_count:
        return gpu
    part = sm_count / gpu.sm_count
    return replace(
        gpu, name=f"{gpu.name}@{sm_count}sm", sm_count=sm_count, tensor_tflops=gpu.tensor_tflops * part,
        tf32_tflops=gpu.tf32_tflops * part, fp32_tflops=gpu.fp32_tflops * part, l2_bytes=int(gpu.l2_bytes * part),
        hbm_bytes=int(gpu.hbm_bytes * part), hbm_gbs=gpu.hbm_gbs * part,
    )  # fmt: skip


def _unknown(name: str, model: str) -> ValueError:
    import difflib

    asked = model.removeprefix("geforce ").removesuffix(" laptop gpu").replace(" ", "-")
    close = difflib.get_close_matches(asked, _by_name(), n=5, cutoff=0.5)
    meant = f"close to it are {', '.join(close)}" if close else "no name is close to it"
    return ValueError(f"gpu: got {name!r:.80}, which is not known; {meant} ({LISTED}; a slice is written a100@42sm)")


def named(name: str) -> Gpu:
    """A GPU by catalogue name or alias ("a100", "h100") or as its driver calls it ("NVIDIA H200"), in any case and with or
    without "NVIDIA "; "a100@42sm" is a slice of it with 42 SMs.

    ValueError says which names are close, or which entries a driver's name can mean.
    """
    base, at, share = name.strip().lower().partition("@")
    model = _model(base)
    gpu = _by_name().get(model) or _by_name().get(model.replace(" ", "-"))
    if gpu is None:
        entries = _by_driver_name().get(model, ())
        if not entries:
            raise _unknown(name, model)
        if len(entries) > 1:
            which = ", ".join(f"{entry.name} ({entry.sm_count} SMs)" for entry in entries)
            raise ValueError(f"gpu: got {name!r}, the driver's name of {which}; give one of these")
        gpu = entries[0]
    if " mig " in base:
        raise ValueError(
            f"gpu: got {name!r}, a MIG instance; write it with its number of SMs, {gpu.name}@<1 to {gpu.sm_count}>sm"
        )
    if not at:
        return gpu
    digits = share.removesuffix("sm")
    if not digits.isdecimal() or not 1 <= int(digits) <= gpu.sm_count:
        raise ValueError(f"gpu: got {name!r}, a slice of {gpu.name} is written {base}@<1 to {gpu.sm_count}>sm")
    return _share(gpu, int(digits))


def _stand_in(driver_name: str, arch: int, sm_count: int) -> Gpu:
    """An unlisted GPU: the limits of its compute capability, and the rates per SM of a listed GPU of the same class
    (GeForce or professional), under its own name. A compute capability that is not listed either takes the nearest one below it
    in its major version, else the tightest limits there are."""
    below = [known for known in REFERENCES if known <= arch and known // 10 == arch // 10]
    nearest = max(below, default=120)
    consumer = "geforce" in driver_name.lower() or "titan" in driver_name.lower()
    reference = _by_name()[REFERENCES[nearest][consumer]]
    limits = LIMITS[nearest]
    part = _share(reference, sm_count)  # a larger part than the reference scales the same way
    return replace(
        part, name=driver_name, driver_names=(driver_name,), silicon=f"sm_{arch}", arch=arch,
        shared_per_block=limits.shared_per_block, shared_per_sm=limits.shared_per_sm, registers_per_sm=REGISTERS_PER_SM,
        warps_per_sm=limits.warps_per_sm, blocks_per_sm=limits.blocks_per_sm, estimated_from=reference.name,
    )  # fmt: skip


@cache
def identify(driver_name: str, arch: int, sm_count: int) -> Gpu:
    """The GPU a driver calls ``driver_name`` and that has ``sm_count`` SMs of compute capability ``arch``.

    The catalogue's entry if name and SM count agree; a slice of the smallest entry of that name with more SMs (MIG, cut-down
    parts); else a stand-in, named as the driver names it: never another GPU's entry. ``Gpu.note`` says that it is one.
    """
    entries = [gpu for gpu in _by_driver_name().get(_model(driver_name), ()) if gpu.arch == arch]
    large = [gpu for gpu in entries if gpu.sm_count >= sm_count]
    if large:
        return _share(min(large, key=lambda gpu: gpu.sm_count), sm_count)
    return _stand_in(driver_name, arch, sm_count)


def device(number: int) -> Gpu:
    """A CUDA device by number. Imports torch."""
    import torch

    properties = torch.cuda.get_device_properties(number)
    return identify(properties.name, 10 * properties.major + properties.minor, properties.multi_processor_count)


def present() -> Gpu | None:
    """The current CUDA device, or None without one. Imports torch. Raises what CUDA raises when a device does not start."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return None
    return device(torch.cuda.current_device())


def visible() -> list[Gpu]:
    """Every CUDA device that this process may use, by number."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return []
    return [device(number) for number in range(torch.cuda.device_count())]


def use(number: int) -> None:
    """Make this CUDA device the current one."""
    import torch

    torch.cuda.set_device(number)


def same_silicon(a: Gpu, b: Gpu) -> bool:
    """Whether both are of one chip design (an H200 and an H100). Of a stand-in nothing is known but its own name."""
    if a.estimated_from or b.estimated_from:
        return a.name == b.name and a.arch == b.arch
    return a.silicon == b.silicon
