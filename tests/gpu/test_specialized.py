"""Warp-specialised variants on the GPU at hand, whichever there are: by the error rule, with NaN in what was not written. Gluon
has no interpreter, so these are their only tests of numerics. FA2TUNE_STRESS_SECONDS lengthens the last."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hopper_cases import (
    FORMS,
    VIEWS,
    Form,
    Tensors,
    case_of,
    check,
    config_for,
    inside_a_wider_one,
    refusal,
    run,
    specialized,
    spread,
    strategy_of,
)

import fa2tune
from fa2tune.calling import choosing, dispatch
from fa2tune.compiling.registry import portable_of, variants_of
from fa2tune.launching import cuda, launch, passes
from fa2tune.measuring import reference, verify
from fa2tune.rows.row import MEASURED, Row, hashed_as
from fa2tune.rows.store import Store
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import KERNELS, STRATEGIES, Config, Problem
from fa2tune.spec.variant import WARP_SPECIALIZED, Variant

VARIANTS = (
    specialized()
    if torch.cuda.is_available()
    else [v for k in KERNELS for v in variants_of(k) if WARP_SPECIALIZED in v.implementations]
)
pytestmark = pytest.mark.skipif(not VARIANTS, reason="no warp-specialised variant for this GPU")
every = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
STRATEGIES_AND_FORWARD = {"forward": ("fwd",), **STRATEGIES}
strategies = pytest.mark.parametrize("strategy", STRATEGIES_AND_FORWARD)
masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
STRESS_SECONDS = float(os.environ.get("FA2TUNE_STRESS_SECONDS", "10"))
HERE = Path(__file__).parent


def posed(*lengths: int, dims: tuple[int, int] = (128, 128), causal: bool = False, dtype: str = "bf16",
          heads: tuple[int, int] = (4, 2), batch: int = 2) -> Problem:  # fmt: skip
    return Problem(dtype, batch, *heads, *lengths, *dims, CAUSAL if causal else FULL)


def asked_for(variant: Variant, *lengths: int, **more: object) -> Problem:
    """A problem; skips where the variant has a reason not to serve it."""
    asked = posed(*lengths, **more)  # type: ignore[arg-type]
    if why := refusal(variant, asked):
        pytest.skip(why)
    return asked


def split(more: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """What poses the problem, and what else a check is told."""
    posing = {"dims", "causal", "dtype", "heads", "batch"} & more.keys()
    return {name: more[name] for name in posing}, {name: more[name] for name in more.keys() - posing}


def checked(variant: Variant, *lengths: int, **more: object) -> None:
    posing, rest = split(more)
    asked = asked_for(variant, *lengths, **posing)
    check(variant, config_for(variant, asked), asked, **rest)  # type: ignore[arg-type]


def checked_strategy(strategy: str, *lengths: int, **more: object) -> None:
    """The forward, or all kernels of a strategy of the backward at once, warp-specialised where they can serve."""
    posing, rest = split(more)
    asked = posed(*lengths, **posing)  # type: ignore[arg-type]
    refused = {
        variant: refusal(variant, asked) for variant in VARIANTS if variant.serves in STRATEGIES_AND_FORWARD[strategy]
    }
    able = [variant for variant, why in refused.items() if not why]
    if not able:
        pytest.skip("; ".join(refused.values()))
    check(able[0], config_for(able[0], asked), asked, portable=False, **rest)  # type: ignore[arg-type]


def tensors_of(asked: Problem, seed: int = 0) -> Tensors:
    made = reference.make_inputs(asked, "cuda", seed=seed)
    return {"q": made.q, "k": made.k, "v": made.v, "do": made.do}


# Most of the time goes to compiles. What compiles most comes first, so that several processes end together (pytest -n).


@every
@masks
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_value_of_every_dimension(variant: Variant, dim: int, causal: bool) -> None:
    asked = asked_for(variant, 391, 517, dims=(dim, dim), causal=causal)
    for config in spread(variant, asked):
        check(variant, config, asked)


def test_random_shapes_and_configs_for_a_while() -> None:
    """In a process of its own, which may hang: its last line says where."""
    seed = os.environ.get("FA2TUNE_STRESS_SEED", "0")
    done = subprocess.run(
        [sys.executable, str(HERE / "hopper_cases.py"), "stress", str(STRESS_SECONDS), seed],
        capture_output=True, text=True, timeout=STRESS_SECONDS + 300, cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


# Where many head dims are swept, the kernels of a strategy are warp-specialised all together: nothing is compiled for the sake
# of others, and the split strategy's two are checked at once. (The other tests have portable kernels beside the one they mean.)
# Neighbours among the cases, which one process takes, share binaries.


@strategies
@pytest.mark.parametrize("dim", [16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 144, 160, 192, 224, 256])
@masks
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_head_dims_at_odd_lengths(strategy: str, dim: int, dtype: str, causal: bool) -> None:
    checked_strategy(strategy, 113, 203, dims=(dim, dim), dtype=dtype, causal=causal)
    checked_strategy(strategy, 1003, 517, dims=(dim, dim), dtype=dtype, causal=causal)


@strategies
@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (192, 128), (40, 96), (96, 64), (128, 80), (72, 80), (256, 64)])
def test_value_head_dim_apart(strategy: str, dims: tuple[int, int]) -> None:
    checked_strategy(strategy, 333, 444, dims=dims, causal=True)


@strategies
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("scale", "outlier"), [(10.0, False), (1.0, True)])
def test_hard_inputs(strategy: str, dim: int, dtype: str, scale: float, outlier: bool) -> None:
    checked_strategy(strategy, 500, 700, dims=(dim, dim), dtype=dtype, causal=True, scale=scale, outlier=outlier)


@every
@masks
@pytest.mark.parametrize("lengths", [(1, 1), (1, 1000), (1000, 1), (2, 3), (63, 64), (64, 64), (65, 63), (127, 129), (128, 128),
                                     (129, 4096), (192, 193), (4097, 255)])  # fmt: skip
def test_lengths(variant: Variant, lengths: tuple[int, int], causal: bool) -> None:
    checked(variant, *lengths, causal=causal)
    checked(variant, *lengths, causal=causal, dims=(64, 64))


@every
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (6, 2), (8, 1), (5, 5)])
def test_grouped_heads(variant: Variant, heads: tuple[int, int]) -> None:
    checked(variant, 333, 444, causal=True, heads=heads)


@every
@masks
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
def test_views(variant: Variant, view: object, dim: int, causal: bool) -> None:
    checked(variant, 300, 333, dims=(dim, dim), causal=causal, view=view)


@every
@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, 1.0, 1e-20, -1e-35])
@pytest.mark.parametrize(("dim", "causal"), [(64, True), (128, False)])
def test_softmax_scale(variant: Variant, dim: int, causal: bool, softmax_scale: float) -> None:
    checked(variant, 333, 444, dims=(dim, dim), dtype="fp16", causal=causal, softmax_scale=softmax_scale)


@every
@masks
def test_fewer_and_more_tiles_than_the_machine_holds(variant: Variant, causal: bool) -> None:
    for batch, heads, lengths in ((1, (1, 1), (64, 64)), (1, (1, 1), (2000, 100)), (3, (50, 50), (400, 300)),
                                  (2, (7, 7), (6000, 700))):  # fmt: skip
        checked(variant, *lengths, dims=(64, 64), heads=heads, batch=batch, causal=causal)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.variant} {form.dim} {form.causal} {form.changes}")
def test_forms_on_more_tiles_than_programs(form: Form) -> None:
    """Several times: what is wrong there may depend on what shares a multiprocessor."""
    for variant in VARIANTS:
        if variant.name == form.variant:
            _, config, asked = case_of(form, variant)
            for _ in range(3):
                check(variant, config, asked)


#: Rows prepared overlapped with the fused backward's tiles, which then come from a counter; and dQ finished so.
BESIDE = {"BESIDE": True, "DYNAMIC": True, "PERSISTENT": True, "PAIRS": False}
FINISH = {**BESIDE, "FINISH_BESIDE": True, "REDUCE": "vector"}
CONCATENATED = {"num_warps": 8, "ORDER": "together", "BLOCK_M": 64}


@masks
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "beside", [BESIDE, FINISH, {**FINISH, **CONCATENATED}, {**FINISH, "REDUCE": "tma", "ORDER": "together"}], ids=str
)
def test_more_chunks_than_are_under_way(dim: int, causal: bool, beside: Config) -> None:
    """What is prepared beside the fused backward goes round its rings several times: dQ shows zeros that come late or never,
    and what is finished before all have added to it; all gradients terms that come late."""
    for variant in VARIANTS:
        if "BESIDE" in variant.space.dimensions:
            asked = asked_for(variant, 512, 512, dims=(dim, dim), causal=causal, heads=(32, 32), batch=16)
            config = {**config_for(variant, asked), **beside}
            for _ in range(3):
                check(variant, config, asked)


@pytest.mark.parametrize("beside", [FINISH, {**FINISH, "REDUCE": "tma", "ORDER": "together"}], ids=str)
def test_a_group_of_more_heads_than_a_warp_has_lanes(beside: Config) -> None:
    for variant in VARIANTS:
        if "BESIDE" in variant.space.dimensions:
            asked = asked_for(variant, 200, 700, dims=(64, 64), heads=(80, 2), batch=2)
            check(variant, {**config_for(variant, asked), **beside}, asked)


@pytest.mark.parametrize("beside", [BESIDE, FINISH], ids=str)
def test_a_driver_that_starts_nothing_early(beside: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "may_start_early", lambda: False)
    for variant in VARIANTS:
        if "BESIDE" in variant.space.dimensions:
            asked = asked_for(variant, 900, 900, dims=(64, 64), causal=True, heads=(40, 20), batch=2)
            config = {**config_for(variant, asked), **beside}
            assert variant.early(asked, config, 132) and not launch.starts_early(variant, asked, config, 0)
            check(variant, config, asked)


def shapes_of_a_launch(variant: Variant, asked: Problem) -> list[dict[str, object]]:
    """The default config, and another that has another kernel before it, or others beside it."""
    default = dict(config_for(variant, asked))
    others = {"RESCALE": "never", **FINISH}
    changed = {name: value for name, value in others.items() if name in default}
    return [default, {**default, **changed}] if {"RESCALE", "BESIDE"} & changed.keys() else [default]


@every
@masks
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_runs_agree_to_the_bit(variant: Variant, dim: int, causal: bool) -> None:
    """An error that moves is a race. The sums of the fused dQ alone are in no fixed order."""
    asked = asked_for(variant, 1500, 1300, dims=(dim, dim), causal=causal)
    for config in shapes_of_a_launch(variant, asked):
        agree(variant, asked, config)


def agree(variant: Variant, asked: Problem, config: Config) -> None:
    tensors = tensors_of(asked)
    first = run(variant, config, asked, tensors)
    for _ in range(20):
        again = run(variant, config, asked, tensors)
        for name in again.keys() - ({"dq"} if variant.serves == "bwd_fused" else set()):
            assert torch.equal(first[name], again[name]), name


@every
@masks
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_nan_and_inf_as_the_portable_kernel_has_them(variant: Variant, where: str, value: float, causal: bool) -> None:
    """Under a causal mask in row 0, which sees one key: with a score of -inf no probability is left, and lse is -inf."""
    asked = asked_for(variant, 300, 300 if causal else 400, dims=(64, 64), heads=(2, 2), batch=1, causal=causal)
    tensors = tensors_of(asked)
    tensors[where][0, 0, 0 if causal else 7, 3] = value
    portable, spec, arch = portable_of(variant.serves), asked.specialization, dispatch.gpu_of(0).arch
    theirs = run(portable, portable.space.default(spec, arch), asked, tensors)
    for name, tensor in run(variant, config_for(variant, asked), asked, tensors).items():
        assert torch.equal(torch.isnan(tensor), torch.isnan(theirs[name])), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@masks
def test_nan_and_inf_where_scores_are_bounded(where: str, value: float, causal: bool, dtype: str) -> None:
    variant = next((one for one in VARIANTS if one.name == "sm90/fwd"), None)
    if variant is None:
        pytest.skip("no sm90/fwd for this GPU")
    asked = asked_for(variant, 448, 448, dims=(64, 64), heads=(2, 2), batch=2, causal=causal, dtype=dtype)
    tensors = tensors_of(asked)
    tensors[where][1, 0, 130, 3] = value
    portable = portable_of("fwd")
    theirs = run(portable, portable.space.default(asked.specialization, 90), asked, tensors)
    for name, tensor in run(variant, {**config_for(variant, asked), "RESCALE": "never"}, asked, tensors).items():
        assert torch.equal(torch.isnan(tensor), torch.isnan(theirs[name])), name
        assert where != "v" or torch.equal(torch.isinf(tensor), torch.isinf(theirs[name])), name


BOUNDED = [form for form in FORMS if form.changes.get("RESCALE") == "never"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("form", BOUNDED, ids=lambda form: f"{form.dim} {form.causal} {form.changes}")
@pytest.mark.parametrize("lengths", [(700, 900), (900, 613), (768, 768)])
def test_tiles_whose_scores_are_bounded_beside_others(form: Form, dtype: str, lengths: tuple[int, int]) -> None:
    """Norms of 0, so small that their squares vanish, usual, and so large that the bound says nothing, in groups of rows side
    by side; and a head whose keys have one that is too long for all."""
    variant = next((one for one in VARIANTS if one.name == form.variant), None)
    if variant is None:
        pytest.skip(f"no {form.variant} for this GPU")
    asked = asked_for(variant, *lengths, dims=(form.dim, form.dim), causal=form.causal, dtype=dtype, heads=(4, 2))
    made = reference.make_inputs(asked, "cuda")
    q, k = made.q.clone(), made.k.clone()
    q[:, :, 64:128] *= 40.0
    q[:, :, 150] = 0.0
    q[:, :, 200:264] *= 2.0**-14
    k[1, 1, 11] *= 100.0
    inputs = replace(made, q=q, k=k)
    norms = k.float().norm(dim=-1).amax(-1).repeat_interleave(2, 1)[..., None]
    bound = q.float().norm(dim=-1) * norms * form.dim**-0.5 / math.log(2)
    assert (bound[:, :2, :64] < 40).all() and (bound[0, :, :64] < 40).all()
    assert (bound[:, :, 64:128] > 200).all() and (bound[1, 2:, :64] > 200).all()
    oracle, same = reference.oracle_and_reference(inputs, mask=asked.mask, softmax_scale=None, gradients=False)
    _, config, _ = case_of(form, variant)
    verify.compare(run(variant, config, asked, {"q": q, "k": k, "v": made.v}), oracle, same)


@every
@masks
def test_graphs_and_streams(variant: Variant, causal: bool) -> None:
    """Captured once, replayed on other values; and from two streams at a time."""
    asked = asked_for(variant, 700, 900, causal=causal)
    for config in shapes_of_a_launch(variant, asked):
        captured_and_from_two_streams(variant, asked, config)


def captured_and_from_two_streams(variant: Variant, asked: Problem, config: Config) -> None:
    tensors = tensors_of(asked)
    run(variant, config, asked, tensors)
    torch.cuda.synchronize()
    o, lse = passes.forward(tensors["q"], tensors["k"], tensors["v"], mask=asked.mask, softmax_scale=0.1,
                            config=portable_of("fwd").space.default(asked.specialization, 90))  # fmt: skip
    arguments = {name: tensors[name] for name in ("q", "k", "v")} | {"o": o}
    if variant.serves == "fwd":
        plan = passes.ForwardPlan(asked, *(tensors[n] for n in ("q", "k", "v")), 0.1, config)

        def call():
            return plan(*(tensors[n] for n in ("q", "k", "v")))
    else:
        strategy, configs = strategy_of(variant, config, asked)
        whole = passes.BackwardPlan(asked, tensors["do"], None, *arguments.values(), 0.1, strategy, configs)

        def call():
            return whole(tensors["do"], None, *arguments.values(), lse)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    tensors["v"].mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for stream in streams:
        with torch.cuda.stream(stream):
            found.append(call())
    torch.cuda.synchronize()
    for results in found:
        for one, other in zip(captured, results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)


# ---- through the public call


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache file in which warp-specialised rows are the fastest of every kernel."""
    gpu, today = dispatch.gpu_of(0), choosing.toolchain()
    rows = []

    def file(kernel: str, config: dict[str, object], time_us: float, strategy: str = "") -> None:
        mask = "causal" if causal else "full"
        made_with = {
            "driver": today.driver,
            "triton": today.triton,
            "kernel_hash": today.kernel_hashes[hashed_as(kernel, WARP_SPECIALIZED, mask, strategy)],
        }
        key = choosing.key_of(problem, kernel, gpu)
        evidence = {"time_us": time_us, "strategy": strategy, **made_with}
        rows.append(Row(key, WARP_SPECIALIZED, config, MEASURED, "target", **evidence))

    for causal in (False, True):
        problem = Problem("bf16", 1, 4, 4, 1024, 1024, 128, 128, CAUSAL if causal else FULL)
        for variant in VARIANTS:
            if not refusal(variant, problem):
                file(variant.serves, dict(config_for(variant, problem)), 1.0)
        for strategy, kernels in STRATEGIES.items():
            if {row.key.kernel for row in rows} >= set(kernels):
                implementations = dict.fromkeys(kernels, WARP_SPECIALIZED)
                file("bwd", implementations, {"split": 2.0, "fused": 1.0}[strategy], strategy)
    path = tmp_path / "fleet.sqlite"
    Store(path).put(rows)
    monkeypatch.setenv("FA2TUNE_CACHE", str(path))
    dispatch.reload()
    dispatch.SERVED.clear()
    yield path
    monkeypatch.delenv("FA2TUNE_CACHE")
    dispatch.reload()


@masks
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_public_call_is_served_by_them(cached: Path, causal: bool, deterministic: bool) -> None:
    """Or by forms of their kernels that calls of such lengths take."""
    for shape in ((1024, 1024), (613, 1000)):
        asked = Problem("bf16", 2, 4, 2, *shape, 128, 128, CAUSAL if causal else FULL)
        inputs = reference.make_inputs(asked, "cuda", with_dlse=True)
        oracle, same = reference.oracle_and_reference(inputs, mask=CAUSAL if causal else FULL)
        q, k, v = (t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        o, lse = fa2tune.attention(q, k, v, causal=causal, return_lse=True, deterministic=deterministic)
        gradients = torch.autograd.grad([o, lse], (q, k, v), [inputs.do, inputs.dlse])
        got = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
        verify.compare(got, oracle, same)
        kernels = fa2tune.explain(q, k, v, causal=causal, deterministic=deterministic).kernels
        assert any(kernel.file == cached for kernel in kernels)


@pytest.mark.usefixtures("cached")
def test_what_tma_cannot_address_takes_another_implementation() -> None:
    asked = Problem("bf16", 2, 4, 4, 1000, 1000, 128, 128, CAUSAL)  # the bucket of the rows
    plain = reference.make_inputs(asked, "cuda").q
    wide = plain.new_empty(2, 4, 1000, 131)
    odd = wide[..., 1:129].copy_(plain)  # base off by 2 bytes, a row stride of 131
    still = plain[:1].expand(2, 4, 1000, 128)  # a stride of 0
    for tensor in (odd, still, inside_a_wider_one(plain)):
        dispatch.reload()
        ours = fa2tune.attention(tensor, tensor, tensor, causal=True)
        theirs = fa2tune.attention(*(tensor.contiguous() for _ in range(3)), causal=True)
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
    gpu = dispatch.gpu_of(0)
    assert choosing.choose(asked, "fwd", gpu).config.get("LOADS") is None or "fwd" not in {v.serves for v in VARIANTS}
    unaligned = replace(asked, aligned=False, tma=False)
    assert choosing.choose(unaligned, "fwd", gpu).config["LOADS"] == "pointer"
