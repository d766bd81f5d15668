"""The GPUs fa2tune knows, present or not: their limits and peak rates, and which one a driver's name means.

Importable without torch. Sources: architecture limits are the compute-capability table of NVIDIA's CUDA C++ Programming Guide;
rates are NVIDIA's data sheets and architecture whitepapers (A100, GA102, H100, Ada, RTX Blackwell), all dense, tensor rates
with float32 accumulation (which GeForce cards run at half the rate of the same silicon in a data-centre card).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model, or a slice of one."""

    name: str  #: "h200"; "a100-sxm-80gb@42sm" for a MIG slice or cut-down part; a stand-in has its driver's name
    driver_names: tuple[str, ...]  #: what its driver calls it, without the leading "NVIDIA "
    silicon: str  #: chip, "gh100"; "sm_90" for a stand-in, whose chip is unknown
    arch: int  #: compute capability, 10 * major + minor
    sm_count: int
    clock_mhz: int  #: boost clock of the SMs
    shared_per_block: int  #: bytes a block may opt in to
    shared_per_sm: int  #: bytes
    registers_per_sm: int  #: 32-bit
    warps_per_sm: int
    blocks_per_sm: int
    tensor_tflops: float  #: bf16 and fp16 products summed in float32
    tf32_tflops: float
    fp32_tflops: float  #: outside the tensor cores
    l2_bytes: int
    hbm_bytes: int  #: device memory, whatever its kind
    hbm_gbs: float  #: its bandwidth, 10^9 bytes a second

    def peak(self, dtype: str, precision: str = "ieee") -> float:
        """TFLOP/s of matrix products in ``dtype`` ("bf16", "fp16", "fp32") and float32 precision ("ieee", "tf32")."""
        if dtype in ("bf16", "fp16"):
            return self.tensor_tflops
        if dtype == "fp32":
            return self.tf32_tflops if precision == "tf32" else self.fp32_tflops
        raise ValueError(f"dtype: got {dtype!r}, allowed are bf16, fp16, fp32")


@dataclass(frozen=True, slots=True)
class _Limits:
    """What every GPU of one compute capability shares."""

    shared_per_block: int
    shared_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". A block also pays 1 KiB of shared memory to
# the system, so the opt-in limit is 1 KiB under what the SM has.
_LIMITS = {
    80: _Limits(163 * KIB, 164 * KIB, 64, 32),
    86: _Limits(99 * KIB, 100 * KIB, 48, 16),
    89: _Limits(99 * KIB, 100 * KIB, 48, 24),
    90: _Limits(227 * KIB, 228 * KIB, 64, 32),
    100: _Limits(227 * KIB, 228 * KIB, 64, 32),
    120: _Limits(99 * KIB, 100 * KIB, 48, 24),
}


def _gpu(
    name: str, driver_names: tuple[str, ...], silicon: str, arch: int, sm_count: int, clock_mhz: int,
    tensor: float, tf32: float, fp32: float, l2_mib: float, memory_gib: int, gbs: float,
) -> Gpu:  # fmt: skip
    limits = _LIMITS[arch]
    return Gpu(
        name, driver_names, silicon, arch, sm_count, clock_mhz, limits.shared_per_block, limits.shared_per_sm, 65536,
        limits.warps_per_sm, limits.blocks_per_sm, tensor, tf32, fp32, int(l2_mib * MIB), memory_gib * GIB, gbs,
    )  # fmt: skip


# fmt: off
_CATALOGUE = (
    #    name             driver names                                    chip   arch  SMs   MHz  tensor   tf32   fp32 L2 MiB GiB GB/s
    # A100 data sheet (2021), A100 whitepaper; A800 differs in NVLink only
    _gpu("a100-sxm-40gb",  ("A100-SXM4-40GB",),                          "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  40, 1555),
    _gpu("a100-sxm-80gb",  ("A100-SXM4-80GB",),                          "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  80, 2039),
    _gpu("a100-pcie-40gb", ("A100-PCIE-40GB",),                          "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  40, 1555),
    _gpu("a100-pcie-80gb", ("A100 80GB PCIe", "A100-PCIE-80GB"),         "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  80, 1935),
    _gpu("a800-sxm",       ("A800-SXM4-80GB",),                          "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  80, 2039),
    _gpu("a800-pcie",      ("A800 80GB PCIe",),                          "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  80, 1935),
    # H100 data sheet and whitepaper, H200 data sheet; H800 differs in NVLink and FP64 only
    _gpu("h100-sxm",       ("H100 80GB HBM3",),                          "gh100",  90, 132, 1980,  989.4, 494.7,  66.9,  50,  80, 3352),
    _gpu("h100-pcie",      ("H100 PCIe",),                               "gh100",  90, 114, 1755,  756.4, 378.2,  51.2,  50,  80, 2039),
    _gpu("h100-nvl",       ("H100 NVL",),                                "gh100",  90, 132, 1785,  835.5, 417.7,  60.3,  50,  94, 3938),
    _gpu("h800-sxm",       ("H800",),                                    "gh100",  90, 132, 1980,  989.4, 494.7,  66.9,  50,  80, 3352),
    _gpu("h800-pcie",      ("H800 PCIe",),                               "gh100",  90, 114, 1755,  756.4, 378.2,  51.2,  50,  80, 2039),
    _gpu("h200",           ("H200",),                                    "gh100",  90, 132, 1980,  989.4, 494.7,  66.9,  50, 141, 4800),
    _gpu("h200-nvl",       ("H200 NVL",),                                "gh100",  90, 132, 1785,  835.5, 417.7,  60.3,  50, 141, 4800),
    # H20 product brief: tensor rates held far below the silicon's
    _gpu("h20",            ("H20",),                                     "gh100",  90,  78, 1980,  148.0,  74.0,  44.0,  60,  96, 4000),
    # A10 and RTX A6000 data sheets; GA102 whitepaper, appendix A, for the RTX 3090
    _gpu("a10",            ("A10",),                                     "ga102",  86,  72, 1695,  125.0,  62.5,  31.2,   6,  24,  600),
    _gpu("a6000",          ("RTX A6000",),                               "ga102",  86,  84, 1800,  154.8,  77.4,  38.7,   6,  48,  768),
    _gpu("rtx-3090",       ("GeForce RTX 3090",),                        "ga102",  86,  82, 1695,   71.0,  35.6,  35.6,   6,  24,  936),
    # L4 and L40S data sheets; Ada whitepaper, appendix A, for the RTX 4090
    _gpu("l4",             ("L4",),                                      "ad104",  89,  58, 2040,  121.0,  60.0,  30.3,  48,  24,  300),
    _gpu("l40s",           ("L40S",),                                    "ad102",  89, 142, 2520,  362.1, 183.0,  91.6,  96,  48,  864),
    _gpu("rtx-4090",       ("GeForce RTX 4090",),                        "ad102",  89, 128, 2520,  165.2,  82.6,  82.6,  72,  24, 1008),
    # RTX Blackwell whitepaper, appendix A; HGX B200 data sheet, per GPU
    _gpu("rtx-5090",       ("GeForce RTX 5090",),                        "gb202", 120, 170, 2407,  209.5, 104.8, 104.8,  96,  32, 1792),
    _gpu("b200",           ("B200",),                                    "gb100", 100, 148, 1965, 2250.0, 1125.0, 75.0, 126, 180, 7700),
)
# fmt: on

#: Short names for the commonest member of a family.
_ALIASES = {"a100": "a100-sxm-80gb", "a800": "a800-sxm", "h100": "h100-sxm", "h800": "h800-sxm"}

LISTED = "`fa2tune gpus` lists them all"  #: in errors

#: Whose limits and per-SM rates stand in for an unlisted GPU of the same architecture.
_REFERENCE = {80: "a100-sxm-80gb", 86: "a10", 89: "l4", 90: "h100-sxm", 100: "b200", 120: "rtx-5090"}


def catalogue() -> tuple[Gpu, ...]:
    """Every GPU known by name."""
    return _CATALOGUE


@cache
def _by_name() -> dict[str, Gpu]:
    found = {gpu.name: gpu for gpu in _CATALOGUE}
    return found | {alias: found[name] for alias, name in _ALIASES.items()}


@cache
def _by_driver_name() -> dict[str, Gpu]:
    return {driver_name.lower(): gpu for gpu in _CATALOGUE for driver_name in gpu.driver_names}


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


def named(name: str) -> Gpu:
    """A GPU by catalogue name or alias ("a100", "h100"), in any case; "a100@42sm" is a slice of it with 42 SMs.

    ValueError says which names are close.
    """
    base, at, share = name.lower().partition("@")
    gpu = _by_name().get(base)
    if gpu is None:
        import difflib

        close = difflib.get_close_matches(base, _by_name(), n=5, cutoff=0.5)
        meant = f"close to it are {', '.join(close)}" if close else "no name is close to it"
        raise ValueError(f"gpu: got {name!r:.80}, which is not known; {meant} ({LISTED}; a slice is written a100@42sm)")
    if not at:
        return gpu
    digits = share.removesuffix("sm")
    if not digits.isdecimal() or not 1 <= int(digits) <= gpu.sm_count:
        raise ValueError(f"gpu: got {name!r}, a slice of {gpu.name} is written {base}@<1 to {gpu.sm_count}>sm")
    return _share(gpu, int(digits))


def _stand_in(driver_name: str, arch: int, sm_count: int) -> Gpu:
    """An unlisted GPU: limits and per-SM rates of its architecture, under its own name. A compute capability that is not
    listed either takes the nearest one below it in its major version (8.7: 8.6), else the tightest limits there are."""
    below = [known for known in _REFERENCE if known <= arch and known // 10 == arch // 10]
    reference = _by_name()[_REFERENCE[max(below, default=120)]]
    part = _share(reference, sm_count)  # a larger part than the reference scales the same way
    return replace(part, name=driver_name, driver_names=(driver_name,), silicon=f"sm_{arch}", arch=arch)


@cache
def identify(driver_name: str, arch: int, sm_count: int) -> Gpu:
    """The GPU a driver calls ``driver_name`` and that has ``sm_count`` SMs of compute capability ``arch``.

    A catalogue entry if name and SM count agree; that entry's slice if it has fewer SMs (MIG, cut-down parts); else a
    stand-in for the architecture, named as the driver names it: never another GPU's entry.
    """
    model = driver_name.partition(" MIG ")[0].removeprefix("NVIDIA ").strip()
    gpu = _by_driver_name().get(model.lower())
    if gpu is not None and gpu.arch == arch and sm_count <= gpu.sm_count:
        return _share(gpu, sm_count)
    return _stand_in(driver_name, arch, sm_count)


def _device(number: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(number)
    return identify(properties.name, 10 * properties.major + properties.minor, properties.multi_processor_count)


def present() -> Gpu | None:
    """The current CUDA device, or None without one. Imports torch. Raises what CUDA raises when a device does not start."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return None
    return _device(torch.cuda.current_device())


def visible() -> list[Gpu]:
    """Every CUDA device that this process may use, by number."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return []
    return [_device(number) for number in range(torch.cuda.device_count())]


def use(number: int) -> None:
    """Make this CUDA device the current one."""
    import torch

    torch.cuda.set_device(number)


def same_silicon(a: Gpu, b: Gpu) -> bool:
    """Whether both are cut from one chip design (an H200 and an H100). Of a stand-in nothing is known but its own name."""
    if a.silicon.startswith("sm_") or b.silicon.startswith("sm_"):
        return a.name == b.name and a.arch == b.arch
    return a.silicon == b.silicon
