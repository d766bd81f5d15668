"""Checks a release on a GPU: machine code shipped with its rows is what runs, soon, with any Triton or none.

    python benchmarks/release_check.py FOLDER [--triton39 FOLDER] [--out FILE] [--steps make,starts,results,faults]

make: the machine code of the shipped rows of this GPU (ship_binaries.py), and FOLDER/site, laid out as pip does. A file that
is there already is kept. starts: the first forward and backward of fresh processes, by seconds, with Triton hidden, installed,
newer, broken, of an unknown version. results: every head dim and mask against float32, and bit by bit against what Triton
compiles. faults: damaged files, machine code that the driver refuses: the call is right, and a message says why.

Exit status 1: something is not as it should be. Runs with nothing but torch installed, and click for the step make.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
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
SHAPE = (1, 16, 4096, 128)  #: of the timed first call: batch, heads, length, head dim; bf16, causal
RESULTS = [(dim, causal) for dim in (64, 128, 256) for causal in (False, True)]
RESULT_LENGTH = 2048
#: ||found - reference|| / ||reference||, of bf16 tensors against float32
LARGEST_ERROR = 0.012
GOAL_SECONDS = 0.3
STEPS = ("make", "starts", "results", "faults")


# In a child: only torch and fa2tune ------------------------------------------------------------------------------------------


def _tensors(torch: Any, shape: tuple[int, ...], seed: int = 0) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    made = [torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16) for _ in range(4)]
    return [one.requires_grad_(index < 3) for index, one in enumerate(made)]


def first_call(checked: bool) -> dict[str, Any]:
    """Seconds of: import torch; tensors; import fa2tune; the first forward; the first backward. And what came with them."""
    clock, programs = time.perf_counter, list[str]()

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            programs.append(str(arguments[0]))

    sys.addaudithook(heard)
    times = [clock()]
    import torch

    times.append(clock())
    q, k, v, do = _tensors(torch, SHAPE)
    torch.cuda.synchronize()
    programs.clear()
    times.append(clock())
    import fa2tune

    attention = fa2tune.attention
    times.append(clock())
    o = attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    times.append(clock())
    (o * do).sum().backward()  # a gradient handed to autograd would have torch import sympy, 0.6 to 3 s, for its shape
    torch.cuda.synchronize()
    times.append(clock())
    found: dict[str, Any] = {
        "seconds": [b - a for a, b in itertools.pairwise(times)], "programs": programs,
        "triton": getattr(sys.modules.get("triton"), "__file__", None),
        "from": fa2tune.__file__,
    }  # fmt: skip
    if checked:
        found["errors"] = _errors(torch, q, k, v, do, o, True)
        found["explained"] = _explained(fa2tune, q, k, v, True)
    return found


def _errors(torch: Any, q: Any, k: Any, v: Any, do: Any, o: Any, causal: bool) -> dict[str, float]:
    """Of o and the gradients that q, k and v hold, relative to float32."""
    inputs = [one.detach().float().requires_grad_() for one in (q, k, v)]
    scores = (inputs[0] @ inputs[1].transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        rows = torch.arange(q.shape[-2], device="cuda")
        scores = scores.masked_fill(rows[None, :] > rows[:, None], -torch.inf)
    reference = scores.softmax(-1) @ inputs[2]
    (reference * do.float()).sum().backward()
    grads = [(x.grad, y.grad) for x, y in zip((q, k, v), inputs, strict=True)]
    pairs = dict(zip(("o", "dq", "dk", "dv"), [(o, reference), *grads], strict=True))
    return {name: float((x.detach().float() - y.detach()).norm() / y.detach().norm()) for name, (x, y) in pairs.items()}


def _explained(fa2tune: Any, q: Any, k: Any, v: Any, causal: bool) -> dict[str, str]:
    said: dict[str, str] = {}
    for served in fa2tune.explain(q, k, v, causal=causal).as_dict()["kernels"]:
        said |= served["binaries"]
    return said


def all_results() -> dict[str, Any]:
    """Errors and hashes of every head dim and mask: o, lse, and the gradients of a deterministic backward."""
    import torch

    import fa2tune

    found: dict[str, Any] = {}
    for dim, causal in RESULTS:
        q, k, v, do = _tensors(torch, (2, 2048 // dim, RESULT_LENGTH, dim), dim)
        poison = torch.full((64 << 20,), torch.nan, device="cuda", dtype=torch.bfloat16)
        del poison  # what comes next lies where NaN stands
        o, lse = fa2tune.attention(q, k, v, causal=causal, return_lse=True, deterministic=True)
        (o * do).sum().backward()
        digest = hashlib.sha256()
        for one in (o, lse, q.grad, k.grad, v.grad):
            digest.update(one.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        found[f"{dim} {'causal' if causal else 'full'}"] = {
            "errors": _errors(torch, q, k, v, do, o, causal), "sha256": digest.hexdigest(),
            "explained": _explained(fa2tune, q, k, v, causal),
        }  # fmt: skip
    return {"results": found, "triton": getattr(sys.modules.get("triton"), "__file__", None)}


def child(what: str, hidden: bool) -> None:
    if hidden:
        sys.modules["triton"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        found = all_results() if what == "results" else first_call(what == "checked")
    except Exception as error:  # for the parent to judge
        found = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(found), flush=True)


# In the parent ---------------------------------------------------------------------------------------------------------------


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


def ran(what: str, env: Mapping[str, str], hidden: bool = False, timeout: float = 120) -> dict[str, Any]:
    """A child's result, and under "said" what it wrote to stderr, at exit too."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", what, *(["--hidden"] if hidden else [])]
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


def starts(check: Check, folder: Path, site: Path, triton39: Path | None, count: int) -> dict[str, Any]:
    no_tools = {"PATH": without_compilers(os.environ["PATH"])}
    fakes = folder / "fakes"
    kinds: dict[str, tuple[dict[str, str], bool, int]] = {
        "no Triton": (environment(folder, site, **no_tools), True, count),
        "Triton as installed": (environment(folder, site, **no_tools), False, count),
        "Triton broken": (environment(folder, site, fake_triton(fakes / "broken", "3.9.0"), **no_tools), False, 2),
        "Triton unknown": (environment(folder, site, fake_triton(fakes / "new", "4.0.0rc1"), **no_tools), False, 2),
        "Triton too old": (environment(folder, site, fake_triton(fakes / "old", "2.1.0"), **no_tools), False, 2),
    }
    if triton39 is not None:
        kinds["Triton 3.9"] = environment(folder, site, triton39, **no_tools), False, count
    found: dict[str, Any] = {}
    print(
        f"{'first call, seconds':22}{'import fa2tune':>16}{'forward':>10}{'backward':>10}{'all three':>24}{'and tensors':>13}"
    )
    for number, (name, (env, hidden, times)) in enumerate(kinds.items()):
        first = ran("checked", env, hidden)  # fills the page cache
        if not check.that("error" not in first, f"{name}: {first.get('error')} {first['said'][-500:]}"):
            continue
        check.right(name, first["errors"])
        check.that(first["said"] == "", f"{name}: it printed {first['said'][-300:]!r}")
        check.that(
            all(where.startswith("precompiled") for where in first["explained"].values()),
            f"{name}: {first['explained']}",
        )
        if not number:  # the first of all has read the libraries from the disk
            ran("start", env, hidden)
        several = [first] if times < 3 else [ran("start", env, hidden) for _ in range(times)]
        for one in [first, *several]:
            ran_, imported = one.get("programs"), one.get("triton")
            check.that(not ran_ and not imported, f"{name}: ran {ran_}, imported Triton {imported}")
        parts = [statistics.median(one["seconds"][part] for one in several) for part in range(5)]
        ours = [sum(one["seconds"][2:]) for one in several]
        whole = [sum(one["seconds"][1:]) for one in several]
        columns = {"parts": parts, "ours": ours, "with_tensors": whole}
        found[name] = {column: [round(s, 4) for s in seconds] for column, seconds in columns.items()}
        told = f"{statistics.median(ours):.3f} ({min(ours):.3f} to {max(ours):.3f})"
        print(
            f"{name:22}{parts[2]:16.3f}{parts[3]:10.3f}{parts[4]:10.3f}{told:>24}{statistics.median(whole):13.3f}",
            flush=True,
        )
        if times >= 3:
            check.that(
                statistics.median(ours) <= GOAL_SECONDS,
                f"{name}: {statistics.median(ours):.3f} s, the goal is {GOAL_SECONDS}",
            )
    left = folder / "triton-empty"
    check.that(not left.exists(), f"something was compiled: {left}")
    return found


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
            told = result["explained"]
            check.that(all(one.startswith(wanted) for one in told.values()), f"{name}, {case}: {told}")
        found[name] = {case: result["sha256"][:16] for case, result in one["results"].items()}
        worst = max(error for result in one["results"].values() for error in result["errors"].values())
        print(f"results, {name}: {len(one['results'])} cases, largest error {worst:.2e}", flush=True)
    same = len({json.dumps(hashes) for hashes in found.values()}) == 1
    check.that(same, f"results differ bit by bit: {found}")
    print(f"results of {', '.join(found)}: {'the same bits' if same else 'DIFFERENT'}", flush=True)
    return {"hashes": found, "same_bits": same}


def _another_architecture() -> bytes:
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
        content = bytearray(binaries.packed(new, file.sources))
    to.write_bytes(content)
    os.chmod(to, 0o666 if kind == "writable by all" else 0o644)


def _of_a_newer_compiler(cubin: bytes) -> bytes:
    """The version of the ELF's ABI, by which a driver tells what it does not know."""
    return cubin[:8] + bytes([255]) + cubin[9:]


MADE_ANEW: dict[str, Any] = {
    "another architecture": None,  # compiled once, by ``faults``
    "of a newer compiler than the driver knows": _of_a_newer_compiler,
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
    "of a newer compiler than the driver knows": r"loading \w+",
    "no machine code at all": r"loading \w+",
}


def faults(check: Check, folder: Path, kernels: Path, triton_cache: Path) -> dict[str, Any]:
    other = _another_architecture()
    MADE_ANEW["another architecture"] = lambda cubin: other
    sites: dict[str, Path] = {}
    for number, kind in enumerate(FAULTS):
        sites[kind] = installed(folder / f"fault-{number}", None)
        damage(kind, kernels, sites[kind] / "fa2tune" / "cache" / kernels.name)

    def both(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """With a Triton that compiles; and without."""
        env = environment(folder, sites[kind], TRITON_CACHE_DIR=str(triton_cache))
        return ran("checked", env), ran("checked", env, hidden=True)

    with ThreadPoolExecutor(4) as pool:
        done = dict(zip(FAULTS, pool.map(both, FAULTS), strict=True))
    found: dict[str, Any] = {}
    for kind, (compiled, without) in done.items():
        said = compiled["said"]
        if check.that("error" not in compiled, f"{kind}: {compiled.get('error')} {said[-500:]}"):
            check.right(kind, compiled["errors"])
            check.that(bool(re.search(FAULTS[kind], said)), f"{kind}: it says {said[-500:]!r}")
            told = compiled["explained"]
            check.that(all(re.search(FAULTS[kind], one) for one in told.values()), f"{kind}: explain says {told}")
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
    parser.add_argument("folder", type=Path, nargs="?", help="kept from run to run")
    parser.add_argument("--triton39", type=Path, help="a folder that holds another Triton, for PYTHONPATH")
    parser.add_argument("--out", type=Path, help="a JSON file; what other steps have written there stays")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--hidden", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: Iterable[str] | None = None) -> int:
    asked = options().parse_args(arguments and list(arguments))
    if asked.child:
        child(asked.child, asked.hidden)
        return 0
    if asked.folder is None or not set(asked.steps.split(",")) <= set(STEPS):
        options().error(f"give a folder, and steps out of {', '.join(STEPS)}")
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
        record["starts"] = starts(check, folder, site, asked.triton39, asked.starts)
    if "results" in steps:
        record["results"] = results(check, folder, site, asked.triton39, triton_cache)
    if "faults" in steps:
        record["faults"] = faults(check, folder, kernels, triton_cache)
    record["failures"] = check.failures
    if asked.out:
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print("FAILED" if check.failures else "everything is as it should be", f"({len(check.failures)} failures)")
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main())
