"""Compiling ahead for a GPU that is not there: what is covered, what fits, what is said where it does not."""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fa2tune import gpus
from fa2tune.calling import dispatch
from fa2tune.cli import main
from fa2tune.compiling import binaries, compiler, fingerprint
from fa2tune.compiling.binaries import File
from fa2tune.compiling.compiler import CompileError
from fa2tune.fleet import manifests, precompile
from fa2tune.launching import launch, passes, precompiled
from fa2tune.problem import ROADS, Problem
from fa2tune.rows import reader
from fa2tune.rows.reader import Layer
from fa2tune.rows.store import Store

H200 = gpus.named("h200")
PROBLEM = Problem("bf16", 4, 32, 32, 4096, 4096, 64, 64, True)


@pytest.fixture(scope="module")
def one_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache file with the shipped rows of one key, of each of its kernels."""
    shipped = next(path for path in reader.shipped_paths() if path.stem == "h200")
    rows = [
        row for row in reader.read(shipped)
        if (row.key.head_dim, row.key.dtype, row.key.causal, row.key.bucket) == (64, "bf16", True, 4096)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("cache") / "fleet.sqlite"
    Store(path).put(rows)
    return path


def layers(path: Path) -> list[Layer]:
    return [Layer("named", path, reader.read(path))]


@pytest.fixture(scope="module")
def kernels(one_key: Path) -> Path:
    """Its file of binaries."""
    todo, _ = precompile.jobs(H200, layers(one_key), precompile.Wanted())
    path = binaries.companion(one_key)
    outcome = precompile.compile_all(todo, H200.arch, workers=2)
    assert not outcome.failures
    precompile.save(path, outcome)
    return path


def asked(problem: Problem, layers: list[Layer]) -> Iterator[tuple[Any, Any, Mapping[str, Any]]]:
    """(variant, specialization, binary config) of everything that a call, forward and backward, would load."""
    chosen = {"fwd": dispatch.choose(problem, "fwd", H200, among=layers).config}
    for deterministic in (False, True):
        road, kinds = dispatch.road_of(problem, H200, deterministic, layers)
        for kernel in ROADS[road]:
            chosen[kernel] = dispatch.choose(problem, kernel, H200, kinds.get(kernel), layers).config
    for kernel, config in chosen.items():
        for variant, its_config in passes.runs(kernel, problem.specialization, config, H200.arch):
            yield variant, problem.specialization, compiler.binary_config(variant, its_config)


def test_every_call_of_a_covered_key_finds_its_binaries(
    one_key: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA2TUNE_KERNELS", str(kernels))
    monkeypatch.setattr(compiler, "compile_kernel", lambda *asked: pytest.fail("compiled"))
    problems = [
        PROBLEM,
        replace(PROBLEM, seqlen_q=77, seqlen_k=16384),
        replace(PROBLEM, batch=1, heads_q=5, heads_kv=1),
    ]
    wanted = {
        (v.name, tuple(sorted(c.items()))): precompiled.find(v, s, c, 90)
        for p in problems for v, s, c in asked(p, layers(one_key))
    }  # fmt: skip
    assert len(wanted) >= 3
    assert {(image is not None, where) for image, where in wanted.values()} == {(True, str(kernels))}


def test_what_is_loaded_is_what_would_be_compiled(
    one_key: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    monkeypatch.setenv("FA2TUNE_KERNELS", str(kernels))
    monkeypatch.setattr(knobs.compilation, "disable_line_info", True)
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
    here = precompiled.triton_build()
    with otherwise(monkeypatch, precompiled, "triton_build", lambda: "9.9"):
        assert find() == (None, f"binary made with Triton {here}, here 9.9")
    source = fingerprint.kernel_hash(variant)
    with otherwise(monkeypatch, fingerprint, "kernel_hash", lambda variant: "another"):
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
    with otherwise(monkeypatch, precompiled, "triton_build", lambda: ""):
        assert precompiled.overruled() == "nothing says which build of Triton this is"
    variant = compiler.variant_named("fwd")
    config = variant.space.default(PROBLEM.specialization, 90)
    keys = set()
    for name in ("3.6.0", "3.6.0+git9844da95"):
        with otherwise(monkeypatch, precompiled, "triton_build", lambda name=name: name):
            keys.add(precompiled.key_of(variant, PROBLEM.specialization, config, 90))
    assert len(keys) == 2


def test_a_tampered_binary_is_passed_over(
    one_key: Path, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, spec, config = next(asked(PROBLEM, layers(one_key)))
    content = bytearray(kernels.read_bytes())
    entry = File(kernels).entries[precompiled.key_of(variant, spec, config, 90)]
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


def test_the_hashes_of_the_sources_come_with_it(kernels: Path) -> None:
    held = File(kernels).sources[fingerprint.source_digest()]
    assert held == {
        **{name: fingerprint._hashed(variant) for name, variant in compiler.variants().items()},
        **fingerprint.kernel_hashes(),
    }


def test_no_folder_of_this_machine_is_in_it(kernels: Path) -> None:
    file = File(kernels)
    said = json.dumps([[entry.about, entry.launch] for entry in file.entries.values()]).encode()
    for text in (said, *(file.cubin(entry) for entry in file.entries.values())):
        assert str(Path(compiler.__file__).parent.parent).encode() not in text


def test_other_tritons_and_architectures_stay_in_a_file(kernels: Path, tmp_path: Path) -> None:
    path = tmp_path / "both.kernels"
    held = {key: binaries.New(e.about, e.launch, File(kernels).cubin(e)) for key, e in File(kernels).entries.items()}
    (key, new), *_ = held.items()
    before = {
        "1" * 64: replace(new, about={**new.about, "triton": "0.1", "source": "of another day"}),
        "2" * 64: replace(new, about={**new.about, "arch": 80}),
        "3" * 64: replace(new, about={**new.about, "source": "of another day"}),  # no call can find it
        "4" * 64: new,  # another config, say
    }
    sources = {"then": {"fwd": "of another day"}, "never": {"fwd": "unheard of"}}
    binaries.save(path, binaries.packed(before, sources))
    saved = precompile.save(path, precompile.Outcome({key: new}))
    assert (saved.binaries, saved.kept, saved.dropped, saved.digest) == (4, 3, 1, File(path).digest)
    assert saved.size == path.stat().st_size
    assert set(File(path).entries) == {key, "1" * 64, "2" * 64, "4" * 64}
    assert set(File(path).sources) == {"then", fingerprint.source_digest()}


def test_writers_of_one_file_take_turns(kernels: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "both.kernels"
    entries = File(kernels).entries.items()
    news = [(key, binaries.New(e.about, e.launch, File(kernels).cubin(e))) for key, e in entries]
    with ThreadPoolExecutor(len(news)) as pool:
        list(pool.map(lambda one: precompile.save(path, precompile.Outcome(dict([one]))), news))
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
        precompiled.image_of({**entry.launch, name: value}, b"")


def test_what_is_not_trusted_is_not_built_on(kernels: Path, tmp_path: Path) -> None:
    path = tmp_path / "open.kernels"
    binaries.save(path, kernels.read_bytes())
    path.chmod(0o666)
    with pytest.raises(binaries.BinariesError, match="not trusted"):
        precompile.save(path, precompile.Outcome({}))


def test_threads_compile_at_once_though_python_parses_for_one_at_a_time() -> None:
    """A garbage collection in the midst of a parse lets another thread begin one, which would change the first one's depth."""
    spec = PROBLEM.specialization
    known = [compiler.variant_named(name) for name in ("fwd_hopper", "bwd_fused_hopper")]
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

    def build(job: precompile.Job, arch: int) -> tuple[str, binaries.New]:
        if job[0].name == unlucky:
            raise CompileError("no such luck")
        return job[0].name, binaries.New({"kernel": job[0].name}, {}, b"")

    monkeypatch.setattr(precompile, "build", build)
    outcome = precompile.compile_all(todo, 90, workers=2)
    assert {(job[0].name, why) for job, why in outcome.failures} == {(unlucky, "no such luck")}
    assert set(outcome.entries) == {job[0].name for job in todo} - {unlucky}

    def killed(job: precompile.Job, arch: int) -> tuple[str, binaries.New]:
        raise compiler.HostTrouble("ptxas was killed")

    monkeypatch.setattr(precompile, "build", killed)
    with pytest.raises(compiler.HostTrouble):
        precompile.compile_all(todo, 90, workers=2)


@pytest.mark.parametrize("name", ["DISABLE_PTXAS_OPT", "TRITON_ENABLE_ASAN", "TRITON_INTERPRET"])
def test_binaries_are_not_made_while_triton_is_asked_for_others(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(RuntimeError, match=f"not while {name} is set"):
        precompile.compile_all([], 90)


def test_rows_of_two_drivers_are_there_for_nodes_of_either(
    one_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equals, the one that was made with a node's driver serves; so which it is, the building host cannot know."""
    today = dispatch.toolchain()
    rows = {row.variant: row for row in reader.read(one_key) if row.key.kernel == "fwd"}
    fast = replace(rows["descriptor"], triton=today.triton, kernel_hash=today.kernel_hashes["fwd"])
    other = replace(rows["pointer"], triton=today.triton, kernel_hash=today.kernel_hashes["fwd"], driver="590.1")
    path = tmp_path / "two.sqlite"
    Store(path).put([fast, other])
    for driver in ("", fast.driver, "590.1", "600.1"):  # of the building host
        here = replace(today, driver=driver)
        monkeypatch.setattr(dispatch, "toolchain", lambda here=here: here)
        todo, _ = precompile.jobs(H200, layers(path), precompile.Wanted())
        assert {dict(point)["LOADS"] for variant, _, point in todo if variant.name == "fwd"} == {
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
    assert keys == 2 * 2 * 6 and {(spec.dtype, spec.causal) for _, spec, _ in defaults} == {
        (dtype, causal) for dtype in ("bf16", "fp16") for causal in (False, True)
    }


# ---- the commands


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_compiles_what_calls_then_find(
    one_key: Path, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "fleet.sqlite"
    cache.write_bytes(one_key.read_bytes())
    monkeypatch.setattr(reader, "shipped_paths", list)
    command = ("cache", "precompile", "--gpu", "h200", "--cache", cache)
    dry = run(*command, "--dry-run")
    assert dry.exit_code == 0 and re.search(r"\d+ binaries for 6 keys on h200 \(sm_90\), Triton", dry.output)
    assert not binaries.companion(cache).exists()
    done = run(*command)
    made = binaries.companion(cache)
    assert done.exit_code == 0, done.output
    assert f"sha256 of its header {File(made).digest}" in done.output
    assert all(str(entry.about["kernel"]) in done.output for entry in File(made).entries.values())
    assert made.read_bytes() == kernels.read_bytes()  # whoever makes it

    explain = ("explain", "--gpu", "h200", "--headdim", "64", "--causal", "--cache", cache)
    assert "compiled at the first call: there is no file of binaries" in run(*explain).output
    monkeypatch.setenv("FA2TUNE_CACHE", str(cache))
    assert "compiled at the first call: there is no file of binaries" in run(*explain).output
    monkeypatch.setenv("FA2TUNE_KERNELS", str(made))
    told = [line for line in run(*explain).output.splitlines() if line.startswith("  loads")]
    assert len(told) >= 2 and all(line.endswith(f": precompiled, {made}") for line in told)
    assert re.search(
        rf"ok +named kernels +{re.escape(str(made))}, \d+ binaries; for Triton \S+: \d+ for sm_90", run("doctor").output
    )
    made.chmod(0o666)
    binaries.forget()
    output = run("doctor").output
    assert re.search(r"note +named kernels .*not trusted: it can be written by everybody", output)
    assert "not trusted" in run(*explain).output
    monkeypatch.setenv("FA2TUNE_KERNELS", "off")
    assert "off, by FA2TUNE_KERNELS" in run("doctor").output


@pytest.mark.parametrize("given", ["0", "17", "512", "64/", "a", "64/64/64"])
def test_bad_head_dims_are_named(given: str) -> None:
    done = run("cache", "precompile", "--gpu", "h200", "--headdim", given)
    assert done.exit_code == 2 and "--headdim" in done.output and "got" in done.output


def test_nothing_to_compile_is_an_error(one_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "shipped_paths", list)
    done = run("cache", "precompile", "--gpu", "a100", "--cache", one_key)
    assert done.exit_code == 1 and "no row serves a100" in done.output


def test_manifests_name_the_binaries(
    one_key: Path, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, signed = tmp_path / "fleet.sqlite", tmp_path / "fleet.manifest.json"
    cache.write_bytes(one_key.read_bytes())
    assert run("cache", "sign", cache).exit_code == 0
    without = manifests.read(signed)
    assert without.binaries == () and "binaries" not in signed.read_text()
    binaries.save(binaries.companion(cache), kernels.read_bytes())
    done = run("cache", "sign", cache)
    assert done.exit_code == 0 and f"{len(File(kernels).entries)} binaries in fleet.kernels" in done.output
    assert manifests.read(signed).hash != without.hash

    monkeypatch.setenv("FA2TUNE_CACHE", str(cache))
    missing = run("cache", "check", signed)
    assert missing.exit_code == 1 and re.search(
        r"binaries fleet\.kernels \(\d+, sha256 \w+\): not loaded from here", missing.output
    )
    monkeypatch.setenv("FA2TUNE_KERNELS", str(binaries.companion(cache)))
    assert run("cache", "check", signed).exit_code == 0
    dispatch.reload()
    assert manifests.manifest().hash == manifests.read(signed).hash
    other = tmp_path / "other.kernels"
    binaries.save(other, binaries.packed({}, {}))
    monkeypatch.setenv("FA2TUNE_KERNELS", f"{binaries.companion(cache)}:{other}")
    found = run("cache", "check", signed)
    assert found.exit_code == 1 and "binaries other.kernels (0, sha256" in found.output and "not signed" in found.output
    dispatch.reload()
