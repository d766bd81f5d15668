"""The GPUs that fa2tune knows by name: limits and peak rates. Data alone; ``gpus.py`` finds the entry for a name.

Sources. Limits: cuda_occupancy.h of CUDA 13.0 and arch_traits.h of CCCL 3, which hold NVIDIA's table "Technical Specifications
per Compute Capability". Rates: NVIDIA's data sheets and architecture whitepapers, named above each group of rows. All rates are
dense, those of the tensor cores with float32 accumulation, which GeForce GPUs run at half the rate of the same chip in a
professional GPU. Where a data sheet gives a rate with sparsity or in another format only, the row has the dense bf16 rate that
follows: half of the sparse one, half of dense FP8 or INT8, an eighth of sparse FP4. ``tests/test_gpus.py`` recomputes each rate
from SMs and clock.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# The same on every GPU that the kernels run on.
#: Quarters of an SM, each with a scheduler that issues one instruction a clock, a tensor core and a quarter of the registers; a
#: warp runs on one of them.
SCHEDULERS = 4


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
    estimated_from: str = ""  #: of a stand-in, the entry whose rates per SM it has; "" for a GPU of the catalogue

    @property
    def capability(self) -> str:
        """Compute capability as NVIDIA writes it, "9.0"."""
        return f"{self.arch // 10}.{self.arch % 10}"

    @property
    def note(self) -> str:
        """What a reader of this GPU's figures has to know; "" for a GPU of the catalogue."""
        if not self.estimated_from:
            return ""
        return f"not in the catalogue: rates are estimated from {self.estimated_from}"

    def peak(self, dtype: str, precision: str = "ieee") -> float:
        """TFLOP/s of matrix products in ``dtype`` ("bf16", "fp16", "fp32") and float32 precision ("ieee", "tf32")."""
        if dtype in ("bf16", "fp16"):
            return self.tensor_tflops
        if dtype == "fp32":
            return self.tf32_tflops if precision == "tf32" else self.fp32_tflops
        raise ValueError(f"dtype: got {dtype!r}, allowed are bf16, fp16, fp32")


@dataclass(frozen=True, slots=True)
class Limits:
    """What every GPU of one compute capability shares."""

    shared_per_block: int
    shared_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int


REGISTERS_PER_SM = 65536  #: on every compute capability from 8.0 to 12.1

#: By compute capability. The system takes 1 KiB of shared memory for each block, so a block may opt in to 1 KiB less than the SM
#: has. 10.1 is Thor under CUDA 12; CUDA 13 calls it 11.0.
LIMITS = {
    80: Limits(163 * KIB, 164 * KIB, 64, 32),
    86: Limits(99 * KIB, 100 * KIB, 48, 16),
    87: Limits(163 * KIB, 164 * KIB, 48, 16),
    88: Limits(99 * KIB, 100 * KIB, 48, 16),
    89: Limits(99 * KIB, 100 * KIB, 48, 24),
    90: Limits(227 * KIB, 228 * KIB, 64, 32),
    100: Limits(227 * KIB, 228 * KIB, 64, 32),
    101: Limits(227 * KIB, 228 * KIB, 48, 24),
    103: Limits(227 * KIB, 228 * KIB, 64, 32),
    110: Limits(227 * KIB, 228 * KIB, 48, 24),
    120: Limits(99 * KIB, 100 * KIB, 48, 24),
    121: Limits(99 * KIB, 100 * KIB, 48, 24),
}

#: The same, of those that have an entry below: the name of its generation.
GENERATIONS = {
    80: "Ampere, data center", 86: "Ampere", 87: "Ampere, Jetson Orin", 89: "Ada", 90: "Hopper", 100: "Blackwell, data center",
    103: "Blackwell Ultra", 110: "Blackwell, Jetson Thor", 120: "Blackwell, RTX", 121: "Blackwell, DGX Spark",
}  # fmt: skip

#: The entries whose rates per SM stand in for an unlisted GPU of a compute capability: for professional GPUs, for GeForce.
REFERENCES = {
    80: ("a100-sxm-80gb", "a100-sxm-80gb"), 86: ("a10", "rtx-3090"), 87: ("orin-agx-64gb", "orin-agx-64gb"),
    88: ("a10", "rtx-3090"), 89: ("l40s", "rtx-4090"), 90: ("h100-sxm", "h100-sxm"), 100: ("b200", "b200"),
    101: ("thor", "thor"), 103: ("b300", "b300"), 110: ("thor", "thor"), 120: ("rtx-pro-6000", "rtx-5090"),
    121: ("gb10", "gb10"),
}  # fmt: skip

#: Short names for the commonest member of a family.
ALIASES = {"a100": "a100-sxm-80gb", "a800": "a800-sxm", "h100": "h100-sxm", "h800": "h800-sxm", "gh200": "gh200-96gb"}


def _gpu(
    name: str, driver_names: tuple[str, ...], silicon: str, arch: int, sm_count: int, clock_mhz: int,
    tensor: float, tf32: float, fp32: float, l2_mib: float, memory_gib: int, gbs: float,
) -> Gpu:  # fmt: skip
    limits = LIMITS[arch]
    return Gpu(
        name, driver_names, silicon, arch, sm_count, clock_mhz, limits.shared_per_block, limits.shared_per_sm,
        REGISTERS_PER_SM, limits.warps_per_sm, limits.blocks_per_sm, tensor, tf32, fp32, int(l2_mib * MIB),
        memory_gib * GIB, gbs,
    )  # fmt: skip


# fmt: off
CATALOGUE = (
    #    name              driver names                                    chip   arch  SMs   MHz  tensor   tf32   fp32 L2 MiB GiB GB/s
    # A100 data sheet (2021), A100 whitepaper; A800 differs in NVLink only; A30 data sheet
    _gpu("a100-sxm-40gb",  ("A100-SXM4-40GB",),                          "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  40, 1555),
    _gpu("a100-sxm-80gb",  ("A100-SXM4-80GB",),                          "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  80, 2039),
    _gpu("a100-pcie-40gb", ("A100-PCIE-40GB",),                          "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  40, 1555),
    _gpu("a100-pcie-80gb", ("A100 80GB PCIe", "A100-PCIE-80GB"),         "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  80, 1935),
    _gpu("a800-sxm",       ("A800-SXM4-80GB",),                          "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  80, 2039),
    _gpu("a800-pcie",      ("A800 80GB PCIe",),                          "ga100",  80, 108, 1410,  312.0, 156.0,  19.5,  40,  80, 1935),
    _gpu("a30",            ("A30",),                                     "ga100",  80,  56, 1440,  165.0,  82.5,  10.3,  24,  24,  933),
    # Data sheets of A10, A10G (its tensor cores run at half rate), A40, A16 (one of its four GPUs) and A2
    _gpu("a10",            ("A10",),                                     "ga102",  86,  72, 1695,  125.0,  62.5,  31.2,   6,  24,  600),
    _gpu("a10g",           ("A10G",),                                    "ga102",  86,  80, 1710,   70.0,  35.0,  35.0,   6,  24,  600),
    _gpu("a40",            ("A40",),                                     "ga102",  86,  84, 1740,  149.7,  74.8,  37.4,   6,  48,  696),
    _gpu("a16",            ("A16",),                                     "ga107",  86,  10, 1755,   17.9,   9.0,   4.5,   2,  16,  200),
    _gpu("a2",             ("A2",),                                      "ga107",  86,  10, 1770,   18.1,   9.0,   4.5,   2,  16,  200),
    # Data sheets of RTX A2000, A4000, A4500, A5000, A5500 and A6000
    _gpu("a2000",          ("RTX A2000", "RTX A2000 12GB"),              "ga106",  86,  26, 1200,   31.9,  16.0,   8.0,   3,  12,  288),
    _gpu("a4000",          ("RTX A4000",),                               "ga104",  86,  48, 1560,   76.7,  38.3,  19.2,   4,  16,  448),
    _gpu("a4500",          ("RTX A4500",),                               "ga102",  86,  56, 1650,   94.6,  47.3,  23.7,   6,  20,  640),
    _gpu("a5000",          ("RTX A5000",),                               "ga102",  86,  64, 1695,  111.1,  55.5,  27.8,   6,  24,  768),
    _gpu("a5500",          ("RTX A5500",),                               "ga102",  86,  80, 1665,  136.4,  68.2,  34.1,   6,  24,  768),
    _gpu("a6000",          ("RTX A6000",),                               "ga102",  86,  84, 1800,  154.8,  77.4,  38.7,   6,  48,  768),
    # GA102 whitepaper, appendix A (RTX 3070, 3080, 3090); GeForce RTX 30 specifications
    _gpu("rtx-3050",       ("GeForce RTX 3050",),                        "ga106",  86,  20, 1777,   18.2,   9.1,   9.1,   2,   8,  224),
    _gpu("rtx-3060",       ("GeForce RTX 3060",),                        "ga106",  86,  28, 1777,   25.5,  12.7,  12.7,   3,  12,  360),
    _gpu("rtx-3060-ti",    ("GeForce RTX 3060 Ti",),                     "ga104",  86,  38, 1665,   32.4,  16.2,  16.2,   4,   8,  448),
    _gpu("rtx-3070",       ("GeForce RTX 3070",),                        "ga104",  86,  46, 1725,   40.6,  20.3,  20.3,   4,   8,  448),
    _gpu("rtx-3070-ti",    ("GeForce RTX 3070 Ti",),                     "ga104",  86,  48, 1770,   43.5,  21.7,  21.7,   4,   8,  608),
    _gpu("rtx-3080",       ("GeForce RTX 3080",),                        "ga102",  86,  68, 1710,   59.5,  29.8,  29.8,   5,  10,  760),
    _gpu("rtx-3080-12gb",  ("GeForce RTX 3080",),                        "ga102",  86,  70, 1710,   61.3,  30.6,  30.6,   6,  12,  912),
    _gpu("rtx-3080-ti",    ("GeForce RTX 3080 Ti",),                     "ga102",  86,  80, 1665,   68.2,  34.1,  34.1,   6,  12,  912),
    _gpu("rtx-3090",       ("GeForce RTX 3090",),                        "ga102",  86,  82, 1695,   71.0,  35.6,  35.6,   6,  24,  936),
    _gpu("rtx-3090-ti",    ("GeForce RTX 3090 Ti",),                     "ga102",  86,  84, 1860,   80.0,  40.0,  40.0,   6,  24, 1008),
    # Jetson AGX Orin technical brief, Orin NX and Orin Nano (Super) data sheets; L2 halved where one of two GPCs is enabled. The
    # driver calls all of them "Orin": those with 8 SMs are taken for an Orin NX, which differs from a Nano in clock and memory.
    _gpu("orin-agx-64gb",  ("Orin",),                                    "ga10b",  87,  16, 1300,   42.6,  21.3,   5.3,   4,  64,  205),
    _gpu("orin-agx-32gb",  ("Orin",),                                    "ga10b",  87,  14,  930,   26.7,  13.3,   3.3,   4,  32,  205),
    _gpu("orin-nx",        ("Orin",),                                    "ga10b",  87,   8,  918,   15.0,   7.5,   1.9,   2,  16,  102),
    _gpu("orin-nano",      ("Orin",),                                    "ga10b",  87,   8, 1020,   16.7,   8.4,   2.1,   2,   8,  102),
    _gpu("orin-nano-4gb",  ("Orin",),                                    "ga10b",  87,   4, 1020,    8.4,   4.2,   1.04,  2,   4,   51),
    # Data sheets of L4, L20 and L40 (both at half rate) and L40S
    _gpu("l4",             ("L4",),                                      "ad104",  89,  58, 2040,  121.0,  60.0,  30.3,  48,  24,  300),
    _gpu("l20",            ("L20",),                                     "ad102",  89,  92, 2520,  119.5,  59.8,  59.8,  96,  48,  864),
    _gpu("l40",            ("L40",),                                     "ad102",  89, 142, 2490,  181.0,  90.5,  90.5,  96,  48,  864),
    _gpu("l40s",           ("L40S",),                                    "ad102",  89, 142, 2520,  362.1, 183.0,  91.6,  96,  48,  864),
    # Data sheets of RTX 2000, 4000 SFF, 4000, 4500, 5000 and 6000 Ada Generation
    _gpu("rtx-2000-ada",   ("RTX 2000 Ada Generation",),                 "ad107",  89,  22, 2130,   48.0,  24.0,  12.0,  12,  16,  224),
    _gpu("rtx-4000-sff-ada", ("RTX 4000 SFF Ada Generation",),           "ad104",  89,  48, 1560,   76.7,  38.3,  19.2,  48,  20,  280),
    _gpu("rtx-4000-ada",   ("RTX 4000 Ada Generation",),                 "ad104",  89,  48, 2175,  106.9,  53.5,  26.7,  48,  20,  360),
    _gpu("rtx-4500-ada",   ("RTX 4500 Ada Generation",),                 "ad103",  89,  60, 2580,  158.5,  79.3,  39.6,  48,  24,  432),
    _gpu("rtx-5000-ada",   ("RTX 5000 Ada Generation",),                 "ad102",  89, 100, 2550,  261.1, 130.6,  65.3,  72,  32,  576),
    _gpu("rtx-6000-ada",   ("RTX 6000 Ada Generation",),                 "ad102",  89, 142, 2505,  364.2, 182.1,  91.1,  96,  48,  960),
    # Ada whitepaper, appendices A (RTX 4090) and B (4080); GeForce RTX 40 specifications. RTX 4060 Ti: 8 or 16 GB
    _gpu("rtx-4060",       ("GeForce RTX 4060",),                        "ad107",  89,  24, 2460,   30.2,  15.1,  15.1,  24,   8,  272),
    _gpu("rtx-4060-ti",    ("GeForce RTX 4060 Ti",),                     "ad106",  89,  34, 2535,   44.1,  22.1,  22.1,  32,   8,  288),
    _gpu("rtx-4070",       ("GeForce RTX 4070",),                        "ad104",  89,  46, 2475,   58.3,  29.1,  29.1,  36,  12,  504),
    _gpu("rtx-4070-super", ("GeForce RTX 4070 SUPER",),                  "ad104",  89,  56, 2475,   71.0,  35.5,  35.5,  48,  12,  504),
    _gpu("rtx-4070-ti",    ("GeForce RTX 4070 Ti",),                     "ad104",  89,  60, 2610,   80.2,  40.1,  40.1,  48,  12,  504),
    _gpu("rtx-4070-ti-super", ("GeForce RTX 4070 Ti SUPER",),            "ad103",  89,  66, 2610,   88.2,  44.1,  44.1,  48,  16,  672),
    _gpu("rtx-4080",       ("GeForce RTX 4080",),                        "ad103",  89,  76, 2505,   97.5,  48.7,  48.7,  64,  16,  717),
    _gpu("rtx-4080-super", ("GeForce RTX 4080 SUPER",),                  "ad103",  89,  80, 2550,  104.4,  52.2,  52.2,  64,  16,  736),
    _gpu("rtx-4090-d",     ("GeForce RTX 4090 D",),                      "ad102",  89, 114, 2520,  147.1,  73.5,  73.5,  72,  24, 1008),
    _gpu("rtx-4090",       ("GeForce RTX 4090",),                        "ad102",  89, 128, 2520,  165.2,  82.6,  82.6,  72,  24, 1008),
    # H100 data sheet and whitepaper, H200 data sheet (L2 as its driver reports it); H800 differs in NVLink and FP64 only.
    # Tensor rates are those at a lower clock. L2: 50 MB by the whitepaper, of the H100 SXM and PCIe with five memory stacks. The data
    # sheets of the NVL GPUs do not state it: they have that figure here, though with six stacks, as the H200, it may be 60
    _gpu("h100-sxm",       ("H100 80GB HBM3",),                          "gh100",  90, 132, 1980,  989.4, 494.7,  66.9,  50,  80, 3352),
    _gpu("h100-pcie",      ("H100 PCIe",),                               "gh100",  90, 114, 1755,  756.4, 378.2,  51.2,  50,  80, 2039),
    _gpu("h100-nvl",       ("H100 NVL",),                                "gh100",  90, 132, 1785,  835.5, 417.7,  60.3,  50,  94, 3938),
    _gpu("h800-sxm",       ("H800",),                                    "gh100",  90, 132, 1980,  989.4, 494.7,  66.9,  50,  80, 3352),
    _gpu("h800-pcie",      ("H800 PCIe",),                               "gh100",  90, 114, 1755,  756.4, 378.2,  51.2,  50,  80, 2039),
    _gpu("h200",           ("H200",),                                    "gh100",  90, 132, 1980,  989.4, 494.7,  66.9,  60, 141, 4800),
    _gpu("h200-nvl",       ("H200 NVL",),                                "gh100",  90, 132, 1785,  835.5, 417.7,  60.3,  50, 141, 4800),
    # GH200 data sheet; the driver's "480GB" and "144G" tell the two apart
    _gpu("gh200-96gb",     ("GH200 480GB",),                             "gh100",  90, 132, 1980,  989.4, 494.7,  66.9,  60,  96, 4000),
    _gpu("gh200-144gb",    ("GH200 144G HBM3e",),                        "gh100",  90, 132, 1980,  989.4, 494.7,  66.9,  60, 144, 4900),
    # H20 product brief: tensor rates held far below the chip's; H20-3e has the memory of an H200
    _gpu("h20",            ("H20",),                                     "gh100",  90,  78, 1980,  148.0,  74.0,  44.0,  60,  96, 4000),
    _gpu("h20-3e",         ("H20-3e",),                                  "gh100",  90,  78, 1980,  148.0,  74.0,  44.0,  60, 141, 4800),
    # HGX B200 and HGX B300 data sheets, per GPU; GB200 NVL72 and GB300 NVL72 data sheets, a 72nd
    _gpu("b200",           ("B200",),                                    "gb100", 100, 148, 1965, 2250.0, 1125.0, 75.0, 126, 180, 7700),
    _gpu("gb200",          ("GB200",),                                   "gb100", 100, 152, 2062, 2500.0, 1250.0, 80.0, 126, 186, 8000),
    _gpu("b300",           ("B300 SXM6 AC", "B300"),                     "gb110", 103, 148, 2032, 2250.0, 1125.0, 77.0, 126, 270, 7700),
    _gpu("gb300",          ("GB300",),                                   "gb110", 103, 152, 2062, 2500.0, 1250.0, 80.0, 126, 279, 8000),
    # Jetson T5000 data sheet (2070 TFLOP/s of sparse FP4); its driver reports 20 SMs and 32 MiB of L2
    _gpu("thor",           ("Thor",),                                    "gb10b", 110,  20, 1575,  258.0, 129.0,   8.1,  32, 128,  273),
    # RTX Blackwell whitepaper, appendix A (RTX 5070 to 5090); GeForce RTX 50 specifications. RTX 5060 Ti: 8 or 16 GB
    _gpu("rtx-5060",       ("GeForce RTX 5060",),                        "gb206", 120,  30, 2497,   38.4,  19.2,  19.2,  32,   8,  448),
    _gpu("rtx-5060-ti",    ("GeForce RTX 5060 Ti",),                     "gb206", 120,  36, 2572,   47.4,  23.7,  23.7,  32,   8,  448),
    _gpu("rtx-5070",       ("GeForce RTX 5070",),                        "gb205", 120,  48, 2512,   61.7,  30.9,  30.9,  48,  12,  672),
    _gpu("rtx-5070-ti",    ("GeForce RTX 5070 Ti",),                     "gb203", 120,  70, 2452,   87.9,  43.9,  43.9,  48,  16,  896),
    _gpu("rtx-5080",       ("GeForce RTX 5080",),                        "gb203", 120,  84, 2617,  112.6,  56.3,  56.3,  64,  16,  960),
    _gpu("rtx-5090",       ("GeForce RTX 5090",),                        "gb202", 120, 170, 2407,  209.5, 104.8, 104.8,  96,  32, 1792),
    # RTX PRO Blackwell data sheets: float32 rate and AI TOPS (sparse FP4)
    _gpu("rtx-pro-5000",   ("RTX PRO 5000 Blackwell",),                  "gb202", 120, 110, 2290,  258.0, 129.0,  64.5,  96,  48, 1344),
    _gpu("rtx-pro-6000-max-q", ("RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
                                                                         "gb202", 120, 188, 2280,  438.9, 219.5, 109.7, 128,  96, 1792),
    _gpu("rtx-pro-6000-server", ("RTX PRO 6000 Blackwell Server Edition",),
                                                                         "gb202", 120, 188, 2493,  480.0, 240.0, 120.0, 128,  96, 1597),
    _gpu("rtx-pro-6000",   ("RTX PRO 6000 Blackwell Workstation Edition",),
                                                                         "gb202", 120, 188, 2617,  503.8, 251.9, 126.0, 128,  96, 1792),
    # DGX Spark data sheet (1 PFLOP/s of sparse FP4); Hot Chips 2025 (31 TFLOP/s of float32, 24 MiB L2)
    _gpu("gb10",           ("GB10",),                                    "gb20b", 121,  48, 2525,  124.0,  62.0,  31.0,  24, 128,  273),
)
# fmt: on
