"""The catalogue: names, driver names, slices, figures, and what stands in for an unlisted GPU."""

from __future__ import annotations

import pytest

from fa2tune import catalogue, gpus
from fa2tune.tuning.request import plan


@pytest.mark.parametrize(
    ("driver_name", "arch", "sm_count", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, 108, "a100-sxm-80gb"),
        ("A100-SXM4-40GB", 80, 108, "a100-sxm-40gb"),  # drivers before 2021 leave the maker out
        ("NVIDIA A100 80GB PCIe", 80, 108, "a100-pcie-80gb"),
        ("NVIDIA A800-SXM4-80GB", 80, 108, "a800-sxm"),
        ("NVIDIA H100 80GB HBM3", 90, 132, "h100-sxm"),
        ("NVIDIA H100 PCIe", 90, 114, "h100-pcie"),
        ("NVIDIA H100 NVL", 90, 132, "h100-nvl"),
        ("NVIDIA H200", 90, 132, "h200"),
        ("NVIDIA H20", 90, 78, "h20"),
        ("NVIDIA RTX A6000", 86, 84, "a6000"),
        ("NVIDIA L40S", 89, 142, "l40s"),
        ("NVIDIA GeForce RTX 4090", 89, 128, "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", 120, 170, "rtx-5090"),
        ("NVIDIA B200", 100, 148, "b200"),
        ("NVIDIA GeForce RTX 3080", 86, 68, "rtx-3080"),
        ("NVIDIA GeForce RTX 3080", 86, 70, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 4080", 89, 76, "rtx-4080"),
        ("NVIDIA A10G", 86, 80, "a10g"),
        ("NVIDIA H20-3e", 90, 78, "h20-3e"),
        ("NVIDIA GH200 480GB", 90, 132, "gh200-96gb"),
        ("NVIDIA GH200 144G HBM3e", 90, 132, "gh200-144gb"),
        ("NVIDIA GB200", 100, 152, "gb200"),
        ("NVIDIA B300 SXM6 AC", 103, 148, "b300"),
        ("NVIDIA GB10", 121, 48, "gb10"),
        ("NVIDIA Thor", 110, 20, "thor"),
        ("Orin", 87, 16, "orin-agx-64gb"),
        ("Orin", 87, 14, "orin-agx-32gb"),
        ("Orin", 87, 8, "orin-nx"),
        ("Orin", 87, 4, "orin-nano-4gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, 188, "rtx-pro-6000-server"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb", 120, 46, "rtx-pro-6000-server@46sm"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 80, 42, "a100-sxm-80gb@42sm"),
        ("NVIDIA H100 80GB HBM3", 90, 130, "h100-sxm@130sm"),
    ],
)
def test_driver_names(driver_name: str, arch: int, sm_count: int, name: str) -> None:
    gpu = gpus.identify(driver_name, arch, sm_count)
    assert (gpu.name, gpu.arch, gpu.sm_count) == (name, arch, sm_count)
    assert gpus.named(gpu.name) == gpu


def test_a_slice_has_its_share() -> None:
    whole, part = gpus.named("a100"), gpus.named("A100@54SM")
    assert part.sm_count == 54
    assert part.tensor_tflops == pytest.approx(whole.tensor_tflops / 2)
    assert part.shared_per_block == whole.shared_per_block
    assert gpus.same_silicon(whole, part)
    assert gpus.named("a100@108") is whole


@pytest.mark.parametrize(
    ("driver_name", "arch", "sm_count"),
    [
        ("NVIDIA A10M", 86, 56),  # begins like an A10
        ("NVIDIA GeForce RTX 4080 Laptop GPU", 89, 58),
        ("NVIDIA H200", 90, 144),  # more SMs than the catalogue's
        ("NVIDIA H200", 100, 132),  # another architecture
        ("NVIDIA GB300", 103, 160),
        ("NVIDIA Thor", 101, 20),  # CUDA 12's name for 11.0
        ("NVIDIA R200", 130, 224),  # a major version without any entry
    ],
)
def test_strangers_keep_their_own_name(driver_name: str, arch: int, sm_count: int) -> None:
    gpu = gpus.identify(driver_name, arch, sm_count)
    assert (gpu.name, gpu.silicon, gpu.arch, gpu.sm_count) == (driver_name, f"sm_{arch}", arch, sm_count)
    assert gpu not in gpus.catalogue()
    assert not any(gpus.same_silicon(gpu, known) for known in gpus.catalogue())
    assert gpus.same_silicon(gpu, gpu)


def test_an_unlisted_capability_takes_the_tightest_limits() -> None:
    assert gpus.identify("NVIDIA R200", 130, 224).shared_per_block == min(g.shared_per_block for g in gpus.catalogue())


@pytest.mark.parametrize(
    ("driver_name", "arch", "sm_count", "tflops", "reference"),
    [
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 86, 58, 50, "rtx-3090"),  # 117 from an A10
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 89, 76, 98, "rtx-4090"),  # 159 from an L4
        ("NVIDIA GeForce RTX 5090 D v2", 120, 170, 209.5, "rtx-5090"),
        ("NVIDIA RTX 5880 Ada Generation", 89, 110, 280, "l40s"),
        ("NVIDIA RTX PRO 4500 Blackwell", 120, 82, 220, "rtx-pro-6000"),
    ],
)
def test_a_stand_in_says_that_it_is_one_and_has_the_rate_of_its_class(
    driver_name: str, arch: int, sm_count: int, tflops: float, reference: str
) -> None:
    gpu = gpus.identify(driver_name, arch, sm_count)
    assert gpu.tensor_tflops == pytest.approx(tflops, rel=0.03)
    assert gpu.note == f"not in the catalogue: rates are estimated from {reference}"
    assert gpus.named(reference).note == ""


@pytest.mark.parametrize(
    ("arch", "shared_kib", "warps", "blocks"),
    [
        (80, 163, 64, 32), (86, 99, 48, 16), (87, 163, 48, 16), (88, 99, 48, 16), (89, 99, 48, 24), (90, 227, 64, 32),
        (100, 227, 64, 32), (101, 227, 48, 24), (103, 227, 64, 32), (110, 227, 48, 24), (120, 99, 48, 24),
        (121, 99, 48, 24),
    ],
)  # fmt: skip
def test_limits_are_those_of_the_compute_capability(arch: int, shared_kib: int, warps: int, blocks: int) -> None:
    """Those of cuda_occupancy.h (CUDA 13.0), of a GPU that is not listed and of every one that is."""
    found = [gpus.identify("NVIDIA Unheard-of", arch, 16), *(gpu for gpu in gpus.catalogue() if gpu.arch == arch)]
    for gpu in found:
        assert (gpu.shared_per_block, gpu.shared_per_sm) == (shared_kib * gpus.KIB, (shared_kib + 1) * gpus.KIB), (
            gpu.name
        )
        assert (gpu.warps_per_sm, gpu.blocks_per_sm, gpu.registers_per_sm) == (warps, blocks, 65536), gpu.name


def test_every_entry_is_named_by_its_driver_name_or_the_error_names_it() -> None:
    for gpu in gpus.catalogue():
        for name in gpu.driver_names:
            same = [other.name for other in gpus.catalogue() if name in other.driver_names]
            for spelt in (f"NVIDIA {name}", name, f"nvidia {name}".upper(), f" {name} "):
                if len(same) == 1:
                    assert gpus.named(spelt) is gpu
                else:
                    with pytest.raises(ValueError, match=f"the driver's name of .*{gpu.name} "):
                        gpus.named(spelt)


@pytest.mark.parametrize(
    ("present", "asked", "target", "obtained"),
    [
        ("a100-pcie-40gb", "a100", "a100-pcie-40gb", "measured"),  # the family
        ("rtx-3080-12gb", "NVIDIA GeForce RTX 3080", "rtx-3080-12gb", "measured"),  # the driver's name of two entries
        ("orin-agx-32gb", "Orin", "orin-agx-32gb", "measured"),
        ("h200@60sm", "NVIDIA H200 MIG 3g.71gb", "h200@60sm", "measured"),
        ("h200@60sm", "NVIDIA H200", "h200", "sibling"),  # the whole GPU
        ("h20-3e", "h20", "h20", "sibling"),  # a name of its own, not that of a family
        ("rtx-4070-ti", "rtx-4070", "rtx-4070", "sibling"),
        ("h200-nvl", "NVIDIA H200", "h200", "sibling"),
    ],
)
def test_a_name_means_the_gpu_present_only_where_it_fits(monkeypatch, present, asked, target, obtained) -> None:
    monkeypatch.setattr(gpus, "present", lambda: gpus.named(present))
    found = plan.resolve_target(asked)
    assert (found.gpu.name, found.obtained) == (target, obtained)


def test_names_as_people_write_them() -> None:
    assert gpus.named("NVIDIA H200") is gpus.named("h200")
    assert gpus.named("rtx 4090") is gpus.named("RTX-4090")
    assert gpus.named("nvidia h200@66sm").name == "h200@66sm"
    with pytest.raises(
        ValueError, match=r"a MIG instance; write it with its number of SMs, a100-sxm-80gb@<1 to 108>sm"
    ):
        gpus.named("NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    with pytest.raises(ValueError, match=r"close to it are rtx-4080, "):
        gpus.named("NVIDIA GeForce RTX 4080 Laptop GPU")


@pytest.mark.parametrize("name", ["v100", "", "a100@0sm", "a100@109sm", "a100@x", "h100-sxm@"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="gpu: got"):
        gpus.named(name)


def test_the_refusal_says_which_names_are_close_and_where_all_of_them_are() -> None:
    for name, said in (("h100-sxm5", "close to it are h100-sxm, "), ("gaudi", "no name is close to it")):
        with pytest.raises(
            ValueError, match=f"gpu: got '{name}', which is not known; {said}.*`fa2tune gpus` lists them"
        ):
            gpus.named(name)


#: FLOP of dense bf16 products with float32 sums that the tensor cores of an SM do in a clock.
TENSOR_RATE = {
    80: 2048, 86: 1024, 87: 2048, 89: 1024, 90: 4096, 100: 8192, 103: 8192, 110: 8192, 120: 1024, 121: 1024,
}  # fmt: skip
CAPPED = {"h20", "h20-3e"}  #: far below what the chip could do
#: Data sheets give these tensor rates at a lower clock than the boost clock: between this share of it and the whole.
LOWER_TENSOR_CLOCK = {90: 0.86, 100: 0.92, 103: 0.90}


def test_names_of_the_catalogue_are_unique() -> None:
    names = [gpu.name for gpu in gpus.catalogue()]
    assert len(set(names)) == len(names)
    drivers = [(name, gpu.sm_count) for gpu in gpus.catalogue() for name in gpu.driver_names]
    twice = {driver for driver in drivers if drivers.count(driver) > 1}
    assert twice == {("Orin", 8)}  # Orin NX and Nano, which no driver tells apart


@pytest.mark.parametrize("gpu", gpus.catalogue(), ids=lambda gpu: gpu.name)
def test_rates_follow_from_sms_and_clock(gpu: gpus.Gpu) -> None:
    per_tflops = gpu.sm_count * gpu.clock_mhz * 1e-6
    lanes = 64 if gpu.arch == 80 else 128  # float32 units of an SM
    # H20: 78 SMs, and a float32 rate in the product brief that would take 87 of them
    assert gpu.fp32_tflops == pytest.approx(2 * lanes * per_tflops, rel=0.12 if gpu.name in CAPPED else 0.03)
    assert gpu.tf32_tflops == pytest.approx(gpu.tensor_tflops / 2, rel=0.02)
    if gpu.name in CAPPED:
        assert gpu.tensor_tflops < TENSOR_RATE[gpu.arch] * per_tflops / 4
        return
    full = TENSOR_RATE[gpu.arch] * per_tflops
    geforce = gpu.driver_names[0].startswith("GeForce")
    if geforce or gpu.tensor_tflops < 0.75 * full:  # of other GPUs the data sheets of some say so: A10G, L20, L40
        full /= 2
    if gpu.arch in LOWER_TENSOR_CLOCK:
        assert LOWER_TENSOR_CLOCK[gpu.arch] * full <= gpu.tensor_tflops <= full
    else:
        assert gpu.tensor_tflops == pytest.approx(full, rel=0.03)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("rtx-3080", 59.5), ("rtx-4080", 97.5), ("rtx-4090", 165.2), ("rtx-5090", 209.5), ("h20-3e", 148), ("a30", 165),
        ("l40", 181), ("rtx-6000-ada", 364), ("rtx-pro-6000", 504), ("gb10", 124), ("orin-agx-64gb", 42.5), ("b300", 2250),
        ("a10g", 70), ("l20", 119.5),
    ],
)  # fmt: skip
def test_rates_of_the_data_sheets(name: str, tflops: float) -> None:
    assert gpus.named(name).tensor_tflops == pytest.approx(tflops, rel=0.01)


def test_a_reference_for_every_compute_capability_with_limits() -> None:
    assert set(catalogue.REFERENCES) == set(catalogue.LIMITS)
    for names in catalogue.REFERENCES.values():
        assert all(gpus.named(name).name == name for name in names)


def test_same_silicon() -> None:
    assert gpus.same_silicon(gpus.named("h200"), gpus.named("h100"))
    assert not gpus.same_silicon(gpus.named("h200"), gpus.named("a100"))
    assert not gpus.same_silicon(gpus.named("l4"), gpus.named("l40s"))


def test_peak() -> None:
    a100 = gpus.named("a100")
    assert (a100.peak("bf16"), a100.peak("fp16"), a100.peak("fp32"), a100.peak("fp32", "tf32")) == (312, 312, 19.5, 156)
    with pytest.raises(ValueError, match="dtype: got 'fp8'"):
        a100.peak("fp8")
