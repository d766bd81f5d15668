"""Times what may serve the backward of a dense call: forms of the fused kernel, parts of query groups, split kernels at a time.

    python benchmarks/ahead.py benchmarks/dense_backwards.py                         # first: every binary, on all cores; no GPU
    python benchmarks/dense_backwards.py --out dense_backwards.json [--seconds 300]  # resumes from the file
    python benchmarks/dense_backwards.py --list                                      # what would be timed; no GPU
    python benchmarks/dense_backwards.py --table dense_backwards.json                # a file, as text
    python benchmarks/dense_backwards.py --split                                     # both split kernels at a time, predicted
    python benchmarks/dense_backwards.py --keys --out dq_parts.json                  # keys of dQ in parts (also with --list)
    python benchmarks/dense_backwards.py --keys --table dq_parts.json --page docs/experiments/few-queries.md
    python benchmarks/dense_backwards.py --forms apart --out v_apart.json            # apart, stored, turns, grouped, alone

The calls: of benchmarks/calls/random_calls.json.gz those that were behind a peer, those that are served otherwise since, and
every eighth of the others. Fused: the row's config, alone on the GPU ("apart"), with dQ finished after, in half blocks (64
columns; also with rows prepared and dQ finished beside), each in the number of parts that is chosen for it, and the choice in
neighbouring numbers of parts. Split: one kernel after the other, and both at a time in each order. --keys: of KEY_CALLS what
serves with whole keys, and keys of dQ in parts, in the order chosen for each number of parts, and one kernel after the other.
--forms, each next to what serves: apart (V_APART of the fused kernel, and padded), stored (dS in memory, and split kernels),
turns (dQ summed in a fixed order by the fused kernel, and by split kernels, as deterministic calls ask for), grouped (parts
of groups under a causal mask, as the row has it and alone on the GPU; with --list, estimates), alone (head dims in parts, the
same without parts of groups). The calls are those of backward_calls.py.

Each result is compared with float32 arithmetic; a wrong one is an error. Each candidate is a CUDA graph; replays are
interleaved; the file holds medians of seven bursts in microseconds a call, and what was recorded. Needs a GPU of compute
capability 9.0.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import marked
import side_by_side
import torch
import workloads
from backward_calls import ALONE_CALLS, APART_CALLS, GROUPED_CALLS, KEY_CALLS, STORED_CALLS, TURN_CALLS
from launch_choices import race

from fa2tune import gpus
from fa2tune.calling import backward_plans, choosing, dispatch
from fa2tune.calling.schedules import (
    bands_schedule,
    few_blocks_schedule,
    fused_schedule,
    group_parts_schedule,
    query_parts_schedule,
    split_backward_schedule,
    stored_ds_schedule,
    turns_schedule,
)
from fa2tune.compiling.choice import Choice
from fa2tune.gpus import Gpu
from fa2tune.launching import group_parts, overlapped, passes, stored_ds
from fa2tune.search_spaces.sm90 import bwd_dkdv_ds, bwd_fused
from fa2tune.spec.mask import row_mask_named
from fa2tune.spec.problem import STRATEGIES, Config, Problem
from fa2tune.spec.roles import BWD_STORED_DS

RECORD = Path(__file__).parent / "calls/random_calls.json.gz"
FUSED_KERNEL, SPLIT_KERNEL = "bwd_fused", "bwd_dkdv"
EVERY = 8
LEVEL = 0.99
WHOLE = "keys whole"
BURST_MS = 4.0
#: Of a call, with turns.
MOST_FORMS = 7

#: Kernel -> its choice and the parts of its groups.
Candidate = Mapping[str, tuple[Choice, int]]
#: That, and in which order both kernels of a split backward run at a time; "": one after the other.
Ordered = tuple[Candidate, str]


#: Of a recorded call, what Problem takes after its dtype.
SHAPE = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


def shape_of(problem: Problem) -> dict[str, Any]:
    """What a file says of a call."""
    return {**{name: getattr(problem, name) for name in ("dtype", *SHAPE)}, "mask": problem.mask.name}


def posed(call: Mapping[str, Any]) -> Problem:
    """The call of which it was said."""
    return Problem(call["dtype"], *(call[name] for name in SHAPE), row_mask_named(call["mask"]))


def recorded(drawing: Path | None = None) -> dict[str, tuple[Problem, Mapping[str, Any]]]:
    """Name -> (call, what was recorded of its backward), of all drawings, or of one in a file; without those that were wrong
    then, and those whose first queries were filled in."""
    found = {}
    record = json.loads(gzip.decompress((drawing or RECORD).read_bytes()))
    for place, run in enumerate([record] if drawing else record["runs"]):
        for name, call in run["calls"].items():
            if "served" in call.get("bwd", {}) and not call["bwd"]["served"].get("filled in"):
                found[f"{'abc'[place]} {name}"] = posed(call), call["bwd"]
    return found


#: A call, its choices and what was recorded of it -> whether it is taken.
Wanted = Callable[[Problem, Mapping[str, Choice], Mapping[str, Any]], bool]


def drawn(records: Sequence[Path], gpu: Gpu, wanted: Wanted) -> dict[str, Problem]:
    """Name -> call, of drawings in files, of those whose choices are wanted."""
    found = {}
    for path in records:
        for problem, call in recorded(path).values():
            if wanted(problem, choosing.choose_backward(choosing.Chooser(problem, gpu), False)[1], call):
                found[workloads.described(problem)] = problem
    return found


def _parts(call: Mapping[str, Any], kernel: str) -> int | None:
    """Of a kernel's groups, as served when it was recorded."""
    served = call["served"]
    found = served.get("parts", served.get("kernels", {}).get(kernel, {}).get("parts"))
    return None if found is None else int(found)


def _late(choice: Choice) -> Choice:
    """Without EARLY_START."""
    own, config = choice.otherwise, {**choice.config, "EARLY_START": False}
    if config == choice.config or "EARLY_START" not in choice.config:
        return choice
    return replace(choice, config=config, otherwise=None if own is None or dict(own) == config else own)


def whole_blocks() -> AbstractContextManager[Any]:
    """In which no call has query blocks in parts, which are query_parts.py's."""
    return mock.patch.object(query_parts_schedule, "with_parts", lambda _problem, choice, _gpu: choice)


@contextmanager
def rows_loops() -> Iterator[None]:
    """In which each call has the bands and the order of products of its row; others are raced by band_backwards.py."""

    def same(_problem: Problem, choice: Choice, _gpu: Gpu) -> Choice:
        return choice

    in_bands, in_step = (
        mock.patch.object(bands_schedule, "in_bands", same),
        mock.patch.object(few_blocks_schedule, "in_step", same),
    )
    with in_bands, in_step:
        yield


def chosen(problem: Problem, gpu: Gpu) -> Candidate:
    with whole_blocks(), rows_loops():
        _, choices = choosing.choose_backward(choosing.Chooser(problem, gpu), False)
    late = {name: _late(one) for name, one in choices.items()}
    return {name: (one, group_parts_schedule.parts_of(problem, name, one, gpu)) for name, one in late.items()}


def todo(gpu: Gpu, drawing: Path | None = None) -> dict[str, tuple[Problem, Mapping[str, Any]]]:
    """Those of ``recorded`` that are timed."""
    found, others = {}, 0
    for name, (problem, call) in recorded(drawing).items():
        now = chosen(problem, gpu)
        kernel = FUSED_KERNEL if FUSED_KERNEL in now else SPLIT_KERNEL
        changed = now[kernel][0].otherwise is not None or now[kernel][1] != _parts(call, kernel)
        changed |= order_of(problem, now, gpu) != call["served"].get("order", "")
        others += not changed and call["ratio"] >= LEVEL
        if changed or call["ratio"] < LEVEL or others % EVERY == 1:
            found[name] = problem, call
    return found


def _fused(problem: Problem, choice: Choice, gpu: Gpu) -> Iterator[tuple[str, Choice]]:
    """Forms."""
    own = choice.of_row
    yield "row", own
    config = own.config
    if config["FINISH_BESIDE"]:
        yield "dQ finished after", replace(own, config={**config, "FINISH_BESIDE": False})
    if config["BESIDE"]:
        yield "apart", replace(own, config=fused_schedule.apart(config))
    for form, _ in fused_schedule.forms(problem, own, gpu.arch):
        if form["BLOCK_M"] != config["BLOCK_M"]:
            yield "half blocks", replace(own, config=form)
            yield "half blocks, beside", replace(own, config={**form, "BESIDE": True, "FINISH_BESIDE": True})


def order_of(problem: Problem, candidate: Candidate, gpu: Gpu) -> str:
    """That is chosen for it."""
    choices = {kernel: choice for kernel, (choice, _) in candidate.items()}
    return split_backward_schedule.order_of(
        problem, choices, {name: parts for name, (_, parts) in candidate.items()}, gpu
    )


def candidates(problem: Problem, gpu: Gpu) -> dict[str, Ordered]:
    """Name -> candidate; the choice is marked."""
    now, found = chosen(problem, gpu), dict[str, Ordered]()
    kernel, counts = (FUSED_KERNEL if FUSED_KERNEL in now else SPLIT_KERNEL), group_parts.allowed(problem)
    order = order_of(problem, now, gpu)
    if kernel == FUSED_KERNEL:
        for name, choice in _fused(problem, now[kernel][0], gpu):
            found[name] = {kernel: (choice, group_parts_schedule.parts_of(problem, kernel, choice, gpu))}, ""
    else:
        found["row"] = now, ""
        if split_backward_schedule.covers(problem, {name: choice for name, (choice, _) in now.items()}):
            few = split_backward_schedule.at_once(problem, now["bwd_dq"][0], gpu)
            orders = overlapped.ORDERS if few else (overlapped.DQ_FIRST, overlapped.DKDV_FIRST)
            found |= {f"at a time, {one}": (now, one) for one in orders}
    choice, parts = now[kernel]
    at = counts.index(parts)
    for other in {counts[max(at - 1, 0)], counts[min(at + 1, len(counts) - 1)]} - {parts}:
        found[f"chosen, {other} parts"] = {**now, kernel: (choice, other)}, order
    same = next(name for name, (one, its) in found.items() if its == order and _alike(one, now))
    return {f"{name}, chosen" if name == same else name: one for name, one in found.items()}


def key_parts(problem: Problem, candidate: Candidate, gpu: Gpu) -> int:
    """That are chosen for it."""
    choices = {kernel: choice for kernel, (choice, _) in candidate.items()}
    counts = {kernel: parts for kernel, (_, parts) in candidate.items()}
    return split_backward_schedule.key_parts(problem, choices, counts, gpu)


def key_candidates(problem: Problem, gpu: Gpu) -> dict[str, Ordered]:
    """Keys of dQ in parts, beside what serves without; the number of parts that is chosen is marked."""
    now = chosen(problem, gpu)
    choices, best = {kernel: choice for kernel, (choice, _) in now.items()}, key_parts(problem, now, gpu)
    found: dict[str, Ordered] = {WHOLE: (now, order_of(problem, now, gpu))}
    for parts in sorted({max(2, best // 2), max(2, best), max(4, 2 * best)}):
        split = {**now, "bwd_dq": (choices["bwd_dq"], parts)}
        name = f"{parts} parts" + (", chosen" if parts == best else "")
        for order in dict.fromkeys((order_of(problem, split, gpu), "")):
            found[f"{name}, {order or 'one after the other'}"] = split, order
    return found


# ---- forms, each next to what serves


def split(problem: Problem, gpu: Gpu) -> Ordered:
    """What a strategy's kernels are: with keys of dQ in parts, in their order, and started early, where that is chosen."""
    _, choices = choosing.choose_backward(choosing.Chooser(problem, gpu), False)
    divided = backward_plans.division(problem, choices, gpu)
    return {name: (one, divided.parts.get(name, 1)) for name, one in choices.items()}, divided.order


def served(problem: Problem, gpu: Gpu) -> Ordered:
    """What serves: those, or dS in memory."""
    _, choices = choosing.choose_backward(choosing.Chooser(problem, gpu), False)
    whole, _ = backward_plans.whole(problem, choices, backward_plans.division(problem, choices, gpu), gpu)
    if whole is None or whole.role != BWD_STORED_DS:
        return split(problem, gpu)
    return {FUSED_KERNEL: (Choice(stored_ds.kernel(problem, gpu.arch), whole.config), 1)}, ""


def _fused_form(problem: Problem, choice: Choice, gpu: Gpu, **changes: Any) -> Ordered | None:
    """A choice's config with changes; None: the search space has no such config."""
    found = replace(choice, config={**choice.config, **changes}, otherwise=choice.config)
    if found.variant.space.broken(found.config, problem.specialization, gpu.arch) is not None:
        return None
    return {FUSED_KERNEL: (found, group_parts_schedule.parts_of(problem, FUSED_KERNEL, found, gpu))}, ""


def apart_candidates(problem: Problem, gpu: Gpu) -> dict[str, Ordered]:
    """V and dO in parts of their own, and padded, as the row has it and alone on the GPU."""
    found = {"served": served(problem, gpu)}
    own = found["served"][0][FUSED_KERNEL][0].of_row
    assert own.row is not None
    plain = {"IN_PARTS": False, "V_APART": False, "NARROW": False}
    padded = replace(own, config={**bwd_fused.SPACE.completed(own.row.config), **plain})
    apart = replace(own, config=bwd_fused.with_v_apart(padded.config))
    made = {
        "V apart": _fused_form(problem, apart, gpu),
        "early": _fused_form(problem, apart, gpu, EARLY_START=True),
        "heads 1": _fused_form(problem, apart, gpu, HEADS_PER_WAVE=1),
        "padded": _fused_form(problem, padded, gpu),
        "padded, alone": _fused_form(problem, padded, gpu, BESIDE=False, FINISH_BESIDE=False),
    }
    return found | {name: one for name, one in made.items() if one is not None}


def stored_candidates(problem: Problem, gpu: Gpu) -> dict[str, Ordered]:
    """dS in memory, and the split kernels. Also with the other number of groups behind it, twice as many slices, those of other
    shares of the memory, other bands of heads, and as many tiles under way as fit."""
    found, kernel = {"served": served(problem, gpu), "split": split(problem, gpu)}, stored_ds.kernel(problem, gpu.arch)
    config = bwd_dkdv_ds.of_row(problem, chosen(problem, gpu)[SPLIT_KERNEL][0].of_row.config)

    def slices(share: float) -> int:
        return max(1, stored_ds.fewest_slices(problem, int(gpu.hbm_bytes * share), gpu.arch))

    config["SLICES"] = slices(stored_ds_schedule.MOST_MEMORY)
    changes: dict[str, dict[str, Any]] = {
        "dS in memory": {}, "other groups": {"DQ_GROUPS": 5 - config["DQ_GROUPS"]}, "slices": {"SLICES": 2 * config["SLICES"]},
        **{f"1 / {part} of the memory": {"SLICES": slices(1 / part)} for part in (128, 64, 32, 8)},
        "other bands": {"HEADS_PER_WAVE": 3 - min(config["HEADS_PER_WAVE"], 2)},
        "two of P": {"P_STAGES": 2}, "four stages": {"STAGES": 4, "P_STAGES": 1},
    }  # fmt: skip
    for name, change in changes.items():
        changed = {**config, **change}
        changed["SLICES"] = len(stored_ds.slices(problem, changed["SLICES"]))  # fewer where heads come out even
        one = {FUSED_KERNEL: (Choice(kernel, changed), 1)}, ""
        able = kernel.space.broken(changed, problem.specialization, gpu.arch) is None
        if able and (name == "dS in memory" or one not in found.values()):
            found[name] = one
    return found


def turn_candidates(problem: Problem, gpu: Gpu) -> dict[str, Ordered]:
    """Key tiles that add to dQ in turns, in bands as chosen and of half and twice as many heads, next to split kernels that
    serve deterministic calls, and to the same form without an order."""
    found = {"served": served(problem, gpu)}
    _, choices = choosing.choose_backward(choosing.Chooser(problem, gpu), True, in_order=False)
    found["split"] = (
        {name: (one, group_parts_schedule.parts_of(problem, name, one, gpu)) for name, one in choices.items()},
        "",
    )
    own = found["served"][0][FUSED_KERNEL][0]
    plain = {**own.config, "NARROW": False}  # a form of 32 columns there is none
    base = turns_schedule.config_of(problem, plain, gpu)
    most = min(turns_schedule.MOST_HEADS, problem.batch * problem.heads_kv)
    heads = min(base["HEADS_PER_WAVE"], most)
    changes: dict[str, dict[str, Any]] = {"early": {}}
    changes |= {f"bands of {n}": {"HEADS_PER_WAVE": n} for n in (heads // 2, heads * 2) if 1 <= n <= most}
    changes["no order"] = {"IN_ORDER": False}
    for name, change in changes.items():
        one = _fused_form(problem, own, gpu, **{**base, **change})
        if one is not None and len(found) < MOST_FORMS:
            found[name] = one
    return found


def grouped_candidates(problem: Problem, gpu: Gpu) -> dict[str, Ordered]:
    """Of grouped heads: as the row has it and alone on the GPU, groups whole, in all parts and in those chosen for either."""
    found = {"served": served(problem, gpu)}
    own, counts = found["served"][0][FUSED_KERNEL][0], group_parts.allowed(problem)
    forms = {"row": own.of_row, "alone": replace(own, config=_late_alone(own.config), otherwise=own.of_row.config)}
    for name, form in forms.items():
        for parts in dict.fromkeys([1, group_parts_schedule.parts_of(problem, FUSED_KERNEL, form, gpu), counts[-1]]):
            one: Ordered = {FUSED_KERNEL: (form, parts)}, ""
            if not any(_same(one, other) for other in found.values()):
                found[f"{name}, {parts} parts"] = one
    return found


def alone_candidates(problem: Problem, gpu: Gpu) -> dict[str, Ordered]:
    """As the row has it, and alone on the GPU."""
    own = chosen(problem, gpu)[FUSED_KERNEL][0].of_row
    forms = {"row": own, "alone": replace(own, config=_late_alone(own.config), otherwise=own.config)}
    parts = {name: group_parts_schedule.parts_of(problem, FUSED_KERNEL, form, gpu) for name, form in forms.items()}
    return {name: ({FUSED_KERNEL: (form, parts[name])}, "") for name, form in forms.items()}


def _late_alone(config: Config) -> Config:
    return {**fused_schedule.apart(config), "EARLY_START": False}


def estimate(problem: Problem, one: Ordered, gpu: Gpu) -> str:
    """Microseconds that a candidate of the fused kernel is expected to take, after a space."""
    choice, parts = one[0].get(FUSED_KERNEL, (None, 1))
    if choice is None or choice.variant.space is not bwd_fused.SPACE:
        return ""
    return f" {fused_schedule.predicted_us(problem, choice.config, gpu, parts):.1f}"


Candidates = Callable[[Problem, Gpu], dict[str, Ordered]]
FORMS: dict[str, tuple[dict[str, tuple[Problem, dict[str, float]]], Candidates]] = {
    "apart": (APART_CALLS, apart_candidates), "stored": (STORED_CALLS, stored_candidates),
    "turns": (TURN_CALLS, turn_candidates), "grouped": (GROUPED_CALLS, grouped_candidates),
    "alone": (ALONE_CALLS, alone_candidates),
}  # fmt: skip


def _same(one: Ordered, other: Ordered) -> bool:
    return one[1] == other[1] and set(one[0]) == set(other[0]) and _alike(one[0], other[0])


def _alike(one: Candidate, other: Candidate) -> bool:
    return all(
        dict(one[name][0].config) == dict(other[name][0].config) and one[name][1] == other[name][1] for name in one
    )


# ---- keys of dQ in parts, as recorded


def key_time(call: Mapping[str, Any], parts: int, order: str) -> tuple[str, float]:
    """(name, microseconds) of what was recorded of a call; of one part: keys whole. KeyError: that was not timed."""
    if parts == 1:
        return WHOLE, call["us"][WHOLE]
    for name, us in call["us"].items():
        said = name.split(", ")
        if said[0] == f"{parts} parts" and said[-1] == (order or "one after the other"):
            return name.replace(", chosen", ""), us
    raise KeyError(f"{parts} parts, {order}")


def key_choice(problem: Problem, gpu: Gpu, parts: int | None = None) -> tuple[int, str, float]:
    """(parts, order, predicted microseconds) of what serves; ``parts``: of so many."""
    now = chosen(problem, gpu)
    count = key_parts(problem, now, gpu) if parts is None else parts
    order = order_of(problem, {**now, "bwd_dq": (now["bwd_dq"][0], count)}, gpu)
    choices = {kernel: choice for kernel, (choice, _) in now.items()}
    us = split_backward_schedule.predicted_us(problem, choices, now[SPLIT_KERNEL][1], gpu, order, splits=count)
    return count, order, us


def key_table(record: Mapping[str, Any], gpu: Gpu) -> str:
    """Markdown: of each call what serves, keys whole, and the best that was recorded, next to predictions."""
    lines = [
        "| batch x heads | queries x keys, head dim, mask | keys whole, us | predicted | what serves | us | predicted "
        "| gain | best recorded | cuDNN when drawn |",
        "|---|---|--:|--:|---|--:|--:|--:|---|--:|",
    ]
    for name, call in record["calls"].items():
        problem = KEY_CALLS[name][0]
        parts, order, predicted = key_choice(problem, gpu)
        (served, us), whole = key_time(call, parts, order), call["us"][WHOLE]
        best = min(call["us"].values())
        other = next(which for which, least in call["us"].items() if least == best).replace(", chosen", "")
        heads, dims = (
            f"{one}" if one == another else f"{one} / {another}"
            for one, another in ((problem.heads_q, problem.heads_kv), (problem.head_dim, problem.head_dim_v))
        )
        lines.append(
            f"| {problem.batch} x {heads} | {problem.seqlen_q} x {problem.seqlen_k}, {dims}, {problem.mask.name} | {whole} "
            f"| {key_choice(problem, gpu, 1)[2]:.1f} | {served} | {us} | {predicted:.1f} | {whole / us:.2f} "
            f"| {'this' if best == us else f'{best}: {other}'} | {call['when drawn'].get('cudnn', '')} |"
        )
    return "\n".join(lines)


# ---- both split kernels at a time, predicted


def predictions(gpu: Gpu) -> Iterator[str]:
    """A line for each recorded call of the split Hopper kernels, and what they come to."""
    errors, gains = [], []
    for name, (problem, call) in recorded().items():
        named = chosen(problem, gpu)
        choices = {kernel: choice for kernel, (choice, _) in named.items()}
        if not split_backward_schedule.covers(problem, choices):
            continue
        parts, recorded_us = named[SPLIT_KERNEL][1], call["us"][side_by_side.SUBJECT]
        after = split_backward_schedule.predicted_us(problem, choices, parts, gpu)
        order = split_backward_schedule.order_of(problem, choices, {SPLIT_KERNEL: parts}, gpu)
        now = split_backward_schedule.predicted_us(problem, choices, parts, gpu, order)
        errors.append(math.log(after / recorded_us))
        gains.append(after / now)
        yield (
            f"{name}: {workloads.described(problem)}: recorded {recorded_us} us, ratio {call['ratio']}; predicted {after:.0f}, "
            f"{order or 'one after the other'} {now:.0f}, ratio {call['ratio'] * after / now:.2f}"
        )
    fitted, held_out = (math.sqrt(statistics.fmean(e * e for e in errors[at::2])) for at in (0, 1))
    gained = sum(gain > 1 for gain in gains)
    yield f"{len(errors)} calls: {fitted:.3f} and {held_out:.3f} off, every second one; {gained} at a time"


# ---- measuring


def forward_choice(problem: Problem, gpu: Gpu) -> Choice:
    return choosing.Chooser(problem, gpu).choose("fwd")


def measured(problem: Problem, raced: Callable[[Problem, Gpu], dict[str, Ordered]] | None = None) -> dict[str, float]:
    """Candidate -> microseconds. ``raced``: as ``candidates``, which is meant where there is none."""
    q, k, v, do = workloads.inputs(problem)
    want, gpu = workloads.expected(problem, q, k, v, do), dispatch.gpu_of(0)
    q, k, v, do = (one.transpose(1, 2) for one in (q, k, v, do))
    scale = problem.head_dim**-0.5
    ours = passes.describe(q, k, v, problem.mask, scale)
    o, lse = passes.ForwardPlan(ours, q, k, v, scale, forward_choice(ours, gpu))(q, k, v)
    ours = passes.describe(q, k, v, problem.mask, scale, o=o, do=do)
    calls: dict[str, Callable[[], Sequence[torch.Tensor]]] = {}
    for name, (named, order) in (raced or candidates)(ours, gpu).items():
        strategy = next(one for one, kernels in STRATEGIES.items() if set(kernels) == set(named))
        plan: passes.BackwardPlan | stored_ds.StoredDsPlan
        if named[next(iter(named))][0].variant.role == BWD_STORED_DS:
            plan = stored_ds.StoredDsPlan(ours, do, None, q, k, v, o, scale, named[FUSED_KERNEL][0].config)
        else:
            plan = passes.BackwardPlan(
                ours, do, None, q, k, v, o, scale, strategy, {kernel: choice for kernel, (choice, _) in named.items()},
                {kernel: parts for kernel, (_, parts) in named.items() if parts > 1}, order,
            )  # fmt: skip
        calls[name] = lambda plan=plan: plan(do, None, q, k, v, o, lse)
        found = dict(zip(("dq", "dk", "dv"), (one.transpose(1, 2) for one in calls[name]()), strict=True))
        if (why := workloads.wrong(found, want, problem.group)) is not None:
            raise click.ClickException(f"{workloads.described(problem)}, {name}: {why}")
    times = race(list(calls.values()), torch.cuda.Stream(), BURST_MS)
    return dict(zip(calls, (round(us, 1) for us in times), strict=True))


def line(name: str, call: Mapping[str, Any]) -> str:
    times = ", ".join(f"{which} {us}" for which, us in call["us"].items())
    return f"{name}: {times}; when drawn {call['when drawn']}"


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--list", "listed", is_flag=True, help="Print what would be timed on an H200.")
@click.option(
    "--split", "predicted", is_flag=True, help="Print what an H200 would save with both split kernels at a time."
)
@click.option("--keys", is_flag=True, help="Keys of dQ in parts, of calls of few queries, instead.")
@click.option("--forms", type=click.Choice(list(FORMS)), help="Forms next to what serves, instead.")
@click.option(
    "--drawing", type=click.Path(exists=True, path_type=Path), help="Of this record of one drawing (.json.gz)."
)
@click.option("--only", multiple=True, help="The call of this name (a 6), and no others.")
@side_by_side.timing_options
@marked.page_option
def main(listed: bool, predicted: bool, keys: bool, forms: str | None, drawing: Path | None, only: tuple[str, ...],
         share: slice, seconds: float, out: Path | None, shown: Path | None, page: Path | None) -> None:  # fmt: skip
    if shown is not None and keys:
        marked.publish(
            page, "keys", "dense_backwards", key_table(json.loads(shown.read_text("utf-8")), gpus.named("h200"))
        )
        return
    if shown is not None:
        click.echo("\n".join(line(*one) for one in json.loads(shown.read_text("utf-8"))["calls"].items()))
        return
    h200 = gpus.named("h200")
    given, raced = FORMS[forms] if forms else (KEY_CALLS, key_candidates) if keys else (None, candidates)
    if listed:
        for name, (problem, _) in (todo(h200, drawing) if given is None else given).items():
            made = raced(problem, h200).items()
            listing = "; ".join(which + (estimate(problem, one, h200) if forms else "") for which, one in made)
            click.echo(f"{name}: {workloads.described(problem)}: {listing}")
        return
    if predicted:
        click.echo("\n".join(predictions(h200)))
        return
    record = side_by_side.begun(out, {"environment": side_by_side.environment()})
    asked = {name: (problem, {"us": us}) for name, (problem, us) in (given or {}).items()}
    asked = asked or todo(dispatch.gpu_of(0), drawing)
    asked = dict(list(asked.items())[share])
    asked = {name: one for name, one in asked.items() if not only or {name, " ".join(name.split()[:2])} & {*only}}

    def one(pair: tuple[Problem, dict[str, Any]]) -> dict[str, Any]:
        return {"us": measured(pair[0], raced), "when drawn": pair[1]["us"]}

    side_by_side.fill(record, asked, one, seconds, out, line)


if __name__ == "__main__":
    main()
