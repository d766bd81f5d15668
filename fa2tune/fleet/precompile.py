"""Compile ahead of the first call: the rows that would serve a GPU -> a file of binaries. Needs no GPU.

What is compiled is what the dispatcher would ask for: its own lookup is walked over every problem that the rows are filed
under, and a decoder's, so a row that another one outruns costs nothing, and what runs around a kernel is there, too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from fa2tune.calling import dispatch
from fa2tune.compiling import binaries, compiler, fingerprint
from fa2tune.compiling.binaries import File, New
from fa2tune.compiling.compiler import CompileError
from fa2tune.gpus import Gpu
from fa2tune.launching import launch, precompiled
from fa2tune.launching.passes import runs
from fa2tune.problem import BUCKETS, DTYPES, ROADS, Problem, Specialization, TuningKey
from fa2tune.rows.lookup import SIXTEEN_BIT, Toolchain
from fa2tune.rows.reader import Layer
from fa2tune.variant import Variant

OTHER_DRIVER = "other"  #: stands for any that no row was made with

Point = tuple[tuple[str, object], ...]
#: One binary: the ``binary_config`` as sorted pairs.
Job = tuple[Variant, Specialization, Point]


@dataclass(frozen=True)
class Wanted:
    """For which calls to compile. Every length is covered, by way of the buckets; so is every layout, number of heads and
    batch, which binaries do not depend on."""

    head_dims: tuple[tuple[int, int], ...] = ()  #: (of Q and K, of V); none: those that rows are filed under
    dtypes: tuple[str, ...] = ()  #: none: as rows are filed, or both of 16 bits where there is none
    #: also for tensors that no descriptor can address: expanded ones, and bases or strides that are no multiples of 16 bytes
    views: bool = False


def _keys(gpu: Gpu, layers: Iterable[Layer], wanted: Wanted) -> list[TuningKey]:
    """Of every problem to ask about, as forwards of this GPU: what rows that can serve here are filed under, at any length.
    Head dims that were asked for have no need of rows: defaults serve."""
    filed = {
        (k.dtype, k.precision, k.head_dim, k.head_dim_v, k.causal)
        for k in (row.key for layer in layers for row in layer.rows)
        if k.arch == gpu.arch and k.dtype in (wanted.dtypes or DTYPES)
    }
    if wanted.head_dims:
        kinds = {(dtype, precision, causal) for dtype, precision, _, _, causal in filed}
        kinds = kinds or {(dtype, "ieee", causal) for dtype in wanted.dtypes or SIXTEEN_BIT for causal in (False, True)}
        filed = {(dtype, precision, *dims, causal) for dtype, precision, causal in kinds for dims in wanted.head_dims}
    return [
        TuningKey(gpu.name, gpu.sm_count, gpu.arch, "fwd", *about, bucket)
        for about in sorted(filed)
        for bucket in BUCKETS
    ]


def _problems(key: TuningKey, views: bool) -> Iterator[Problem]:
    problem = key.workload()
    yield problem
    yield replace(problem, seqlen_q=1)  # as decoders ask, which may suit another binary
    if views:
        yield replace(problem, tma=False)
        yield replace(problem, tma=False, aligned=False)


def _nodes(layers: Sequence[Layer]) -> list[Toolchain]:
    """What may be running where the calls will be: Triton and kernels as here, whatever the driver, since a row of that
    driver goes before others. This host's says nothing: it may have none."""
    drivers = sorted({row.driver for layer in layers for row in layer.rows} | {"", OTHER_DRIVER})
    return [replace(dispatch.toolchain(), driver=driver) for driver in drivers]


def _choices(
    problem: Problem, gpu: Gpu, layers: Sequence[Layer], node: Toolchain
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(kernel, config) of everything that a node's dispatcher would choose for a problem, forward and backward."""
    yield "fwd", dispatch.choose(problem, "fwd", gpu, among=layers, node=node).config
    for deterministic in (False, True):
        road, kinds = dispatch.road_of(problem, gpu, deterministic, layers, node)
        for kernel in ROADS[road]:
            yield kernel, dispatch.choose(problem, kernel, gpu, kinds.get(kernel), layers, node).config


def jobs(gpu: Gpu, layers: Sequence[Layer], wanted: Wanted) -> tuple[list[Job], int]:
    """Every binary that those calls take, under any driver, and how many keys (dtype, head dims, mask, bucket) they are."""
    found: dict[Job, None] = {}
    keys, nodes = _keys(gpu, layers, wanted), _nodes(layers)
    for key in keys:
        for problem, node in product(_problems(key, wanted.views), nodes):
            for kernel, config in _choices(problem, gpu, layers, node):
                for variant, its_config in runs(kernel, problem.specialization, config, gpu.arch):
                    binary = compiler.binary_config(variant, its_config)
                    found[variant, problem.specialization, tuple(sorted(binary.items()))] = None
    return list(found), len(keys)


@dataclass
class Outcome:
    """What became of the jobs."""

    entries: dict[str, New] = field(default_factory=dict)  #: by key
    failures: list[tuple[Job, str]] = field(default_factory=list)

    @property
    def kernels(self) -> Counter[str]:
        return Counter(str(new.about["kernel"]) for new in self.entries.values())


def build(job: Job, arch: int) -> tuple[str, New]:
    """(key, binary) of one job; raises as ``compiler.compile_kernel``."""
    variant, spec, point = job
    config = dict(point)
    image = launch.image_of(compiler.compile_kernel(variant, spec, config, arch))
    about = precompiled.about(variant, spec, config, arch)
    return precompiled.key_of(variant, spec, config, arch), New(about, precompiled.launch_of(image), image.cubin)


def check_host() -> None:
    """RuntimeError: what would be compiled here is not what its key says."""
    why = "TRITON_INTERPRET is set" if os.environ.get("TRITON_INTERPRET", "0") == "1" else precompiled.overruled()
    if why is not None:
        raise RuntimeError(f"binaries are made for others, so not while {why}")


def compile_all(
    todo: Sequence[Job], arch: int, workers: int | None = None, progress: Callable[[int], None] = lambda done: None
) -> Outcome:
    """On all cores. A config that does not compile is a failure of its own; what is the host's fault (a killed ptxas, no
    memory) ends the whole. RuntimeError: Triton is asked for something here that other nodes would not ask for."""
    from triton import knobs

    check_host()
    outcome = Outcome()
    with knobs.compilation.scope(), ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        knobs.compilation.disable_line_info = True  # lines name this machine's folders, and are a third of a binary
        waiting = {pool.submit(build, job, arch): job for job in todo}
        for done, future in enumerate(as_completed(waiting), 1):
            try:
                key, new = future.result()
            except CompileError as error:
                outcome.failures.append((waiting[future], str(error)))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            else:
                outcome.entries[key] = new
            progress(done)
    return outcome


def sources() -> dict[str, dict[str, str]]:
    """For a start to take instead of parsing kernels: digest of the sources -> name -> hash."""
    hashes = {variant.name: fingerprint.kernel_hash(variant) for variant in compiler.variants().values()}
    return {fingerprint.source_digest(): {**hashes, **fingerprint.kernel_hashes()}}


@dataclass(frozen=True)
class Saved:
    """What lies in a file now."""

    binaries: int  #: in all
    kept: int  #: of those, which were there before
    dropped: int  #: made by this Triton from other sources: no call can find them any more
    size: int  #: bytes
    digest: str  #: sha256 of the header


def save(path: Path, outcome: Outcome) -> Saved:
    """Add the binaries to a file. Writers take turns.

    BinariesError: there is a file already that is damaged or not trusted, and what it holds is not to be passed on."""
    today = sources()
    made_here = {hash_ for hashes in today.values() for hash_ in hashes.values()}
    kept: dict[str, New] = {}
    known: dict[str, dict[str, str]] = {}
    dropped = 0
    with binaries.turn(path):
        if path.exists():
            file = File(path)
            for key, entry in file.entries.items():
                if key in outcome.entries:
                    continue
                if (
                    entry.about.get("triton") == precompiled.triton_build()
                    and entry.about.get("source") not in made_here
                ):
                    dropped += 1
                    continue
                kept[key] = New(entry.about, entry.launch, file.cubin(entry))
            still = {new.about["source"] for new in kept.values()}
            known = {digest: hashes for digest, hashes in file.sources.items() if still & set(hashes.values())}
        content = binaries.packed({**kept, **outcome.entries}, {**known, **today})
        digest = binaries.save(path, content)
    return Saved(len(kept) + len(outcome.entries), len(kept), dropped, len(content), digest)
