"""Compile ahead of the first call: the rows that would serve a GPU -> a file of binaries. Needs no GPU.

The dispatcher's own lookup is run for every problem that rows are filed under, and for decoding, so exactly the binaries that
calls load are compiled: none for a row that a faster one hides, and those of the kernels that run before and after.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch

from fa2tune.calling import choosing, varlen_schedules
from fa2tune.calling.schedules import (
    few_blocks_schedule,
    few_tiles,
    forward_schedule,
    fused_schedule,
    in_place_schedule,
    key_splits_schedule,
    one_tile_schedule,
    ordered,
    packed_grouped_schedule,
    packed_schedule,
    packed_splits_schedule,
    query_parts_schedule,
    query_tiles_schedule,
    split_backward_schedule,
    stored_ds_schedule,
    turns_schedule,
)
from fa2tune.compiling import binaries, compiler, debuginfo, fingerprint, operandcheck, overrules, registry
from fa2tune.compiling.binaries import File, New
from fa2tune.compiling.choice import Choice, choice_of
from fa2tune.compiling.compiler import CompileError
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts, key_splits, launch, overlapped, passes, precompiled
from fa2tune.launching.passes import runs
from fa2tune.rows.lookup import SIXTEEN_BIT, Toolchain
from fa2tune.rows.reader import Layer
from fa2tune.rows.row import Row
from fa2tune.spec import maskfile
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.key import TuningKey
from fa2tune.spec.mask import CAUSAL, ROW_MASKS, STACKED, Mask, band
from fa2tune.spec.problem import BACKWARD, BUCKETS, DTYPES, Config, Problem, Specialization
from fa2tune.spec.variant import Variant

OTHER_DRIVER = "other"  #: stands for any that no row was made with

BinaryConfig = tuple[tuple[str, object], ...]
#: One binary: the ``binary_config`` as sorted pairs.
BinaryJob = tuple[Variant, Specialization, BinaryConfig]
#: Called with the number of jobs done.
OnBinary = Callable[[int], None]


@dataclass(frozen=True)
class Wanted:
    """For which calls to compile. All lengths are covered through the buckets. Binaries do not depend on layout, batch and
    number of heads."""

    head_dims: tuple[tuple[int, int], ...] = ()  #: (of Q and K, of V); none: those that rows are filed under
    dtypes: tuple[str, ...] = ()  #: none: as rows are filed, or both of 16 bits where there is none
    #: also for tensors that no descriptor can address: expanded rows, and bases or strides that are no multiples of 16 bytes
    views: bool = False
    windows: bool = False  #: also for sliding windows
    packed: bool = False  #: also for sequences of their own lengths (attention_varlen)
    one_key_head: bool = False  #: also for causal calls of one key head, whose query heads are taken as one


def _keys(gpu: Gpu, layers: Iterable[Layer], wanted: Wanted) -> list[TuningKey]:
    """The keys, as forwards on this GPU, of the problems to look up: those of rows that can serve here, at every length. Head
    dims that were asked for need no rows: default configs serve."""
    filed = {
        (k.dtype, k.precision, k.head_dim, k.head_dim_v, k.mask)
        for k in (row.key for layer in layers for row in layer.rows)
        if k.arch == gpu.arch and k.dtype in (wanted.dtypes or DTYPES)
    }
    if wanted.head_dims:
        kinds = {(dtype, precision, mask) for dtype, precision, _, _, mask in filed}
        kinds = kinds or {(dtype, "ieee", mask) for dtype in wanted.dtypes or SIXTEEN_BIT for mask in ROW_MASKS}
        filed = {(dtype, precision, *dims, mask) for dtype, precision, mask in kinds for dims in wanted.head_dims}
    return [
        TuningKey(gpu.name, gpu.sm_count, gpu.arch, "fwd", *about, bucket)
        for about in sorted(filed)
        for bucket in BUCKETS
    ]


def _problems(key: TuningKey, wanted: Wanted) -> Iterator[Problem]:
    workload = key.workload()
    # of a size that takes this bucket's row (forward_schedule.of_like_work): all buckets together name every row
    windows = [band(key.bucket // 2, 0 if workload.mask == CAUSAL else None)] if wanted.windows else []
    if wanted.one_key_head and workload.mask == CAUSAL:
        yield replace(workload, mask=Mask(STACKED, 8))  # as many heads as there are: an argument of the kernel
    for problem in (replace(workload, mask=mask) for mask in (workload.mask, *windows)):
        yield replace(problem, seqlen_q=1)  # decoding, for which another binary may be better
        for one in [problem, _packed(problem)] if wanted.packed else [problem]:
            yield one
            if wanted.views:
                yield replace(one, tma=False)
                yield replace(one, tma=False, aligned=False)


def _packed(problem: Problem) -> Problem:
    """The same sequences, one after the other, as ``attention_varlen`` describes them."""
    extent = Extent(RAGGED, problem.batch, problem.bucket)
    dtype = next(one for one, name in launch.TORCH_DTYPES.items() if name == problem.dtype)

    def tensor(heads: int, rows: int, dim: int) -> torch.Tensor:
        return torch.empty(1, problem.batch * rows, heads, dim, dtype=dtype, device="meta").transpose(1, 2)

    found = passes.describe(
        tensor(problem.heads_q, problem.seqlen_q, problem.head_dim),
        tensor(problem.heads_kv, problem.seqlen_k, problem.head_dim),
        tensor(problem.heads_kv, problem.seqlen_k, problem.head_dim_v), problem.mask, 1.0, problem.score, extent,
    )  # fmt: skip
    return replace(found, precision=problem.precision)


def _nodes(layers: Sequence[Layer]) -> list[Toolchain]:
    """The toolchains of the nodes: Triton and kernels as here, with every driver that rows name, since a row made with a node's
    driver comes first there. The driver of this host does not matter: it may have none."""
    drivers = sorted({row.driver for layer in layers for row in layer.rows} | {"", OTHER_DRIVER})
    return [replace(choosing.toolchain(), driver=driver) for driver in drivers]


def _choices(
    problem: Problem, gpu: Gpu, layers: Sequence[Layer], node: Toolchain
) -> Iterator[tuple[str, Choice]]:  # fmt: skip
    """(kernel, choice) of everything that a node's dispatcher would choose for a problem, forward and backward; of the forward,
    whose row another batch, heads and lengths may change, by every row that it chooses among."""
    chooser = choosing.Chooser(problem, gpu, layers, node)
    yield "fwd", chooser.choose("fwd")
    yield from (("fwd", one) for one in chooser.among("fwd"))
    for deterministic, in_order in ((False, False), (True, True), (True, False)):
        yield from choosing.choose_backward(chooser, deterministic, in_order)[1].items()


def _by_shape(kernel: str, problem: Problem, choice: Choice, arch: int) -> Iterator[tuple[Variant, Config, Problem]]:
    """What calls that a choice serves may run beside it or in its place: their batch, heads and lengths decide."""
    variant, spec, own = choice.variant, problem.specialization, choice.of_row
    if own is not choice:
        yield from ((*one, problem) for one in runs(kernel, spec, own, arch))
    if (form := ordered.other_form(own)) is not None:
        yield from ((*one, problem) for one in runs(kernel, spec, form, arch))
    if own.config.get("IN_ORDER"):
        return
    others = [*turns_schedule.forms(problem, own, arch)]
    others += [*packed_schedule.forms(problem, own), *fused_schedule.all_forms(problem, own, arch)]
    others += few_blocks_schedule.forms(problem, own, arch)
    others += [*query_parts_schedule.forms(problem, own, arch), *split_backward_schedule.forms(problem, own)]
    for other in others:
        yield from ((*one, problem) for one in runs(kernel, spec, replace(choice, config=other), arch))
    if kernel in group_parts.MAKE_DK_DV and group_parts.can(problem, arch):
        yield from group_parts.helpers(problem, arch)
    if kernel in (overlapped.DQ, passes.ACCUMULATES_DQ):
        yield from one_tile_schedule.all_kernels(problem, arch)
        yield from query_tiles_schedule.all_kernels(problem, arch)
    if kernel == overlapped.DQ:
        yield from split_backward_schedule.all_kernels(problem, choice, arch)
    if kernel == overlapped.DKDV:
        yield from stored_ds_schedule.all_kernels(problem, choice, arch)
    if kernel == "fwd" and arch in key_splits_schedule.MEASURED_ON and not problem.extent.ragged:
        yield from key_splits.all_kernels(problem, arch)
        yield from in_place_schedule.all_kernels(problem, arch)
    if kernel == "fwd" and problem.extent.ragged:
        yield from packed_grouped_schedule.all_kernels(problem, arch)
        yield from packed_splits_schedule.all_kernels(problem, arch)
        yield varlen_schedules.needed(arch)
    # calls of few queries have no pass over all keys
    if forward_schedule.covers(variant) and own.config["RESCALE"] == "never":
        yield from ((*one, problem) for one in runs(kernel, spec, {**own.config, "RESCALE": "lazy"}, arch))
    if forward_schedule.covers(variant):
        few = _for_few_tiles(problem, arch)
        for config in (*few, *forward_schedule.short_forms(problem, own.config, few)):
            yield from ((*one, problem) for one in runs(kernel, spec, config, arch))


def _for_few_tiles(problem: Problem, arch: int) -> Sequence[Config]:
    """Configs that calls of few tiles have in place of a row's."""
    if not problem.extent.ragged:
        return few_tiles.configs(problem.specialization, arch) if fused_schedule.recorded(problem.mask) else []
    packed = packed_schedule.for_few_tiles(problem.specialization, arch)
    return [packed] if packed is not None and packed_schedule.covers_mask(problem) else []


def jobs(gpu: Gpu, layers: Sequence[Layer], wanted: Wanted) -> tuple[list[BinaryJob], int]:
    """Every binary that those calls take, under any driver, and how many keys (dtype, head dims, mask, bucket) they are."""
    found: dict[BinaryJob, None] = {}
    keys, nodes = _keys(gpu, layers, wanted), _nodes(layers)
    for key in keys:
        for problem, node in product(_problems(key, wanted), nodes):
            for kernel, choice in _choices(problem, gpu, layers, node):
                needed = [(*one, problem) for one in runs(kernel, problem.specialization, choice, gpu.arch)]
                needed += _by_shape(kernel, problem, choice, gpu.arch)
                for variant, its_config, posed in needed:
                    binary = compiler.binary_config(variant, its_config)
                    found[variant, posed.specialization, tuple(sorted(binary.items()))] = None
    return list(found), len(keys)


def jobs_of(rows: Iterable[Row]) -> dict[int, list[BinaryJob]]:
    """Compute capability -> every binary that rows were measured with: those of their kernels, and of the kernels that run
    before and after; and those of kernels that calls of few queries, few tiles or few key heads run, which are like the row's
    but for their sizes. A whole backward has none of its own."""
    found: dict[int, dict[BinaryJob, None]] = {}
    for row in rows:
        key, problem = row.key, row.key.workload()
        if key.kernel != BACKWARD:
            choice = choice_of(key.kernel, registry.completed(key.kernel, row.config))
            needed = [(*one, problem) for one in runs(key.kernel, problem.specialization, choice, key.arch)]
            needed += _by_shape(key.kernel, problem, choice, key.arch)
            for variant, config, posed in needed:
                point = tuple(sorted(compiler.binary_config(variant, config).items()))
                found.setdefault(key.arch, {})[variant, posed.specialization, point] = None
    return {arch: list(todo) for arch, todo in found.items()}


def file_rows(rows: Iterable[Row], path: Path, workers: int | None = None) -> tuple[int, list[str]]:
    """Add the machine code of rows that the Triton here has tuned to a file of binaries: (how many it had not held, why others
    are not there). Triton's own cache has them, so little is compiled."""
    filed, failures = 0, list[str]()
    for arch, todo in jobs_of(row for row in rows if row.triton == fingerprint.triton_version()).items():
        if lacking := missing(path, todo, arch):
            outcome = compile_all(lacking, arch, workers)
            failures += [f"{variant.short_name}: {why}" for (variant, _, _), why in outcome.failures]
            if outcome.entries:
                save(path, outcome)
                filed += len(outcome.entries)
    return filed, failures


@dataclass
class CompiledBinaries:
    """Results of the jobs."""

    entries: dict[str, New] = field(default_factory=dict)  #: by key
    failures: list[tuple[BinaryJob, str]] = field(default_factory=list)

    @property
    def kernels(self) -> Counter[str]:
        return Counter(str(new.about["kernel"]) for new in self.entries.values())


def build(job: BinaryJob, arch: int) -> tuple[str, New]:
    """(key, binary) of one job; raises as ``compiler.compile_kernel``."""
    variant, spec, point = job
    config = dict(point)
    image = launch.image_of(operandcheck.compile_kernel(variant, spec, config, arch))
    about, code = precompiled.about(variant, spec, config, arch), precompiled.code_of(variant, spec, config, arch)
    return precompiled.file_key(code, about["triton"]), New(code, about, precompiled.launch_of(image), image.cubin)


def check_host() -> None:
    """RuntimeError: a setting of this process changes what Triton compiles, so keys would be wrong."""
    why = "TRITON_INTERPRET is set" if os.environ.get("TRITON_INTERPRET", "0") == "1" else overrules.found()
    why = why or (None if precompiled.triton_build() else "the build of this Triton is unknown")
    why = why or (f"{debuginfo.VARIABLE} asks for line numbers" if debuginfo.asked_for() else None)
    if why is not None:
        raise RuntimeError(f"binaries for other machines are not compiled while {why}")


def missing(path: Path, todo: Sequence[BinaryJob], arch: int) -> list[BinaryJob]:
    """The jobs whose binaries a file lacks, or has damaged. BinariesError: the file is damaged as a whole, or not trusted."""
    if not path.exists():
        return list(todo)
    file, build = File(path), precompiled.triton_build()
    there = file.entries.keys() - {entry.key for entry in file.damaged()}
    return [
        (variant, spec, point)
        for variant, spec, point in todo
        if precompiled.file_key(precompiled.code_of(variant, spec, dict(point), arch), build) not in there
    ]


def _keep_ctrl_c_from_children() -> None:
    """A terminal sends Ctrl-C to ptxas, too. Its death would make Triton print the whole PTX, and the config a failure. A
    process that this thread starts inherits its signal mask."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def compile_all(
    todo: Sequence[BinaryJob], arch: int, workers: int | None = None, progress: OnBinary = lambda done: None,
    outcome: CompiledBinaries | None = None,
) -> CompiledBinaries:  # fmt: skip
    """On all cores. A config that does not compile is a failure of its own; a fault of the host (a killed ptxas, no memory)
    ends the whole. ``outcome``: takes the results as they come, so that they are there after an exception or Ctrl-C, too.
    RuntimeError: Triton is asked for something here that other nodes would not ask for."""
    check_host()
    outcome = CompiledBinaries() if outcome is None else outcome
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), initializer=_keep_ctrl_c_from_children) as pool:
        waiting = {pool.submit(build, job, arch): job for job in todo}
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                job = waiting.pop(future)
                try:
                    key, new = future.result()
                except CompileError as error:
                    outcome.failures.append((job, str(error)))
                else:
                    outcome.entries[key] = new
                progress(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # those that are under way come to their end
            for future in waiting:
                if not future.cancelled() and future.exception() is None:
                    outcome.entries.update([future.result()])
            raise
    return outcome


def sources() -> dict[str, dict[str, str]]:
    """Digest of the sources -> "kernel mask" -> hash of its source, which saves a process that loads the file from parsing
    kernels."""
    hashes = {
        f"{variant.short_name} {mask}": fingerprint.kernel_hash(variant, mask)
        for variant in registry.variants().values()
        for mask in maskfile.names()
    }
    return {fingerprint.source_digest(): {**hashes, **fingerprint.kernel_hashes()}}


@dataclass(frozen=True)
class Saved:
    """What a file holds after a save."""

    binaries: int  #: in all
    kept: int  #: of those, the ones that were in the file before
    dropped: int  #: made by this Triton from other sources, which no call can find any more, or damaged
    size: int  #: bytes
    digest: str  #: sha256 of the header


def save(path: Path, outcome: CompiledBinaries) -> Saved:
    """Add the binaries to a file. Writers take turns.

    BinariesError: there is a file that is damaged as a whole or not trusted, so its content is not passed on."""
    current = sources()
    made_here = {hash_ for hashes in current.values() for hash_ in hashes.values()}
    kept: dict[str, New] = {}
    known: dict[str, dict[str, str]] = {}
    dropped = 0
    with binaries.turn(path):
        if path.exists():
            file = File(path)
            damaged = {entry.key for entry in file.damaged()}
            for key, entry in file.entries.items():
                if key in damaged:
                    dropped += 1
                    continue
                if key in outcome.entries:
                    continue
                if (
                    entry.about.get("triton") == precompiled.triton_build()
                    and entry.about.get("source") not in made_here
                ):
                    dropped += 1
                    continue
                kept[key] = New(entry.code, entry.about, entry.launch, file.cubin(entry))
            still = {new.about["source"] for new in kept.values()}
            known = {digest: hashes for digest, hashes in file.sources.items() if still & set(hashes.values())}
        content = binaries.file_bytes({**kept, **outcome.entries}, {**known, **current})
        digest = binaries.save(path, content)
    return Saved(len(kept) + len(outcome.entries), len(kept), dropped, len(content), digest)
