"""benchmarks/ship_binaries.py: what a release carries is what calls load, bit by bit, and nothing else."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import click
import pytest
from benchmark_scripts import script
from click.testing import CliRunner

from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.compiling import binaries, compiler, fingerprint, measured_code, registry
from fa2tune.compiling.binaries import File
from fa2tune.fleet import precompile
from fa2tune.launching import passes, precompiled
from fa2tune.rows import reader
from fa2tune.spec.key import TuningKey
from fa2tune.spec.mask import CAUSAL, FULL, band
from fa2tune.spec.problem import STRATEGIES, Problem

ship = script("ship_binaries")
A100 = gpus.named("a100")


#: What the shipped rows were measured with; the Triton here may be another.
MADE = next(row.triton for path in reader.shipped_paths() if path.stem == "h200" for row in reader.read(path))


@pytest.fixture(scope="module")
def everything() -> dict[int, dict[precompile.BinaryJob, None]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ship.fingerprint, "triton_version", lambda: MADE)
        choosing.toolchain.cache_clear()
        found = ship.jobs()
    choosing.toolchain.cache_clear()  # the next to ask is told the truth
    return found  # type: ignore[no-any-return]


@pytest.fixture
def few(
    everything: dict[int, dict[precompile.BinaryJob, None]], monkeypatch: pytest.MonkeyPatch
) -> list[precompile.BinaryJob]:
    """Three small binaries of all."""
    some = [job for job in everything[80] if job[1].head_dim == 64 and job[0].name == "sm80/fwd"][:3]
    monkeypatch.setattr(ship, "jobs", lambda only=None: {80: dict.fromkeys(some)})
    return some


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(ship.main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def test_every_shipped_gpu_has_its_jobs_and_those_of_windows(
    everything: dict[int, dict[precompile.BinaryJob, None]],
) -> None:
    assert set(everything) == {
        gpus.named(row.key.gpu).arch for path in reader.shipped_paths() for row in reader.read(path)
    }
    for todo in everything.values():
        assert {spec.mask for _, spec, _ in todo} == {"full", "causal", "band"}
        served = {variant.serves for variant, _, _ in todo}
        assert "fwd" in served and ("bwd_fused" in served or served >= {"bwd_dq", "bwd_dkdv"})


def test_docs_name_about_as_many(everything: dict[int, dict[precompile.BinaryJob, None]]) -> None:
    """Where this fails: ``--estimate 1`` gives the figures of docs/fleet.md and docs/experiments/compilers.md."""
    page = (Path(__file__).parents[2] / "docs/fleet.md").read_text(encoding="utf-8")
    number = {arch: len(ship.distinct(todo, arch)) for arch, todo in everything.items()}
    said = re.search(r"some (\d+) binaries, an estimated 51 MB, seven tenths of them for 9.0", page)
    assert said and sum(number.values()) == pytest.approx(int(said[1]), rel=0.1)
    assert number[90] / sum(number.values()) == pytest.approx(0.7, abs=0.05)


def test_what_a_call_loads_is_among_them(everything: dict[int, dict[precompile.BinaryJob, None]]) -> None:
    problem = TuningKey(A100.name, A100.sm_count, A100.arch, "fwd", "bf16", "ieee", 128, 128, "causal", 2048).workload()
    config = choosing.choose(problem, "fwd", A100).config
    for mask in (problem.mask, band(700, 0)):
        spec = replace(problem, mask=mask).specialization
        for variant, its_config in passes.runs("fwd", spec, config, A100.arch):
            point = tuple(sorted(compiler.binary_config(variant, its_config).items()))
            assert (variant, spec, point) in everything[80]


def test_made_checked_and_the_same_bytes_again(few: list[precompile.BinaryJob], tmp_path: Path) -> None:
    assert run(tmp_path / "one")[0] == 0
    with ship.compiled_anew():
        assert run(tmp_path / "two")[0] == 0
    one, two = (tmp_path / folder / "sm_80.kernels" for folder in ("one", "two"))
    assert one.read_bytes() == two.read_bytes() and len(File(one).entries) == 3
    assert run(tmp_path / "one", "--check") == (0, "")


def test_a_check_names_what_differs(
    few: list[precompile.BinaryJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path)[0] == 0
    path = tmp_path / "sm_80.kernels"
    file = File(path)
    held = {key: binaries.New(e.code, e.about, e.launch, file.cubin(e)) for key, e in file.entries.items()}
    (first, one), *others = held.items()
    binaries.save(path, binaries.file_bytes({**dict(others), "0" * 64: one}, file.sources))
    status, said = run(tmp_path, "--check")
    assert status == 1 and "lacks 1 of 3, as sm80/fwd, Specialization(" in said and "no call loads 1 of 3, as {" in said
    changed = binaries.New(one.code, one.about, one.launch, one.cubin[:-1] + bytes([one.cubin[-1] ^ 1]))
    binaries.save(path, binaries.file_bytes({**held, first: changed}, {}))
    status, said = run(tmp_path, "--check")
    assert status == 1 and "compiled again, another binary" in said and "of other sources" in said
    path.write_bytes(path.read_bytes()[:-5])
    assert "truncated" in run(tmp_path, "--check")[1]
    path.unlink()
    assert run(tmp_path, "--check") == (1, f"{path}: No such file or directory\n")


def test_an_estimate_counts_and_takes_a_sample(few: list[precompile.BinaryJob], tmp_path: Path) -> None:
    status, said = run("--estimate", 0)
    assert status == 0 and said.splitlines()[1:] == [f"sm_80 {name:18}     3 binaries" for name in ("sm80/fwd", "all")]
    status, said = run("--estimate", 3, "--workers", 1)
    assert status == 0 and run(tmp_path)[0] == 0
    told = float(said.splitlines()[-2].partition("binaries")[2].split()[0])
    made = (tmp_path / "sm_80.kernels").stat().st_size / 1e6
    *_, whole, unit = said.splitlines()[-1].split()
    assert (unit, abs(float(whole) - told) < 0.06) == ("MB", True)  # rounded to 0.1 and to 0.01
    assert abs(told - made) < 0.02, "of all three, so no guess"
    assert run()[0] == 2


def test_shipped_files_serve_rows_under_any_triton(
    few: list[precompile.BinaryJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the shipped rows, trusted without being named; without Triton, or under a newer one."""
    assert run(tmp_path)[0] == 0
    monkeypatch.setattr(reader, "shipped_paths", lambda: [tmp_path / "a100.sqlite"])
    monkeypatch.delenv("FA2TUNE_KERNELS")
    binaries.forget()
    variant, spec, point = few[0]
    made = precompiled.triton_version()
    for version in ("", "3.9.0"):
        monkeypatch.setattr(precompiled, "triton_version", lambda version=version: version)
        image, where = precompiled.find(variant, spec, dict(point), 80, made)
        assert where == str(tmp_path / "sm_80.kernels") and image is not None
    assert [place.layer for place, _ in binaries.trusted().files] == ["shipped"]


def test_without_triton_a_compile_says_so(few: list[precompile.BinaryJob], monkeypatch: pytest.MonkeyPatch) -> None:
    variant, spec, point = few[0]
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(
        compiler.NoTritonError, match=r"no machine code of sm80/fwd, and to compile it takes Triton.*pip install"
    ):
        compiler.compile_kernel(variant, spec, dict(point), 80)


def test_rows_of_another_triton_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship.fingerprint, "triton_version", lambda: "9.9")
    with pytest.raises(
        click.ClickException, match=r"a10.sqlite: rows of Triton 3\.6\.0, and here is 9\.9: install theirs"
    ):
        ship.jobs()


def filed(jobs: Iterable[precompile.BinaryJob]) -> dict[str, binaries.New]:
    """As a file of binaries has them, by key: what stands for the machine code is what it is compiled from."""
    launch = {"name": "k", "shared": 0, "warps": 4, "ctas": 1, "cooperative": False, "programmatic": False, "maps": []}
    made = {}
    for variant, spec, point in jobs:
        code = precompiled.code_of(variant, spec, dict(point), 90)
        about = {**precompiled.about(variant, spec, dict(point), 90), "triton": MADE}
        made[precompiled.file_key(code, MADE)] = binaries.New(code, about, launch, code.encode())
    return made


@pytest.mark.parametrize("version", ["3.9.0", ""])
def test_a_call_takes_the_row_whose_code_is_here_and_its_code(
    everything: dict[int, dict[precompile.BinaryJob, None]],
    version: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the choice of a row to its binary, under a Triton for which there are rows, too, or none."""
    problem = TuningKey("h200", 132, 90, "fwd", "bf16", "ieee", 128, 128, "causal", 2048).workload()
    names = [*(one.name for one in registry.variants_of("fwd")), "portable/fwd_norms"]
    wanted = [job for job in everything[90] if job[1] == problem.specialization and job[0].name in names]
    made = filed(wanted)
    path = tmp_path / "sm_90.kernels"
    binaries.save(path, binaries.file_bytes(made, {}))
    monkeypatch.setenv("FA2TUNE_KERNELS", str(path))
    monkeypatch.setattr(fingerprint, "triton_version", lambda: version)
    monkeypatch.setattr(precompiled, "triton_version", lambda: version)
    monkeypatch.setattr(precompiled, "triton_build", lambda: version)
    gpu = gpus.named("h200")
    choice = choosing.choose(problem, "fwd", gpu, among=reader.layers(), node=measured_code.toolchain(driver=""))
    assert choice.triton == MADE
    for variant, config in passes.runs("fwd", problem.specialization, choice.config, 90):
        binary = compiler.binary_config(variant, config)
        image, where = precompiled.find(variant, problem.specialization, binary, 90, choice.triton)
        assert where == str(path) and image is not None
    monkeypatch.setenv("FA2TUNE_KERNELS", "off")
    without = choosing.choose(problem, "fwd", gpu, among=reader.layers(), node=measured_code.toolchain(driver=""))
    assert without.triton == (version or without.triton), "rows of the Triton that will compile"


@pytest.mark.parametrize("version", ["3.9.0", "4.0.0rc1", ""])
def test_the_grid_runs_what_was_measured_under_any_triton(
    everything: dict[int, dict[precompile.BinaryJob, None]],
    version: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each cell of the benchmarks the same kernels, configs and sources as under the Triton of the rows, all of them in the
    file; also where that Triton has rows of its own."""
    made = filed(everything[90])
    binaries.save(tmp_path / "sm_90.kernels", binaries.file_bytes(made, {}))
    layers, gpu = reader.layers(), gpus.named("h200")

    def chosen(triton: str, kernels: str) -> dict[tuple[object, ...], str]:
        monkeypatch.setenv("FA2TUNE_KERNELS", kernels)
        monkeypatch.setattr(fingerprint, "triton_version", lambda: triton)
        monkeypatch.setattr(precompiled, "triton_version", lambda: triton)
        binaries.forget()
        found, node = {}, measured_code.toolchain(driver="")
        for head_dim, mask, length in product((64, 128, 256), (FULL, CAUSAL), (512, 1024, 2048, 4096, 8192, 16384)):
            heads = 2048 // head_dim
            problem = Problem("bf16", 16384 // length, heads, heads, length, length, head_dim, head_dim, mask)
            strategy, kinds = choosing.strategy_of(problem, gpu, False, layers, node)
            for kernel in ("fwd", *STRATEGIES[strategy]):
                choice = choosing.choose(problem, kernel, gpu, kinds.get(kernel), layers, node)
                for variant, config in passes.runs(kernel, problem.specialization, choice.config, 90):
                    binary = compiler.binary_config(variant, config)
                    image, _ = precompiled.find(variant, problem.specialization, binary, 90, choice.triton)
                    assert image is not None or kernels == "off"
                    code = precompiled.code_of(variant, problem.specialization, binary, 90)
                    found[head_dim, mask, length, kernel, variant.name] = f"{code} {sorted(config.items())}"
        return found

    assert chosen(version, str(tmp_path / "sm_90.kernels")) == chosen(MADE, "off")
