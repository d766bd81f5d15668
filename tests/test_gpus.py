"""The catalogue: names, drivers' names, slices, strangers."""

from __future__ import annotations

import pytest

from fa2tune import gpus


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
        ("NVIDIA A10G", 86, 80),  # begins like an A10
        ("NVIDIA GeForce RTX 3060", 86, 28),
        ("NVIDIA H200", 90, 144),  # more SMs than the catalogue's
        ("NVIDIA H200", 100, 132),  # another architecture
        ("NVIDIA GB300", 103, 160),
        ("NVIDIA Thor", 110, 20),  # a major version without any entry
    ],
)
def test_strangers_keep_their_own_name(driver_name: str, arch: int, sm_count: int) -> None:
    gpu = gpus.identify(driver_name, arch, sm_count)
    assert (gpu.name, gpu.silicon, gpu.arch, gpu.sm_count) == (driver_name, f"sm_{arch}", arch, sm_count)
    assert gpu not in gpus.catalogue()
    assert not any(gpus.same_silicon(gpu, known) for known in gpus.catalogue())
    assert gpus.same_silicon(gpu, gpu)


def test_an_unlisted_capability_takes_the_tightest_limits() -> None:
    assert gpus.identify("NVIDIA Thor", 110, 20).shared_per_block == min(g.shared_per_block for g in gpus.catalogue())


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


def test_the_catalogue_is_plausible() -> None:
    names = [gpu.name for gpu in gpus.catalogue()]
    drivers = [name for gpu in gpus.catalogue() for name in gpu.driver_names]
    assert len(set(names)) == len(names)
    assert len(set(drivers)) == len(drivers)
    for gpu in gpus.catalogue():
        lanes = gpu.fp32_tflops * 1e6 / (2 * gpu.sm_count * gpu.clock_mhz)  # float32 units of an SM
        assert lanes == pytest.approx(64 if gpu.arch == 80 else 128, rel=0.12), gpu.name
        assert gpu.tf32_tflops == pytest.approx(gpu.tensor_tflops / 2, rel=0.02), gpu.name
        assert gpu.shared_per_sm == gpu.shared_per_block + gpus.KIB, gpu.name


def test_same_silicon() -> None:
    assert gpus.same_silicon(gpus.named("h200"), gpus.named("h100"))
    assert not gpus.same_silicon(gpus.named("h200"), gpus.named("a100"))
    assert not gpus.same_silicon(gpus.named("l4"), gpus.named("l40s"))


def test_peak() -> None:
    a100 = gpus.named("a100")
    assert (a100.peak("bf16"), a100.peak("fp16"), a100.peak("fp32"), a100.peak("fp32", "tf32")) == (312, 312, 19.5, 156)
    with pytest.raises(ValueError, match="dtype: got 'fp8'"):
        a100.peak("fp8")
