"""Times what may serve forwards of drawn calls that were behind a peer: tiles, RESCALE, tile orders, shared tiles, split keys.

    python benchmarks/dense_forwards.py RECORD... --compile                                  # first: every binary; no GPU
    python benchmarks/dense_forwards.py RECORD... --out dense_forwards.json [--seconds 300]  # resumes from the file
    python benchmarks/dense_forwards.py RECORD... --wide --out dense_forwards_wide.json      # tiles of head dims above 128
    python benchmarks/dense_forwards.py RECORD... --every 1 --splits --out dense_forwards_splits.json  # keys in parts
    python benchmarks/dense_forwards.py --drawn HASH --shares --out forward_shares.json  # equal shares of key blocks
    python benchmarks/dense_forwards.py --grid 256 --out dense_forwards_grid.json            # calls of 16k tokens, hidden 2048
    python benchmarks/dense_forwards.py --call "1 16 16 4096 4096 192 128 causal" --out forward_apart.json   # one call or more
    python benchmarks/dense_forwards.py --drawn HASH --near 0.1 --out dense_forwards_near.json  # 100 calls of their own
    python benchmarks/dense_forwards.py --table dense_forwards.json                         # a file, as text

RECORD: drawings of benchmarks/random_calls.py (benchmarks/calls/random_calls_6.json.gz). Of their forwards, those below
BEHIND of a peer, and with --dim those of a head dim. Candidates are what serves and the row's config in its place; one config
for each tile of few_tiles.PACES, "lazy" and, of LONG keys, "never"; a third stage; the estimated best tiles of several heads,
of each size; tiles with all keys; blocks of 80 keys; the estimated best split of keys where queries are few, and the Hopper
one where tiles are. With --wide: of calls with V in parts above 128, 128 x 64 tiles with and without turns and Q in
registers, with a third stage where O has room of its own, which the search space leaves out, and 128 x 128 with V in halves.
With --splits: of calls of few tiles and SPLIT_KEYS keys or more, forms of the Hopper kernel that splits keys.
With --shares: of calls for which they are expected to take up to SHARES_NEAR of the time of the best tiles, equal shares of key
blocks, in turn and not.
With --drawn: forwards that benchmarks/random_calls.py draws by that seed. With --call: batch, heads of queries and of keys,
lengths of queries and of keys, head dims of Q and of V, mask; of these also all forms of few_tiles.configs, and shares.
With --near: of forms whose time is estimated, those that are expected to be as fast as the fastest, or slower by that share
at most, and each without NUMBERED, too.
Each result is compared with float32 arithmetic; a wrong one is not timed, and said. Each candidate is a CUDA graph; replays
are interleaved; the file holds medians of seven bursts in microseconds a call, and what was recorded. Needs a GPU of compute
capability 9.0.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ahead
import click
import few_queries
import merged_heads
import random_calls
import side_by_side
import torch
import workloads
from dense_backwards import posed
from launch_choices import race

from fa2tune import gpus
from fa2tune.calling import choosing, dispatch
from fa2tune.calling.kinds import WARP_SPECIALIZED_ROWS
from fa2tune.calling.schedules import few_keys_schedule, few_tiles, key_splits_schedule, shares_schedule
from fa2tune.compiling import compiler
from fa2tune.compiling.registry import variant_named
from fa2tune.fleet.precompile import BinaryJob
from fa2tune.gpus import Gpu
from fa2tune.launching import key_splits, passes
from fa2tune.search_spaces.lib.hopper_key_parts import MOST_IN_TURN
from fa2tune.search_spaces.sm90 import fwd_split
from fa2tune.search_spaces.sm90.fwd import in_v_halves, of_tiles, third_stage
from fa2tune.spec.mask import CAUSAL, FULL, ROW_MASKS
from fa2tune.spec.problem import Config, Problem, head_dim_parts
from fa2tune.spec.roles import FWD_80_KEYS
from fa2tune.spec.score import NONE

BEHIND = 1.0
BURST_MS = 3.0
SHOWN, MOST_SHARED, FEW_QUERIES = 5, 4, 128
SPLIT_KEYS = 600
SHARES_NEAR = 1.05
LONG = 512  #: from so many keys on forms are tried with RESCALE "never", too
#: What is named of a config.
NAMED = ("BLOCK_M", "BLOCK_N", "Q_STAGES", "STAGES", "RESCALE", "IN_PARTS", "HEADS_PER_WAVE", "maxnreg", "O_THROUGH")
YES_NO = {"PINGPONG": "in turn", "Q_IN_REGISTERS": "Q kept", "NUMBERED": "numbered", "V_HALVES": "V in halves"}


def is_wide(problem: Problem) -> bool:
    """Whether O takes two parts of a tile, the first of 128 columns."""
    return problem.head_dim_v > 128 and head_dim_parts(problem.head_dim_v)[1] > 0


def calls(
    records: tuple[Path, ...], every: int | None, wide: bool = False, dims: tuple[int, ...] = (), unmasked: int = 0
) -> dict[str, tuple[Problem, Mapping[str, float]]]:
    """Name -> (call, recorded microseconds), of the forwards behind a peer, or of every so many-th; of these head dims; with
    ``unmasked``, without a mask and of so many keys or more."""
    found = dict[str, tuple[Problem, Mapping[str, float]]]()
    for path in records:
        record = json.loads(gzip.decompress(path.read_bytes()))
        runs = record.get("runs", [record])
        for place, (name, call) in enumerate(pair for run in runs for pair in run["calls"].items()):
            run = call.get("fwd", {})
            taken = run.get("ratio", 1.0) < BEHIND if every is None else place % every == 0
            taken &= not dims or call["head_dim"] in dims
            taken &= not unmasked or (posed(call).mask == FULL and posed(call).seqlen_k >= unmasked)
            if "us" in run and taken and (is_wide(posed(call)) or not wide):
                found[f"{path.name.split('.')[0].removeprefix('random_calls')} {place} {name}"] = posed(call), run["us"]
    return found


def of_row_masks(
    records: Sequence[Path], taken: Callable[[Problem, Mapping[str, float]], bool]
) -> dict[str, tuple[Problem, Mapping[str, float]]]:
    """Name -> (call, recorded microseconds), of forwards without a mask or under a causal one, those that are ``taken``."""
    found = dict[str, tuple[Problem, Mapping[str, float]]]()
    for call in merged_heads.read(records):
        us = call.get("fwd", {}).get("us")
        if us and call["mask"] in ROW_MASKS and taken(problem := posed(call), us):
            found[workloads.described(problem)] = problem, us
    return found


def grid(dims: tuple[int, ...]) -> dict[str, tuple[Problem, Mapping[str, float]]]:
    """Calls of 16k tokens, hidden size 2048, without a mask."""
    tokens, found = 16384, {}
    for dim, length in product(dims, (1024, 2048, 4096, 8192, 16384)):
        heads = 2048 // dim
        found[f"grid {dim} {length}"] = (
            Problem("bf16", tokens // length, heads, heads, length, length, dim, dim, FULL),
            dict[str, float](),
        )
    return found


def drawn(seeds: tuple[str, ...], dims: tuple[int, ...] = ()) -> dict[str, tuple[Problem, Mapping[str, float]]]:
    """Forwards that benchmarks/random_calls.py draws; with ``dims``, of these head dims."""
    return {
        f"{seed} {name}": (problem, dict[str, float]())
        for seed in seeds
        for name, problem in random_calls.drawn(seed).items()
        if not dims or problem.head_dim in dims
    }


def named(texts: tuple[str, ...]) -> dict[str, tuple[Problem, Mapping[str, float]]]:
    """Calls as --call has them. UsageError: a text is none."""
    found = dict[str, tuple[Problem, Mapping[str, float]]]()
    for text in texts:
        *numbers, mask = text.split()
        if len(numbers) != 7 or not all(one.isdigit() for one in numbers) or mask not in ("full", "causal"):
            raise click.UsageError(f"--call: got {text!r}, must be seven numbers and full or causal")
        found[text] = Problem("bf16", *map(int, numbers), CAUSAL if mask == "causal" else FULL), dict[str, float]()
    return found


def every_form(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """As ``candidates``, with --call."""
    made = [*few_tiles.configs(problem.specialization, gpu.arch)]
    made += [config for config, _left in shares_schedule.candidates(problem, gpu)]
    return candidates(problem, gpu) | {label(one): one for one in made}


def label(config: Config) -> str:
    if few_queries.in_place(config):
        return few_queries.label(config)
    said = [f"{config[name]}" for name in NAMED if name in config]
    return " ".join(said + [word for name, word in YES_NO.items() if config.get(name)])


def wide_candidates(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """As ``candidates``, with --wide."""
    row = choosing.choose(problem, "fwd", gpu, WARP_SPECIALIZED_ROWS).config
    usual = {**of_tiles(problem.specialization, 128, 64, 0), "HEADS_PER_WAVE": row["HEADS_PER_WAVE"]}
    made = [
        row,
        *({**usual, "PINGPONG": turns, "Q_IN_REGISTERS": kept} for turns, kept in product((True, False), repeat=2)),
    ]
    third = {**usual, "STAGES": 3, "O_THROUGH": "q"}
    if usual["STAGES"] == 2 and problem.head_dim == problem.head_dim_v:  # O has the shape of Q
        made += [third, {**third, "PINGPONG": False}, {**third, "PINGPONG": False, "Q_IN_REGISTERS": False}]
    if halves := in_v_halves(problem.specialization):
        made += [halves, {**halves, "PINGPONG": False}, {**halves, "RESCALE": "never"}]
    if row.get("DIVISORS"):
        made = [{**one, "DIVISORS": True} for one in made]
    return {label(one): one for one in made}


def of_80_keys(problem: Problem, arch: int) -> list[Config]:
    """Blocks of 80 keys, in turn and not."""
    if (space := key_splits.space_of(problem, arch, FWD_80_KEYS)) is None:
        return []
    return [{**space.config_of(problem.specialization), "PINGPONG": turns} for turns in (False, True)]


def may_split(problem: Problem, gpu: Gpu) -> bool:
    """Whether forms of the Hopper kernel that splits keys are tried with --splits: tiles of head dims above 128 are few."""
    tiles = problem.query_tiles(128) * problem.heads_q
    alike = problem.mask == FULL or problem.seqlen_k >= key_splits_schedule.HOPPER_KEYS * problem.seqlen_q
    turns = key_splits_schedule.HOPPER_TURNS if alike else 1
    wide = 128 < max(problem.head_dim, problem.head_dim_v) <= MOST_IN_TURN
    few = tiles <= turns * gpu.sm_count and problem.seqlen_k >= SPLIT_KEYS
    return wide and few and key_splits_schedule.hopper_best(problem, gpu) is not None


def split_candidates(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """As ``candidates``, with --splits: the row's form of the tuned kernel and the best one, and splits into as many parts as
    are expected to be best, and as there are programs for at once: in turn, and with Q in shared memory and no turns."""
    spec = problem.specialization
    whole, found = few_tiles.best(problem, gpu.arch, gpu.sm_count), key_splits_schedule.hopper_best(problem, gpu)
    made = [choosing.choose(problem, "fwd", gpu, WARP_SPECIALIZED_ROWS).config, *([whole[1]] if whole else [])]
    assert found is not None  # may_split
    tiles = problem.query_tiles(128) * problem.heads_q
    for parts in dict.fromkeys((found[1]["SPLITS"], max(2, gpu.sm_count // tiles))):
        usual = dict(fwd_split.config_of(spec, 128, parts))
        made += [usual, {**usual, "PINGPONG": False, "NUMBERED": False, "Q_IN_REGISTERS": False}]
    made += [found[1]]
    return {label(one): one for one in made}


def may_share(problem: Problem, gpu: Gpu) -> bool:
    """Whether equal shares are tried with --shares."""
    shares, whole = shares_schedule.best(problem, gpu), few_tiles.best(problem, gpu.arch, gpu.sm_count)
    return shares is not None and whole is not None and shares[0] <= SHARES_NEAR * whole[0]


def shares_candidates(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """As ``candidates``, with --shares: the row's form of the tuned kernel and the best one, the best split, and shares behind
    each number of whole rounds."""
    whole, split = few_tiles.best(problem, gpu.arch, gpu.sm_count), key_splits_schedule.hopper_best(problem, gpu)
    made = [choosing.choose(problem, "fwd", gpu, WARP_SPECIALIZED_ROWS).config]
    made += [found[1] for found in (whole, split) if found]
    for usual, _left in shares_schedule.candidates(problem, gpu):
        made += [{**usual, "PINGPONG": turns} for turns in (True, False)]
    return {label(one): one for one in made}


def near(problem: Problem, gpu: Gpu, configs: Mapping[str, Config], share: float) -> dict[str, Config]:
    """Those of the Hopper forward that are estimated to be no slower than the fastest by more than a share, with and without
    NUMBERED, and all others."""
    times = {
        name: few_tiles.expected_us(problem, config, gpu.sm_count)
        if "maxnreg" in config and "BLOCK_N" in config
        else None
        for name, config in configs.items()
        if not few_queries.in_place(config)
    }
    known = [time for time in times.values() if time is not None]
    most = min(known, default=0.0) * (1 + share)
    found = [config for name, config in configs.items() if (times.get(name) or 0.0) <= most]
    tuned = [config for config in found if config.get("NUMBERED") and not few_queries.in_place(config)]
    return {label(one): one for one in [*found, *({**config, "NUMBERED": False} for config in tuned)]}


def candidates(
    problem: Problem,
    gpu: Gpu,
    wide: bool = False,
    share: float | None = None,
    splits: bool = False,
    shares: bool = False,
) -> dict[str, Config]:
    """Name -> config; the first is the row's, where ``share`` is None."""
    if wide:
        return wide_candidates(problem, gpu)
    if splits:
        return split_candidates(problem, gpu)
    if shares:
        return shares_candidates(problem, gpu)
    if share is not None:
        return near(problem, gpu, candidates(problem, gpu), share)
    spec, space = problem.specialization, variant_named("sm90/fwd").space
    row = choosing.choose(problem, "fwd", gpu, WARP_SPECIALIZED_ROWS)
    made = [row.config, *(of_tiles(spec, *form) for form in few_tiles.PACES)]
    made += [third for config in made[1:] if (third := third_stage(spec, config)) is not None]
    made += [dict(row.otherwise)] if row.otherwise is not None else []
    if problem.seqlen_k >= LONG:
        made += [{**config, "RESCALE": "never"} for config in made if "RESCALE" in config]
    if "RESCALE" in row.config:
        made.append({**row.config, "RESCALE": "lazy"})
    made = [one for one in made if one is row.config or space.broken(one, spec, gpu.arch) is None]
    if row.config.get("DIVISORS"):
        made = [{**one, "DIVISORS": True} for one in made]
    made += few_queries.grouped_tiles(problem, gpu)[:MOST_SHARED] if problem.group > 1 else []
    made += few_keys_schedule.candidates(problem, gpu.arch) if few_keys_schedule.asked(problem, gpu) else []
    made += of_80_keys(problem, gpu.arch)
    if problem.seqlen_q <= FEW_QUERIES:
        made.append(key_splits_schedule.best(problem, gpu)[1])
    if problem.query_tiles(128) * problem.heads_q <= 2 * gpu.sm_count:
        hopper = key_splits_schedule.hopper_best(problem, gpu)
        made += [hopper[1]] if hopper else []
    return {label(one): one for one in made}


def launched(problem: Problem, gpu: Gpu, configs: Iterable[Config]) -> Iterator[BinaryJob]:
    """The binaries of the candidates."""
    for config in configs:
        if few_queries.in_place(config):
            kernels = [(v, c, its.specialization) for v, c, its in key_splits.kernels(problem, config, gpu.arch)]
        else:
            kernels = [
                (v, c, problem.specialization) for v, c in passes.runs("fwd", problem.specialization, config, gpu.arch)
            ]
        for variant, one, spec in kernels:
            yield variant, spec, tuple(sorted(compiler.binary_config(variant, one).items()))


def measured(
    problem: Problem, configs: Callable[[Problem], Mapping[str, Config]]
) -> tuple[dict[str, float], dict[str, str]]:
    """Candidate -> microseconds, what serves is the first; and candidate -> what is wrong with it. ``configs``: what candidates
    there are, by name, of the call as tensors pose it."""
    q, k, v = (
        torch.randn(problem.batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
        for length, heads, dim in (
            (problem.seqlen_q, problem.heads_q, problem.head_dim),
            (problem.seqlen_k, problem.heads_kv, problem.head_dim),
            (problem.seqlen_k, problem.heads_kv, problem.head_dim_v),
        )
    )
    do = torch.ones(1, device="cuda", dtype=torch.bfloat16).expand(
        problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v
    )
    want = workloads.expected(problem, q, k, v, do)
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    scale = problem.head_dim**-0.5
    ours = passes.describe(q, k, v, problem.mask, scale)
    plans: dict[str, Any] = {"served": partial(dispatch.forward, mask=problem.mask, softmax_scale=scale, score=NONE)}
    for name, config in configs(ours).items():
        kind = key_splits.SplitPlan if few_queries.in_place(config) else passes.ForwardPlan
        with contextlib.suppress(compiler.CompileError):
            plans[name] = kind(ours, q, k, v, scale, config)
    wrong = {}
    for name, plan in plans.items():
        torch.use_deterministic_algorithms(True)  # what is allocated is filled with NaN
        o = plan(q, k, v)[0].transpose(1, 2)
        torch.use_deterministic_algorithms(False)
        if (why := workloads.wrong({"o": o}, want, problem.group)) is not None:
            click.echo(f"WRONG: {workloads.described(problem)}, {name}: {why}")
            wrong[name] = why
    right = {name: partial(plan, q, k, v) for name, plan in plans.items() if name not in wrong}
    times = race(list(right.values()), torch.cuda.Stream(), BURST_MS)
    return dict(zip(right, (round(us, 2) for us in times), strict=True)), wrong


def compared(
    pair: tuple[Problem, Mapping[str, float]], configs: Callable[[Problem], Mapping[str, Config]]
) -> dict[str, Any]:
    """What a file holds of (call, recorded microseconds)."""
    problem, us = pair
    times, wrong = measured(problem, configs)
    return {"call": workloads.described(problem), "us": times, "wrong": wrong, "when drawn": us}


def drawn_options(command: Callable[..., None]) -> Callable[..., None]:
    """--drawn and --call of a script that times drawn calls, and ``side_by_side.timing_options``."""
    command = click.option("--call", "texts", multiple=True, help='This call: "1 16 16 4096 4096 192 128 causal".')(
        side_by_side.timing_options(command)
    )
    return click.option("--drawn", "seeds", multiple=True, help="Calls drawn by this seed.")(command)


def time_drawn(
    wanted: Callable[[Problem], bool], measure: Callable[[Problem], dict[str, Any]],
    line: Callable[[str, Mapping[str, Any]], str],
    seeds: tuple[str, ...], texts: tuple[str, ...], share: slice, seconds: float, out: Path | None, shown: Path | None,
) -> None:  # fmt: skip
    """Times drawn calls, those that are wanted, and those of --call; or prints a file. By the options of ``drawn_options``."""
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})
    asked = {name: problem for name, (problem, _) in named(texts).items()}
    asked |= {name: problem for name, (problem, _) in drawn(seeds).items() if wanted(problem)}
    side_by_side.fill(record, side_by_side.in_share(asked, share), measure, seconds, out, line)


def line(name: str, call: Mapping[str, Any]) -> str:
    ordered = sorted((us, which) for which, us in call["us"].items() if which != "served")
    best = "; ".join(f"{which}: {us}" for us, which in ordered[:SHOWN])
    return f"{name}, {call['call']}: served {call['us']['served']}, {best}; when drawn {call['when drawn']}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.argument("records", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@click.option("--every", type=int, help="Every so many-th call, behind a peer or not.")
@click.option("--dim", "dims", type=int, multiple=True, help="Only calls of this head dim.")
@click.option("--grid", "grids", type=int, multiple=True, help="Calls of the grid, of this head dim, without a mask.")
@click.option("--unmasked", type=int, default=0, help="Only calls without a mask, of so many keys or more.")
@click.option("--splits", is_flag=True, help="Only calls of few tiles, in forms of the kernel that splits keys.")
@click.option(
    "--shares", is_flag=True, help="Only calls for which equal shares of key blocks may be faster, and those."
)
@click.option("--drawn", "seeds", multiple=True, help="Forwards that benchmarks/random_calls.py draws by this seed.")
@click.option("--call", "texts", multiple=True, help='This call: "1 16 16 4096 4096 192 128 causal".')
@click.option("--near", "near_by", type=float, help="Leave out forms that are expected to take longer by this share.")
@click.option("--wide", is_flag=True, help="Only calls of head dims in parts above 128, in forms of 128 x 64 tiles.")
@click.option(
    "--compile", "compiled", is_flag=True, help="Compile what would be timed on an H200, on all cores; no GPU."
)
@side_by_side.timing_options
def main(records: tuple[Path, ...], listed: bool, every: int | None, dims: tuple[int, ...], grids: tuple[int, ...],
         unmasked: int, seeds: tuple[str, ...], texts: tuple[str, ...], near_by: float | None, splits: bool, shares: bool,
         wide: bool, compiled: bool, share: slice, seconds: float, out: Path | None, shown: Path | None) -> None:  # fmt: skip
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    if (near_by is not None) + splits + shares + wide + bool(texts) > 1:
        raise click.UsageError(
            "--near, --splits, --shares, --wide, --call: each has forms of its own; got more than one of them"
        )
    wanted = dict(
        list((calls(records, every, wide, dims, unmasked) | grid(grids) | drawn(seeds, dims) | named(texts)).items())[
            share
        ]
    )
    forms_of: Callable[..., dict[str, Config]] = (
        every_form if texts else partial(candidates, wide=wide, share=near_by, splits=splits, shares=shares)
    )
    if splits:
        wanted = {name: one for name, one in wanted.items() if may_split(one[0], gpus.named("h200"))}
    if shares:
        wanted = {name: one for name, one in wanted.items() if may_share(one[0], gpus.named("h200"))}
    if listed:
        for name, (problem, _) in wanted.items():
            forms = forms_of(problem, gpus.named("h200"))
            click.echo(f"{name}: {workloads.described(problem)}: {'; '.join(forms)}")
        return
    if compiled:
        gpu = gpus.named("h200")
        jobs = (
            job for problem, _ in wanted.values() for job in launched(problem, gpu, forms_of(problem, gpu).values())
        )
        ahead.compile_all(jobs, gpu)
        return
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})

    one = partial(compared, configs=lambda problem: forms_of(problem, gpu=dispatch.gpu_of(0)))
    side_by_side.fill(record, wanted, one, seconds, out, line)


if __name__ == "__main__":
    main()
