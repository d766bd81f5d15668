"""Checks a release on a GPU: machine code shipped with its rows is what runs, soon, with any Triton or none.

    python benchmarks/release_check.py FOLDER [--triton39 FOLDER] [--out FILE] [--steps make,starts,results,faults]

make: the machine code of the shipped rows of this GPU (ship_binaries.py), and FOLDER/site, laid out as pip does. A file that
is there already is kept. starts: the first forward and backward of fresh processes, by seconds, with Triton hidden, installed,
newer, broken, of an unknown version. results: every head dim and mask, decoding too, against float32, and bit by bit against
what Triton compiles. faults: damaged files, machine code that the driver refuses: the call is right, and a message says why.

Exit status 1: something is not as it should be. Runs with nothing but torch installed, and click for the step make.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
#: ||found - reference|| / ||reference||, of bf16 tensors against float32
LARGEST_ERROR = 0.012
GOAL_SECONDS = 0.3
STEPS = ("make", "starts", "results", "faults")


def installed(to: Path, kernels: Path | None) -> Path:
    """The package as pip lays it out, with this file of machine code beside its rows."""
    if to.exists():
        shutil.rmtree(to)
    ignore = shutil.ignore_patterns("__pycache__", "*.kernels", "*.json", "*.md", ".*")
    shutil.copytree(ROOT / "fa2tune", to / "fa2tune", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("kernels", "search_spaces", "cache"):
        shutil.copytree(ROOT / folder, to / "fa2tune" / folder, ignore=ignore)
    shutil.copy(ROOT / "cache" / "lookup_cost.json", to / "fa2tune" / "cache")
    if kernels is not None:
        shutil.copy(kernels, to / "fa2tune" / "cache")
        os.chmod(to / "fa2tune" / "cache" / kernels.name, 0o644)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(to)], check=True)
    return to


def without_compilers(path: str) -> str:
    """PATH without folders that hold gcc, clang, cc, nvcc or ptxas; this Python is called by its full path."""
    tools = ("gcc", "clang", "cc", "nvcc", "ptxas")
    return os.pathsep.join(f for f in path.split(os.pathsep) if not any(Path(f, tool).exists() for tool in tools))


def environment(folder: Path, site: Path, *before: Path, **more: str) -> dict[str, str]:
    """Of a child: the installed package, what comes before an installed Triton, no user's cache, none of our variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FA2TUNE_", "TRITON_"))}
    return {
        **kept, "PYTHONPATH": os.pathsep.join(map(str, (*before, site))), "XDG_CACHE_HOME": str(folder / "no-user"),
        "TRITON_CACHE_DIR": str(folder / "triton-empty"), "CUDA_CACHE_DISABLE": "1", **more,
    }  # fmt: skip


def ran(what: str, env: Mapping[str, str], hidden: bool = False, timeout: float = 400) -> dict[str, Any]:
    """A child's result, and under "said" what it wrote to stderr, at exit too."""
    command = [sys.executable, str(Path(__file__).with_name("release_child.py").resolve()), what]
    command += ["--hidden"] if hidden else []
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout} s", "said": ""}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(lines[-1][7:]) if lines else {"error": f"ended with {done.returncode}"}
    found["said"] = done.stderr.strip()
    if extra := [line for line in done.stdout.splitlines() if not line.startswith("RESULT ")]:
        found["said"] += "\n".join(extra)
    return found


def fake_triton(
    folder: Path, version: str, body: str = "raise ImportError('libtriton.so: undefined symbol: broken')"
) -> Path:
    """A Triton that has a version and cannot be imported."""
    (folder / "triton").mkdir(parents=True, exist_ok=True)
    (folder / "triton" / "__init__.py").write_text(f"__version__ = '{version}'\n{body}\n")
    return folder


class Check:
    """What was asked, found, and whether it is as it should be."""

    def __init__(self) -> None:
        self.failures = list[str]()

    def that(self, holds: bool, otherwise: str) -> bool:
        if not holds:
            self.failures.append(otherwise)
            print(f"NOT AS IT SHOULD BE: {otherwise}", flush=True)
        return holds

    def right(self, name: str, errors: Mapping[str, float]) -> None:
        worst = max(errors.values(), key=lambda error: error if error == error else float("inf"))
        self.that(worst <= LARGEST_ERROR, f"{name}: errors {errors}")


def make(folder: Path, arch: int, triton_cache: Path) -> tuple[Path, float | None]:
    """The file of machine code, and the seconds that making it took; None: it was there."""
    path = folder / f"sm_{arch}.kernels"
    if path.exists():
        return path, None
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "benchmarks" / "ship_binaries.py"), str(folder), "--arch", str(arch)]
    env = {**os.environ, "TRITON_CACHE_DIR": str(triton_cache)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    subprocess.run(command, check=True, env=env)
    return path, time.perf_counter() - began


def starts(check: Check, folder: Path, site: Path, triton39: Path | None, count: int, quick: bool) -> dict[str, Any]:
    """First calls: some kinds timed, one process after the other; the others at once, to see that they are right."""
    no_tools = {"PATH": without_compilers(os.environ["PATH"])}
    plain, fakes = environment(folder, site, **no_tools), folder / "fakes"
    timed = {"no Triton": (plain, True), "Triton as installed": (plain, False)}
    if triton39 is not None:
        timed["Triton 3.9"] = environment(folder, site, triton39, **no_tools), False
    others = {
        name: (environment(folder, site, fake_triton(fakes / name, version), **no_tools), False)
        for name, version in (("broken", "3.9.0"), ("unknown", "4.0.0rc1"), ("too-old", "2.1.0"))
    }
    if quick:
        others |= {name: timed.pop(name) for name in list(timed)[1:]}
    found: dict[str, Any] = {}
    print(
        f"{'first call, seconds':22}{'import fa2tune':>16}{'forward':>10}{'backward':>10}{'all three':>26}{'and tensors':>13}"
    )
    for name, (env, hidden) in timed.items():
        first = ran("checked", env, hidden)  # not timed: it reads the libraries from the disk
        if not started(check, name, first):
            continue
        several = [ran("start", env, hidden) for _ in range(count)]
        if not all(started(check, name, one) for one in several):
            continue
        parts = [statistics.median(one["seconds"][part] for one in several) for part in range(5)]
        ours, whole = ([sum(one["seconds"][begin:]) for one in several] for begin in (2, 1))
        columns = {"parts": parts, "ours": ours, "with_tensors": whole}
        found[name] = {column: [round(s, 4) for s in seconds] for column, seconds in columns.items()}
        middle = statistics.median(ours)
        cell = f"{middle:.3f} ({min(ours):.3f} to {max(ours):.3f})"
        print(
            f"{name:22}{parts[2]:16.3f}{parts[3]:10.3f}{parts[4]:10.3f}{cell:>26}{statistics.median(whole):13.3f}",
            flush=True,
        )
        check.that(middle <= GOAL_SECONDS, f"{name}: {middle:.3f} s, the goal is {GOAL_SECONDS}")
    with ThreadPoolExecutor(len(others)) as pool:
        waiting = {name: pool.submit(ran, "checked", env, hidden) for name, (env, hidden) in others.items()}
        right = [name for name, job in waiting.items() if started(check, name, job.result())]
    print(f"right, with machine code alone: {', '.join([*found, *right])}", flush=True)
    found["right"] = right
    left = folder / "triton-empty"
    check.that(not left.exists(), f"something was compiled: {left}")
    return found


def started(check: Check, name: str, one: Mapping[str, Any]) -> bool:
    """Whether a first call is as it should be."""
    if not check.that("error" not in one, f"{name}: {one.get('error')} {one['said'][-500:]}"):
        return False
    check.that(one["said"] == "", f"{name}: it printed {one['said'][-300:]!r}")
    programs, triton = one["programs"], one["triton"]
    check.that(not programs and not triton, f"{name}: ran {programs}, imported Triton {triton}")
    if "errors" in one:
        check.right(name, one["errors"])
        explained = one["explained"]
        check.that(all(where.startswith("precompiled") for where in explained.values()), f"{name}: {explained}")
    return True


def results(check: Check, folder: Path, site: Path, triton39: Path | None, triton_cache: Path) -> dict[str, Any]:
    compiles = {"TRITON_CACHE_DIR": str(triton_cache), "FA2TUNE_KERNELS": "off"}
    asked = {
        "compiled": (environment(folder, site, **compiles), False), "no Triton": (environment(folder, site), True),
    }  # fmt: skip
    if triton39 is not None:
        asked["Triton 3.9"] = environment(folder, site, triton39), False
    with ThreadPoolExecutor(3) as pool:
        waiting = {name: pool.submit(ran, "results", env, hidden) for name, (env, hidden) in asked.items()}
        done = {name: job.result() for name, job in waiting.items()}
    found: dict[str, Any] = {}
    for name, one in done.items():
        if not check.that("error" not in one, f"results, {name}: {one.get('error')} {one['said'][-500:]}"):
            continue
        check.that(one["said"] == "", f"results, {name}: it printed {one['said'][-300:]!r}")
        for case, result in one["results"].items():
            check.right(f"{name}, {case}", result["errors"])
            wanted = "compiled" if name == "compiled" else "precompiled"
            explained = result["explained"]
            check.that(all(one.startswith(wanted) for one in explained.values()), f"{name}, {case}: {explained}")
        found[name] = {case: result["sha256"][:16] for case, result in one["results"].items()}
        worst = max(error for result in one["results"].values() for error in result["errors"].values())
        print(f"results, {name}: {len(one['results'])} cases, largest error {worst:.2e}", flush=True)
    same = len({json.dumps(hashes) for hashes in found.values()}) == 1
    check.that(same, f"results differ bit by bit: {found}")
    print(f"results of {', '.join(found)}: {'the same bits' if same else 'DIFFERENT'}", flush=True)
    return {"hashes": found, "same_bits": same}


def _another_architecture(folder: Path) -> bytes:
    """Machine code for sm_80: out of a file beside that of this GPU, or compiled."""
    from fa2tune.compiling import binaries

    if (beside := folder / "sm_80.kernels").exists():
        file = binaries.File(beside, believed=True)
        return file.cubin(next(iter(file.entries.values())))
    from fa2tune.compiling import compiler, registry
    from fa2tune.spec.problem import Specialization

    variant, spec = registry.portable_of("fwd"), Specialization("bf16", 64, 64, "causal")
    code: bytes = compiler.compile_kernel(variant, spec, variant.space.default(spec, 80), 80).kernel
    return code


def damage(kind: str, good: Path, to: Path) -> None:
    """Write a file that is ``good`` with a fault."""
    from fa2tune.compiling import binaries

    content = bytearray(good.read_bytes())
    file = binaries.File(good, believed=True)
    body = len(content) - max(entry.offset + entry.size for entry in file.entries.values())
    if kind == "truncated":
        del content[body + 1000 :]
    elif kind == "truncated within its header":
        del content[body // 2 :]
    elif kind == "a byte of its header":
        content[body // 2] ^= 1
    elif kind == "a byte of each binary":
        for entry in file.entries.values():
            content[body + entry.offset + entry.size // 2] ^= 1
    elif kind in MADE_ANEW:
        change = MADE_ANEW[kind]
        new = {
            key: binaries.New(e.code, e.about, e.launch, change(file.cubin(e)))
            for key, e in file.entries.items()
            if e.about["spec"]["dtype"] == "bf16"
        }
        content = bytearray(binaries.file_bytes(new, file.sources))
    to.write_bytes(content)
    os.chmod(to, 0o666 if kind == "writable by all" else 0o644)


MADE_ANEW: dict[str, Any] = {
    "another architecture": None,  # compiled once, by ``faults``
    "no machine code at all": lambda cubin: hashlib.sha256(cubin).digest() * (len(cubin) // 32),
}
#: fault -> what a message has to say
FAULTS = {
    "truncated": r"ends too early: it was truncated",
    "truncated within its header": r"is damaged|ends too early",
    "a byte of its header": r"its header's hash is wrong",
    "a byte of each binary": r"a binary's hash is wrong",
    "writable by all": r"not trusted: it can be written by all users",
    "another architecture": r"loading \w+",
    "no machine code at all": r"loading \w+",
}


def faults(check: Check, folder: Path, kernels: Path, triton_cache: Path, quick: bool) -> dict[str, Any]:
    other = _another_architecture(folder)
    MADE_ANEW["another architecture"] = lambda cubin: other
    sites: dict[str, Path] = {}
    for number, kind in enumerate(FAULTS):
        sites[kind] = folder / f"fault-{number}"
        shutil.copytree(folder / "site", sites[kind], dirs_exist_ok=True)
        damage(kind, kernels, sites[kind] / "fa2tune" / "cache" / kernels.name)

    what = "forward" if quick else "checked"
    asked = [(kind, hidden) for kind in FAULTS for hidden in (False, True)]  # with a Triton that compiles; without

    def one(kind: str, hidden: bool) -> dict[str, Any]:
        return ran(what, environment(folder, sites[kind], TRITON_CACHE_DIR=str(triton_cache)), hidden)

    with ThreadPoolExecutor(16 if quick else 8) as pool:
        both = dict(zip(asked, pool.map(one, *zip(*asked, strict=True)), strict=True))
    done = {kind: (both[kind, False], both[kind, True]) for kind in FAULTS}
    found: dict[str, Any] = {}
    for kind, (compiled, without) in done.items():
        said = compiled["said"]
        if check.that("error" not in compiled, f"{kind}: {compiled.get('error')} {said[-500:]}"):
            check.right(kind, compiled["errors"])
            check.that(bool(re.search(FAULTS[kind], said)), f"{kind}: it says {said[-500:]!r}")
            explained = compiled["explained"]
            check.that(
                all(re.search(FAULTS[kind], one) for one in explained.values()), f"{kind}: explain says {explained}"
            )
        refusal = without.get("error", "")
        named = refusal.startswith("NoTritonError") and bool(re.search(FAULTS[kind], refusal))
        check.that(named, f"{kind}, without Triton: {refusal or without}")
        message = next((line for line in said.splitlines() if re.search(FAULTS[kind], line)), "").replace(
            str(folder), ""
        )
        found[kind] = {
            "message": message,
            "without_triton": refusal.replace(str(folder), ""),
            "errors": compiled.get("errors"),
        }
        print(f"fault, {kind}: {message[:150]}", flush=True)
    print(f"without Triton: {next(iter(found.values()))['without_triton'][:400]}", flush=True)
    return found


def about() -> dict[str, Any]:
    """GPU, driver and versions, asked of a child: this process touches no GPU."""
    asked = (
        "import torch, json, importlib.metadata as m; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps([p.name, 10 * p.major + p.minor, torch.__version__, m.version('triton')]))"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    gpu, arch, torch, triton = json.loads(done.stdout.splitlines()[-1])
    driver = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", driver.read_text()) if driver.exists() else None
    return {
        "gpu": gpu, "arch": arch, "torch": torch, "triton": triton, "python": platform.python_version(),
        "driver": match[0] if match else None, "cores": len(os.sched_getaffinity(0)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="kept from run to run")
    parser.add_argument("--triton39", type=Path, help="a folder that holds another Triton, for PYTHONPATH")
    parser.add_argument("--out", type=Path, help="a JSON file; what other steps have written there stays")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="time one kind of start; faults by a forward each")
    return parser


def main(arguments: Iterable[str] | None = None) -> int:
    asked = options().parse_args(arguments and list(arguments))
    if not set(asked.steps.split(",")) <= set(STEPS):
        options().error(f"--steps: give some of {', '.join(STEPS)}")
    folder, steps = asked.folder.resolve(), asked.steps.split(",")
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    check, here, triton_cache = Check(), about(), folder / "triton-made"
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    record = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {}
    record["about"] = here
    kernels, seconds = make(folder, here["arch"], triton_cache)
    site = folder / "site"
    if seconds is not None or not site.exists():
        installed(site, kernels)
    if seconds is not None:
        record["made"] = {"seconds": round(seconds, 1), "bytes": kernels.stat().st_size}
        print(f"machine code made in {seconds:.0f} s, {kernels.stat().st_size / 1e6:.1f} MB", flush=True)
    record["sha256"] = hashlib.sha256(kernels.read_bytes()).hexdigest()
    print(f"sha256 {record['sha256']}", flush=True)
    if "starts" in steps:
        record["starts"] = starts(check, folder, site, asked.triton39, asked.starts, asked.quick)
    if "results" in steps:
        record["results"] = results(check, folder, site, asked.triton39, triton_cache)
    if "faults" in steps:
        record["faults"] = faults(check, folder, kernels, triton_cache, asked.quick)
    record["failures"] = check.failures
    if asked.out:
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print("FAILED" if check.failures else "everything is as it should be", f"({len(check.failures)} failures)")
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main())
