"""Compiling ahead for a GPU that is not there: what is covered, what fits, what is said where it does not."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch
from fa2tune.cli import main
from fa2tune.cli.cache import precompile as command
from fa2tune.compiling import binaries, compiler, fingerprint, measured_code, registry
from fa2tune.compiling.binaries import File
from fa2tune.compiling.compiler import CompileError
from fa2tune.fleet import manifests, precompile
from fa2tune.launching import launch, passes, precompiled
from fa2tune.rows import reader
from fa2tune.rows.reader import Layer
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.spec import maskfile
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, band
from fa2tune.spec.problem import STRATEGIES, Problem

H200 = gpus.named("h200")
PROBLEM = Problem("bf16", 4, 32, 32, 4096, 4096, 64, 64, CAUSAL)
PROBLEMS = (
    PROBLEM, replace(PROBLEM, seqlen_q=77, seqlen_k=16384), replace(PROBLEM, batch=1, heads_q=5, heads_kv=1),
)  # fmt: skip


@pytest.fixture(scope="module")
def one_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache file with the shipped rows of one key, of each of its kernels."""
    shipped = next(path for path in reader.shipped_paths() if path.stem == "h200")
    rows = [
        row for row in reader.read(shipped)
        if (row.key.head_dim, row.key.dtype, row.key.mask, row.key.bucket) == (64, "bf16", "causal", 4096)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("cache") / "fleet.sqlite"
    Store(path).put(rows)
    return path


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    """What was read of a test's files is not left to the tests after it."""
    yield
    choosing.forget()


def layers(path: Path) -> list[Layer]:
    return [Layer("named", path, reader.read(path))]


@pytest.fixture(scope="module")
def compile_some(one_key: Path) -> Callable[..., precompile.CompiledBinaries]:
    """``precompile.compile_all``, but of what calls of ``PROBLEMS`` take alone, a third of the key's binaries. Kernels for
    other lengths and numbers of heads are compiled in tests/compiling."""
    compile_all, held = precompile.compile_all, layers(one_key)
    taken = {(v, s, tuple(sorted(c.items()))) for problem in PROBLEMS for v, s, c in asked(problem, held)}

    def compiled(todo: Sequence[precompile.BinaryJob], *others: Any, **named: Any) -> precompile.CompiledBinaries:
        assert taken <= set(todo)
        return compile_all([job for job in todo if job in taken], *others, **named)

    return compiled


@pytest.fixture(scope="module")
def kernels(one_key: Path, compile_some: Callable[..., precompile.CompiledBinaries]) -> Path:
    """Its file of binaries."""
    todo, _ = precompile.jobs(H200, layers(one_key), precompile.Wanted())
    path = binaries.companion(one_key)
    outcome = compile_some(todo, H200.arch, workers=2)
    assert not outcome.failures
    precompile.save(path, outcome)
    return path


def asked(problem: Problem, layers: list[Layer]) -> Iterator[tuple[Any, Any, Mapping[str, Any]]]:
    """(variant, specialization, binary config) of everything that a call, forward and backward, would load."""
    chosen = {"fwd": choosing.choose(problem, "fwd", H200, among=layers).config}
    for deterministic in (False, True):
        strategy, kinds = choosing.strategy_of(problem, H200, deterministic, layers)
        for kernel in STRATEGIES[strategy]:
            chosen[kernel] = choosing.choose(problem, kernel, H200, kinds.get(kernel), layers).config
    for kernel, config in chosen.items():
        for variant, its_config in passes.runs(kernel, problem.specialization, config, H200.arch):
            yield variant, problem.specialization, compiler.binary_config(variant, its_config)


def test_every_call_of_a_covered_key_finds_its_binaries(
    one_key: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA2TUNE_KERNELS", str(kernels))
    monkeypatch.setattr(compiler, "compile_kernel", lambda *asked: pytest.fail("compiled"))
    wanted = {
        (v.name, tuple(sorted(c.items()))): precompiled.find(v, s, c, 90)
        for p in PROBLEMS for v, s, c in asked(p, layers(one_key))
    }  # fmt: skip
    assert len(wanted) >= 3
    assert {(image is not None, where) for image, where in wanted.values()} == {(True, str(kernels))}


def test_what_is_loaded_is_what_would_be_compiled(
    one_key: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA2TUNE_KERNELS", str(kernels))
    for variant, spec, config in asked(PROBLEM, layers(one_key)):
        assert precompiled.find(variant, spec, config, 90)[0] == launch.image_of(
            compiler.compile_kernel(variant, spec, config, 90)
        )


@contextmanager
def otherwise(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, value: Any) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(target, name, value)
        yield


def test_what_does_not_fit_is_not_loaded_and_the_reason_is_told(
    one_key: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, spec, config = next(asked(PROBLEM, layers(one_key)))
    find = lambda spec=spec, config=config, arch=90: precompiled.find(variant, spec, config, arch)  # noqa: E731
    assert find() == (None, "there is no file of binaries")
    monkeypatch.setenv("FA2TUNE_KERNELS", str(kernels))
    assert find()[0] is not None
    source = fingerprint.kernel_hash(variant, spec.mask)
    with otherwise(monkeypatch, fingerprint, "kernel_hash", lambda *of: "another"):
        assert find() == (None, f"binary made with kernel source {source}, here another")
    assert find(arch=100) == (None, "binary made with compute capability 90, here 100")
    with otherwise(monkeypatch, compiler, "options", lambda config: {"enable_fp_fusion": False}):
        assert find() == (None, "binary made with other options")
    none = "no file of binaries has this kernel, config and kind of tensors"
    assert find(spec=replace(spec, aligned=False)) == find(spec=replace(spec, dtype="fp16")) == (None, none)
    monkeypatch.setenv("TRITON_ENABLE_ASAN", "1")
    assert find() == (None, "TRITON_ENABLE_ASAN is set")


def test_builds_of_one_version_of_triton_do_not_share_binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each calls itself 3.6.0; the folder that pip leaves beside it tells them apart, wherever that is."""

    def build(*installed: str, path: list[Path] | None = None) -> str:
        site = tmp_path / repr(installed)
        for name in ("triton", *installed):
            (site / name).mkdir(parents=True, exist_ok=True)
        (site / "triton" / "__init__.py").write_text("__version__ = '3.6.0'")
        with monkeypatch.context() as patch:
            patch.setattr(precompiled, "triton_version", lambda: "3.6.0")
            patch.setattr("sys.path", [None, *(str(folder) for folder in path or [])])
            spec = SimpleNamespace(origin=str(site / "triton" / "__init__.py"))
            patch.setattr("importlib.util.find_spec", lambda name: spec)
            return precompiled.triton_build.__wrapped__()

    ngc, pytorch = "triton-3.6.0+gitb2684bf3b.nvinternal.dist-info", "pytorch_triton-3.6.0+git9844da95.dist-info"
    assert build("triton-3.6.0.dist-info", "triton_kernels-3.6.0.dist-info", "tritonclient-3.6.0.dist-info") == "3.6.0"
    assert build(ngc) == "3.6.0+gitb2684bf3b.nvinternal" and build(pytorch) == "3.6.0+git9844da95"
    assert build("triton-3.6.0.dist-info", pytorch) == "3.6.0 or 3.6.0+git9844da95"
    assert build("triton-3.5.0.dist-info") == build() == "", "nothing vouches for it"
    (tmp_path / "editable" / ngc).mkdir(parents=True)
    a_file = tmp_path / "a file"
    a_file.touch()
    odd: Any = [tmp_path / "nowhere", a_file, tmp_path / "editable"]
    assert build(path=odd) == "3.6.0+gitb2684bf3b.nvinternal"
    (tmp_path / "editable" / "triton").mkdir()
    assert build(path=odd) == "", "that one speaks for its own neighbour"
    monkeypatch.setattr(precompiled, "triton_build", lambda: "")
    with pytest.raises(RuntimeError, match="while the build of this Triton is unknown"):
        precompile.check_host()
    assert len({precompiled.file_key("1" * 64, name) for name in ("3.6.0", "3.6.0+git9844da95")}) == 2


def of_tritons(kernels: Path, path: Path, *builds: str) -> None:
    """A file with the same binaries as ``kernels``, as if each of these builds of Triton had compiled them."""
    file = File(kernels)
    made = {
        precompiled.file_key(entry.code, build): binaries.New(
            entry.code, {**entry.about, "triton": build}, entry.launch, file.cubin(entry) + build.encode()
        )
        for entry in file.entries.values()
        for build in builds
    }
    binaries.save(path, binaries.file_bytes(made, file.sources))


def test_a_row_takes_the_code_that_it_was_measured_with_or_that_of_the_triton_here(
    one_key: Path, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, spec, config = next(asked(PROBLEM, layers(one_key)))
    path = tmp_path / "several.kernels"
    of_tritons(kernels, path, "3.4.0", "3.5.1+git12", "3.6.0", "3.8.0")
    monkeypatch.setenv("FA2TUNE_KERNELS", str(path))

    def taken(measured: str, version: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(precompiled, "triton_version", lambda: version)
            patch.setattr(precompiled, "triton_build", lambda: version)
            image, why = precompiled.find(variant, spec, config, 90, measured)
        return why if image is None else re.search(r"\d\.\d\.\d(\+git12)?$", image.cubin[-20:].decode("latin-1"))[0]  # type: ignore[index]

    assert taken("3.6.0", "3.9.0") == "3.6.0", "whatever Triton is installed"
    assert taken("3.6.0", "") == "3.6.0", "or none"
    assert taken("3.5.1", "3.8.0") == "3.5.1+git12", "a row knows the version alone"
    assert taken("3.7.0", "3.8.0") == "3.8.0", "that is what would be compiled"
    assert taken("3.7.0", "3.9.0").startswith(
        "binary made with Triton 3.4.0 and 3.5.1+git12 and 3.6.0 and 3.8.0, the row"
    )
    assert taken("3.7.0", "") == "3.8.0", "without Triton any code is better than none"
    assert taken("", "3.8.0") == "3.8.0", "no row says which: that of the Triton here"
    assert taken("", "3.9.0") == "3.8.0"


def replace_all(rows: list[Row], **changes: Any) -> list[Row]:
    return [replace(row, **changes) for row in rows]


def test_a_row_whose_machine_code_is_here_is_as_fresh_under_another_triton(
    one_key: Path, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "then.kernels"
    today = replace_all(reader.read(one_key), triton=fingerprint.triton_version())
    one_key = tmp_path / "today.sqlite"
    Store(one_key).put(today)
    rows = reader.read(one_key)
    served = {
        choosing.choose(PROBLEM, kernel, H200, among=layers(one_key)).answer.row.key.kernel
        for kernel in ("fwd", "bwd_dq")
    }  # type: ignore[union-attr]
    here = measured_code.toolchain(driver="")

    def stale(version: str) -> set[str]:
        return {row.key.kernel for row in rows if replace(here, triton=version).stale(row)}

    assert stale(rows[0].triton) == set() and served <= stale("9.9")
    monkeypatch.setenv("FA2TUNE_KERNELS", str(kernels))
    best = {kernel: choosing.choose(PROBLEM, kernel, H200, among=layers(one_key)).answer.row for kernel in served}  # type: ignore[union-attr]
    assert not any(replace(here, triton="9.9").stale(row) for row in best.values())
    assert [row for row in rows if row.key.kernel == "bwd" and not replace(here, triton="9.9").stale(row)]
    of_tritons(kernels, path, "3.5.0")
    monkeypatch.setenv("FA2TUNE_KERNELS", str(path))
    assert all(replace(here, triton="9.9").stale(row) for row in best.values()), "other code than was measured"
    monkeypatch.setenv("FA2TUNE_KERNELS", str(kernels))
    assert all(replace(here, triton="9.9").stale(replace(row, kernel_hash="another")) for row in best.values())
    assert all(
        replace(here, triton="9.9").stale(replace(row, config={**row.config, "num_warps": 16})) for row in best.values()
    )


@pytest.mark.parametrize(
    "other", [{"score": "softcap"}, {"aligned": False}, {"extent": "ragged"}, {"mask": "band"}], ids=str
)
def test_machine_code_of_another_specialization_is_not_the_row_s(
    one_key: Path, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    rows = replace_all(reader.read(one_key), triton=fingerprint.triton_version())
    monkeypatch.setenv("FA2TUNE_KERNELS", str(kernels))
    held = [row for row in rows if measured_code.has_code(row)]
    file, path = File(kernels), tmp_path / "other.kernels"
    changed = {
        key: binaries.New(
            entry.code, {**entry.about, "spec": {**entry.about["spec"], **other}}, entry.launch, file.cubin(entry)
        )
        for key, entry in file.entries.items()
    }
    binaries.save(path, binaries.file_bytes(changed, {}))
    monkeypatch.setenv("FA2TUNE_KERNELS", str(path))
    assert held and not any(map(measured_code.has_code, held))


def test_a_tampered_binary_is_passed_over(
    one_key: Path, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, spec, config = next(asked(PROBLEM, layers(one_key)))
    content = bytearray(kernels.read_bytes())
    (entry,) = File(kernels).by_code[precompiled.code_of(variant, spec, config, 90)]
    content[File(kernels)._body + entry.offset + entry.size // 2] ^= 1
    broken = tmp_path / "broken.kernels"
    binaries.save(broken, bytes(content))
    monkeypatch.setenv("FA2TUNE_KERNELS", str(broken))
    assert precompiled.find(variant, spec, config, 90) == (None, f"{broken} is damaged: a binary's hash is wrong")
    monkeypatch.setenv("FA2TUNE_KERNELS", f"{broken}:{kernels}")  # the next file has it
    assert precompiled.find(variant, spec, config, 90)[1] == str(kernels)
    broken.write_bytes(content[:2000])
    binaries.forget()
    assert precompiled.find(variant, spec, config, 90)[1] == str(kernels)


def test_a_file_that_describes_the_mask_by_flags_is_read(
    one_key: Path, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As files of development versions do. Entries are found by their keys, not by what they say for people."""
    variant, spec, config = next(asked(PROBLEM, layers(one_key)))
    file = File(kernels)
    others = {name: value for name, value in asdict(spec).items() if name != "mask"}
    flags = {**others, "causal": True, "banded": False}
    old = {
        key: binaries.New(entry.code, {**entry.about, "spec": flags}, entry.launch, file.cubin(entry))
        for key, entry in file.entries.items()
    }
    path = tmp_path / "old.kernels"
    binaries.save(path, binaries.file_bytes(old, {}))
    monkeypatch.setenv("FA2TUNE_KERNELS", str(path))
    assert precompiled.find(variant, spec, config, 90)[1] == str(path)


def test_the_hashes_of_the_sources_come_with_it(kernels: Path) -> None:
    held = File(kernels).sources[fingerprint.source_digest()]
    assert held == {
        **{
            f"{variant.short_name} {mask}": fingerprint._hashed(variant, mask)
            for variant in registry.variants().values()
            for mask in maskfile.names()
        },
        **fingerprint.kernel_hashes(),
    }


def test_no_folder_of_this_machine_is_in_it(kernels: Path) -> None:
    file = File(kernels)
    said = json.dumps([[entry.about, entry.launch] for entry in file.entries.values()]).encode()
    for text in (said, *(file.cubin(entry) for entry in file.entries.values())):
        assert str(Path(compiler.__file__).parent.parent).encode() not in text


def test_other_tritons_and_architectures_stay_in_a_file(kernels: Path, tmp_path: Path) -> None:
    path = tmp_path / "both.kernels"
    held = {
        key: binaries.New(e.code, e.about, e.launch, File(kernels).cubin(e)) for key, e in File(kernels).entries.items()
    }
    (key, new), *_ = held.items()
    before = {
        "1" * 64: replace(new, about={**new.about, "triton": "0.1", "source": "of another day"}),
        "2" * 64: replace(new, about={**new.about, "arch": 80}),
        "3" * 64: replace(new, about={**new.about, "source": "of another day"}),  # no call can find it
        "4" * 64: new,  # another config, say
    }
    sources = {"then": {"fwd": "of another day"}, "never": {"fwd": "unheard of"}}
    binaries.save(path, binaries.file_bytes(before, sources))
    saved = precompile.save(path, precompile.CompiledBinaries({key: new}))
    assert (saved.binaries, saved.kept, saved.dropped, saved.digest) == (4, 3, 1, File(path).digest)
    assert saved.size == path.stat().st_size
    assert set(File(path).entries) == {key, "1" * 64, "2" * 64, "4" * 64}
    assert set(File(path).sources) == {"then", fingerprint.source_digest()}


def test_writers_of_one_file_take_turns(kernels: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "both.kernels"
    entries = File(kernels).entries.items()
    news = [(key, binaries.New(e.code, e.about, e.launch, File(kernels).cubin(e))) for key, e in entries]
    with ThreadPoolExecutor(len(news)) as pool:
        list(pool.map(lambda one: precompile.save(path, precompile.CompiledBinaries(dict([one]))), news))
    assert set(File(path).entries) == set(File(kernels).entries)
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("name", "value"),
    [("shared", "x"), ("shared", -1), ("name", 3), ("name", "a b"), ("warps", 0), ("warps", True), ("ctas", 1 << 20),
     ("cooperative", 1), ("maps", None), ("maps", [{}]), ("more", 1)],
)  # fmt: skip
def test_odd_facts_about_a_launch_are_damage(kernels: Path, name: str, value: object) -> None:
    entry = next(entry for entry in File(kernels).entries.values())
    with pytest.raises(binaries.BinariesError, match="is damaged"):
        precompiled.stored_image({**entry.launch, name: value}, b"")


def test_what_is_not_trusted_is_not_built_on(kernels: Path, tmp_path: Path) -> None:
    path = tmp_path / "open.kernels"
    binaries.save(path, kernels.read_bytes())
    path.chmod(0o666)
    with pytest.raises(binaries.BinariesError, match="not trusted"):
        precompile.save(path, precompile.CompiledBinaries({}))


def test_threads_compile_at_once_though_python_parses_for_one_at_a_time() -> None:
    """A garbage collection in the midst of a parse lets another thread begin one, which would change the first one's depth."""
    spec = PROBLEM.specialization
    known = [registry.variant_named(name) for name in ("sm90/fwd", "sm90/bwd_fused")]
    for variant in known:  # what kernels share is hashed by now
        compiler.source(variant, spec, variant.space.default(spec, 90)).hash()
    anew = [replace(v, kernel=type(v.kernel)(v.kernel.fn)) for v in known * 25]
    sources = [compiler.source(variant, spec, variant.space.default(spec, 90)) for variant in anew]
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()

    def yields(*_: Any) -> None:
        time.sleep(0)

    gc.callbacks.append(yields)
    try:
        gc.set_threshold(50, 2, 2)
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda source: source.hash(), sources))
    finally:
        gc.callbacks.remove(yields)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert len(set(found)) == len(known)


def test_a_config_that_does_not_compile_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, one_key: Path
) -> None:
    todo, _ = precompile.jobs(H200, layers(one_key), precompile.Wanted())
    unlucky = todo[0][0].name

    def build(job: precompile.BinaryJob, arch: int) -> tuple[str, binaries.New]:
        if job[0].name == unlucky:
            raise CompileError("no such luck")
        return job[0].name, binaries.New("0" * 64, {"kernel": job[0].name}, {}, b"")

    monkeypatch.setattr(precompile, "build", build)
    outcome = precompile.compile_all(todo, 90, workers=2)
    assert {(job[0].name, why) for job, why in outcome.failures} == {(unlucky, "no such luck")}
    assert set(outcome.entries) == {job[0].name for job in todo} - {unlucky}

    def killed(job: precompile.BinaryJob, arch: int) -> tuple[str, binaries.New]:
        raise compiler.HostTrouble("ptxas was killed")

    monkeypatch.setattr(precompile, "build", killed)
    with pytest.raises(compiler.HostTrouble):
        precompile.compile_all(todo, 90, workers=2)


def test_a_compiler_lives_through_ctrl_c(monkeypatch: pytest.MonkeyPatch, one_key: Path) -> None:
    """A terminal sends it to every process. Triton prints the whole PTX when ptxas dies."""
    todo, _ = precompile.jobs(H200, layers(one_key), precompile.Wanted())
    child = "import os, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)"

    def build(job: precompile.BinaryJob, arch: int) -> tuple[str, binaries.New]:
        subprocess.run([sys.executable, "-I", "-S", "-c", child], check=True)
        return job[0].name, binaries.New("0" * 64, {"kernel": job[0].name}, {}, b"")

    monkeypatch.setattr(precompile, "build", build)
    assert precompile.compile_all(todo[:1], 90, workers=1).entries


@pytest.mark.parametrize("name", ["DISABLE_PTXAS_OPT", "TRITON_ENABLE_ASAN", "TRITON_INTERPRET"])
def test_binaries_are_not_made_while_triton_is_asked_for_others(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(RuntimeError, match=f"not compiled while {name} is set"):
        precompile.compile_all([], 90)


def test_rows_of_two_drivers_are_there_for_nodes_of_either(
    one_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equals, the one that was made with a node's driver serves; so which it is, the building host cannot know."""
    today = choosing.toolchain()
    rows = {row.filed_as: row for row in reader.read(one_key) if row.key.kernel == "fwd"}
    fast = replace(rows["descriptor"], triton=today.triton, kernel_hash=today.kernel_hashes["fwd full"])
    other = replace(rows["pointer"], triton=today.triton, kernel_hash=today.kernel_hashes["fwd full"], driver="590.1")
    path = tmp_path / "two.sqlite"
    Store(path).put([fast, other])
    for driver in ("", fast.driver, "590.1", "600.1"):  # of the building host
        here = replace(today, driver=driver)
        monkeypatch.setattr(choosing, "toolchain", lambda here=here: here)
        todo, _ = precompile.jobs(H200, layers(path), precompile.Wanted())
        assert {dict(point)["LOADS"] for variant, _, point in todo if variant.name == "portable/fwd"} == {
            "descriptor",
            "pointer",
        }


def test_views_and_other_head_dims_on_demand(one_key: Path) -> None:
    few, keys = precompile.jobs(H200, layers(one_key), precompile.Wanted())
    more, same = precompile.jobs(H200, layers(one_key), precompile.Wanted(views=True))
    assert keys == same == 6 and set(few) < set(more)
    assert {spec.aligned for _, spec, _ in few} == {True} and {spec.aligned for _, spec, _ in more} == {True, False}
    other, _ = precompile.jobs(H200, layers(one_key), precompile.Wanted(head_dims=((56, 40),)))
    assert {(spec.head_dim, spec.head_dim_v) for _, spec, _ in other} == {(56, 40)}
    assert precompile.jobs(H200, layers(one_key), precompile.Wanted(dtypes=("fp32",))) == ([], 0)
    defaults, keys = precompile.jobs(gpus.named("a100"), layers(one_key), precompile.Wanted(head_dims=((64, 64),)))
    assert keys == 2 * 2 * 6 and {(spec.dtype, spec.mask) for _, spec, _ in defaults} == {
        (dtype, mask) for dtype in ("bf16", "fp16") for mask in ("full", "causal")
    }


def test_windows_on_demand(one_key: Path) -> None:
    held = layers(one_key)
    few, keys = precompile.jobs(H200, held, precompile.Wanted())
    more, same = precompile.jobs(H200, held, precompile.Wanted(windows=True))
    sums = {f"portable/{name}" for name in ("bwd_gather", "bwd_dq_combine", "fwd_combine")}
    helpers = {"portable/bwd_spread", *sums}  # see no mask
    assert {variant.name for variant, spec, _ in more if spec.mask == "full"} == helpers
    few, more = ([job for job in found if job[0].name not in helpers] for found in (few, more))
    assert keys == same and {spec.mask for _, spec, _ in few} == {"causal"}
    assert set(few) < set(more) and {spec.mask for _, spec, _ in more} == {"causal", "band"}
    for sides in ((1024, 0), (7, 0)):
        wanted = asked(replace(PROBLEM, mask=band(*sides)), held)
        assert {(v, s, tuple(sorted(c.items()))) for v, s, c in wanted} <= set(more)


def test_query_heads_as_one_on_demand(one_key: Path) -> None:
    """How many heads they are is an argument of the kernels."""
    held = layers(one_key)
    few, more = (precompile.jobs(H200, held, precompile.Wanted(one_key_head=asked))[0] for asked in (False, True))
    new = {*more} - {*few}
    assert {*few} < {*more} and {spec.mask for _, spec, _ in new} == {"causal_stacked"}
    assert {variant.name for variant, _, _ in new} >= {"sm90/fwd", "sm90/bwd_fused"}


def test_packed_sequences_are_compiled_for_when_asked(one_key: Path) -> None:
    """Lengths and number of the sequences do not matter; binaries of other calls stay the same."""
    held = layers(one_key)
    plain, more = (set(precompile.jobs(H200, held, precompile.Wanted(packed=packed))[0]) for packed in (False, True))
    assert plain < more and {spec.extent for _, spec, _ in more - plain} == {RAGGED}
    views = set(precompile.jobs(H200, held, precompile.Wanted(packed=True, views=True))[0])
    for total, sequences, longest in ((4096, 1, 4096), (5000, 37, 512), (16384, 16, 0)):
        for start, among in ((0, more), (1, views)):  # of rows that begin an element later, at no multiple of 16 bytes
            q, k, v = (torch.empty(total, 3, PROBLEM.head_dim + 8, dtype=torch.bfloat16)[:, :, start : PROBLEM.head_dim + start]
                       .transpose(0, 1)[None] for _ in "qkv")  # fmt: skip
            problem = passes.describe(q, k, v, PROBLEM.mask, 1.0, extent=Extent(RAGGED, sequences, longest))
            assert {(v, s, tuple(sorted(c.items()))) for v, s, c in asked(problem, held)} <= among


# ---- the commands


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_compiles_what_calls_then_find(
    one_key: Path,
    kernels: Path,
    compile_some: Callable[..., precompile.CompiledBinaries],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precompile, "compile_all", compile_some)
    cache = tmp_path / "fleet.sqlite"
    cache.write_bytes(one_key.read_bytes())
    monkeypatch.setattr(reader, "shipped_paths", list)
    command = ("cache", "precompile", "--gpu", "h200", "--cache", cache)
    dry = run(*command, "--dry-run")
    assert dry.exit_code == 0 and re.search(r"\d+ binaries for 6 keys on h200 \(sm_90\), Triton", dry.output)
    assert "for calls without a window (--windows: with one, too)" in dry.output
    windows = run(*command, "--dry-run", "--windows")
    assert windows.exit_code == 0 and "for sliding windows, too" in windows.output
    assert int(windows.output.split()[0]) > int(dry.output.split()[0])
    packed = run(*command, "--dry-run", "--packed")
    assert packed.exit_code == 0 and "for packed sequences, too" in packed.output
    assert not binaries.companion(cache).exists()
    done = run(*command)
    made = binaries.companion(cache)
    assert done.exit_code == 0, done.output
    assert f"sha256 of its header {File(made).digest}" in done.output
    assert all(str(entry.about["kernel"]) in done.output for entry in File(made).entries.values())
    assert made.read_bytes() == kernels.read_bytes()  # whichever process makes it

    explain = (
        "explain",
        "-v",
        "--gpu",
        "h200",
        "--headdim",
        "64",
        "--causal",
        "--batch",
        "4",
        "--heads",
        "32",
        "--cache",
        cache,
    )
    assert "compiled at the first call: there is no file of binaries" in run(*explain).output
    monkeypatch.setenv("FA2TUNE_CACHE", str(cache))
    assert "compiled at the first call: there is no file of binaries" in run(*explain).output
    monkeypatch.setenv("FA2TUNE_KERNELS", str(made))
    told = [line for line in run(*explain).output.splitlines() if line.startswith("  loads")]
    assert len(told) >= 2 and all(line.endswith(f": precompiled, {made}") for line in told)
    listed = rf"ok +named kernels +{re.escape(str(made))}, \d+ binaries: \d+ for sm_90 by Triton \S+"
    assert re.search(listed, run("doctor").output)
    made.chmod(0o666)
    binaries.forget()
    output = run("doctor").output
    assert re.search(r"note +named kernels .*not trusted: it can be written by all users", output)
    assert "not trusted" in run(*explain).output
    monkeypatch.setenv("FA2TUNE_KERNELS", "off")
    assert "off, by FA2TUNE_KERNELS" in run("doctor").output


@pytest.mark.parametrize("given", ["0", "17", "512", "64/", "a", "64/64/64", "64,", "64,17"])
def test_bad_head_dims_are_named(given: str) -> None:
    done = run("cache", "precompile", "--gpu", "h200", "--headdim", given)
    assert done.exit_code == 2 and "--headdim" in done.output and "got" in done.output


def test_head_dims_are_separated_by_commas(one_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "shipped_paths", list)
    command = ("cache", "precompile", "--gpu", "h200", "--cache", one_key, "--dry-run")
    one, other = (run(*command, "--headdim", given).output for given in ("64", "192/128"))
    both = run(*command, "--headdim", "64, 192/128").output
    assert both == run(*command, "--headdim", "64", "--headdim", "192/128").output
    numbers = [int(output.split()[0]) for output in (one, other, both)]
    assert numbers[2] == numbers[0] + numbers[1] and min(numbers) > 0


def test_nothing_to_compile_is_an_error(one_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "shipped_paths", list)
    done = run("cache", "precompile", "--gpu", "a100", "--cache", one_key)
    assert done.exit_code == 1 and "no row serves a100" in done.output


def test_manifests_name_the_binaries(
    one_key: Path, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, locked = tmp_path / "fleet.sqlite", tmp_path / "fleet.lock.json"
    cache.write_bytes(one_key.read_bytes())
    assert run("cache", "lock", cache).exit_code == 0
    without = manifests.read(locked)
    assert without.binaries == () and "binaries" not in locked.read_text()
    binaries.save(binaries.companion(cache), kernels.read_bytes())
    done = run("cache", "lock", cache)
    assert done.exit_code == 0 and f"{len(File(kernels).entries)} binaries in fleet.kernels" in done.output
    assert manifests.read(locked).hash != without.hash

    monkeypatch.setenv("FA2TUNE_CACHE", str(cache))
    missing = run("cache", "check", locked)
    assert missing.exit_code == 1 and re.search(
        r"binaries fleet\.kernels \(\d+, sha256 \w+\): not loaded from here", missing.output
    )
    monkeypatch.setenv("FA2TUNE_KERNELS", str(binaries.companion(cache)))
    assert run("cache", "check", locked).exit_code == 0
    dispatch.reload()
    assert manifests.manifest().hash == manifests.read(locked).hash
    other = tmp_path / "other.kernels"
    binaries.save(other, binaries.file_bytes({}, {}))
    monkeypatch.setenv("FA2TUNE_KERNELS", f"{binaries.companion(cache)}:{other}")
    found = run("cache", "check", locked)
    assert found.exit_code == 1
    assert "binaries other.kernels (0, sha256" in found.output and "not in the lock file" in found.output
    dispatch.reload()


# ---- interrupts, damage, full disks


@pytest.fixture
def fake_builds(one_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the jobs that are built: no compiler runs. A cache file ``fleet.sqlite`` is there."""
    (tmp_path / "fleet.sqlite").write_bytes(one_key.read_bytes())
    monkeypatch.setattr(reader, "shipped_paths", list)
    built: list[str] = []

    def build(job: precompile.BinaryJob, arch: int) -> tuple[str, binaries.New]:
        variant, spec, point = job
        code = precompiled.code_of(variant, spec, dict(point), arch)
        key = precompiled.file_key(code, precompiled.triton_build())
        built.append(key)
        time.sleep(0.05)
        return key, binaries.New(code, precompiled.about(variant, spec, dict(point), arch), {}, key.encode() * 400)

    monkeypatch.setattr(precompile, "build", build)
    return built


def precompiling(folder: Path) -> Result:
    return run("cache", "precompile", "--gpu", "h200", "--cache", folder / "fleet.sqlite", "--workers", "1")


def test_what_is_compiled_survives_ctrl_c_and_is_not_compiled_again(
    fake_builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(command.StepsBar):
        def __call__(self, what: str, done: int, total: int) -> None:
            if done == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command, "StepsBar", Impatient)
        stopped = precompiling(tmp_path)
    made = tmp_path / "fleet.kernels"
    assert stopped.exit_code == 130
    assert stopped.stderr == (
        f"fa2tune: interrupted. {made} keeps the binaries that were saved; the same command continues from here\n"
    )
    before = set(File(made).entries)
    assert len(before) >= 2 and before == set(fake_builds)
    done = precompiling(tmp_path)
    assert done.exit_code == 0 and f"{made} has {len(before)} of them" in done.output
    assert len(fake_builds) == len(set(fake_builds)) == len(File(made).entries) >= len(before)
    again = precompiling(tmp_path)
    assert again.exit_code == 0 and "0 binaries compiled" in again.output
    assert len(fake_builds) == len(set(fake_builds)), "nothing is compiled twice"


def test_a_killed_process_loses_only_what_was_not_saved_yet(
    fake_builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    monkeypatch.setattr(command, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(
        command.StepsBar, "__call__",
        lambda steps, what, done, total: held.append(len(File(made).entries) if made.exists() else 0),
    )  # fmt: skip
    made = tmp_path / "fleet.kernels"
    assert precompiling(tmp_path).exit_code == 0
    assert held == list(range(len(held))), "saved after each"


def test_damaged_binaries_are_compiled_again(fake_builds: list[str], tmp_path: Path) -> None:
    made = tmp_path / "fleet.kernels"
    assert precompiling(tmp_path).exit_code == 0
    content, before = made.read_bytes(), len(fake_builds)
    made.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = precompiling(tmp_path)
    assert done.exit_code == 0 and "1 outdated or damaged ones removed" in done.output
    assert made.read_bytes() == content and len(fake_builds) == before + 1
    made.write_bytes(content[:-1000])
    refused = precompiling(tmp_path)
    assert refused.exit_code == 2 and f"{made}: ends too early" in refused.output


def test_a_full_disk_names_the_file_and_keeps_what_was_saved(
    fake_builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sizes = tmp_path / "fleet.kernels", []
    monkeypatch.setattr(command, "SAVE_EVERY_S", 0.0)
    fsync = os.fsync

    def full(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        if len(sizes) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    # the folder is synced, too
    with monkeypatch.context() as patch:
        patch.setattr(
            "os.fsync", lambda descriptor: None if stat.S_ISDIR(os.fstat(descriptor).st_mode) else full(descriptor)
        )
        stopped = precompiling(tmp_path)
    assert stopped.exit_code == 1
    assert f"Error: {made}: cannot be written: No space left on device. {made} keeps the binaries" in stopped.output
    assert len(File(made).entries) == 2 and not list(tmp_path.glob(".*.tmp"))
    assert precompiling(tmp_path).exit_code == 0


# ---- the tuner's rows


def test_the_machine_code_of_rows_is_filed_once(
    one_key: Path, fake_builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for row in reader.read(one_key) if row.key.kernel in ("fwd", "bwd") and not row.warp_specialized]
    rows = replace_all(rows, triton=fingerprint.triton_version())
    path = tmp_path / "user.kernels"
    old = replace_all(rows, triton="3.5.0")
    assert precompile.file_rows(old, path) == (0, []) and not path.exists(), "this Triton did not tune them"
    filed, failures = precompile.file_rows(rows, path)
    assert filed == len(File(path).entries) == len(fake_builds) and not failures
    kernels = {str(entry.about["kernel"]) for entry in File(path).entries.values()}
    of_few = {
        "fwd_split",
        "sm90/fwd_split",
        "fwd_combine",
        "sm90/fwd_grouped",
        "sm90/fwd_one_tile",
        "sm90/fwd_shares",
        "sm90/fwd_multistage",
    }
    assert kernels == {"fwd", *of_few, "sm90/fwd_join"}, "with those of calls of few queries or tiles"
    monkeypatch.setenv("FA2TUNE_KERNELS", str(path))
    here = replace(measured_code.toolchain(driver=""), triton="9.9")
    assert not any(here.stale(row) for row in rows if row.key.kernel == "fwd")
    assert precompile.file_rows(rows, path) == (0, []) and len(fake_builds) == filed
