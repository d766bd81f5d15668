"""What the tests of warp-specialised variants run: problems, configs, one check by the error rule. Also a program of its own:

python tests/gpu/hopper_cases.py stress 300 [seed] [kernel ...]    random shapes and configs for so many seconds
python tests/gpu/hopper_cases.py small [kernel ...]                what benchmarks/sanitize.py runs: see small_cases
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import cache, lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch

from fa2tune.calling import choosing, dispatch
from fa2tune.compiling import compiler, limits, registry, support
from fa2tune.gpus import Gpu
from fa2tune.launching import passes
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL, Mask
from fa2tune.spec.problem import KERNELS, STRATEGIES, Config, Problem, Specialization
from fa2tune.spec.variant import WARP_SPECIALIZED, Variant

Tensors = Mapping[str, torch.Tensor]
DIMS = ((64, 64), (128, 128), (256, 256), (72, 72), (16, 16), (40, 96), (192, 128), (96, 96), (192, 192))


def specialized(kernels: Sequence[str] = KERNELS) -> list[Variant]:
    """Every warp-specialised variant of these kernels that can run on the GPU at hand."""
    gpu = dispatch.gpu_of(0)
    return [
        variant for kernel in kernels for variant in registry.variants_of(kernel)
        if WARP_SPECIALIZED in variant.implementations and variant.min_arch <= gpu.arch <= variant.max_arch
    ]  # fmt: skip


def legal(variant: Variant, asked: Problem) -> list[dict[str, Any]]:
    """Every config that may be launched for a problem."""
    return [dict(config) for config in legal_on(variant, asked.specialization, dispatch.gpu_of(0))]


@cache
def legal_on(variant: Variant, spec: Specialization, gpu: Gpu) -> tuple[dict[str, Any], ...]:
    """Every config that may be launched for such problems on a GPU: a space has over 100,000 points to look at."""
    if support.unsupported(variant, spec, gpu) is not None:
        return ()
    return tuple(c for c in variant.space.points() if limits.refused_config(variant, spec, c, gpu) is None)


def refusal(variant: Variant, asked: Problem) -> str:
    """Why no config of a variant can serve a problem; "": one can."""
    gpu, spec = dispatch.gpu_of(0), asked.specialization
    default = variant.space.default(spec, gpu.arch)
    refused = limits.before_compile(variant, spec, default, gpu)
    return refused.why if refused is not None and not legal(variant, asked) else ""


def config_for(variant: Variant, asked: Problem) -> Config:
    """The default where it may be launched, else the first that may."""
    gpu, spec = dispatch.gpu_of(0), asked.specialization
    default = variant.space.default(spec, gpu.arch)
    return default if limits.before_compile(variant, spec, default, gpu) is None else legal(variant, asked)[0]


def spread(variant: Variant, asked: Problem) -> list[dict[str, Any]]:
    """Legal configs, in which every dimension takes each of its values that is legal somewhere, and few binaries: whichever
    brings most values comes next, of those one whose binary is there already, and of the rest any, drawn by the problem."""
    found = legal(variant, asked)
    random.Random(f"{variant.name} {asked.head_dim} {asked.mask == CAUSAL}").shuffle(found)
    missing = {entry for config in found for entry in config.items()}
    picked: list[dict[str, Any]] = []
    binaries: list[dict[str, Any]] = []
    compiled_in = [compiler.binary_config(variant, config) for config in found]
    while missing:
        # what only a launch chooses is left for later, when any binary will do
        gains = [
            (len(missing & set(binary.items())), len(missing & set(config.items())), binary in binaries)
            for config, binary in zip(found, compiled_in, strict=True)
        ]
        best = gains.index(max(gains))
        picked.append(found[best])
        binaries.append(compiled_in[best])
        missing -= set(found[best].items())
    return picked


def strategy_of(
    variant: Variant, config: Config, asked: Problem, portable: bool = True
) -> tuple[str, dict[str, Config]]:
    """The strategy of the backward that a variant is on ("": it is a forward), and a config of each kernel that runs with it:
    of the others the portable default, or the warp-specialised one where that can serve. The forward comes first."""
    strategy = next((strategy for strategy, kernels in STRATEGIES.items() if variant.serves in kernels), "")
    configs = {}
    for kernel in ("fwd", *STRATEGIES.get(strategy, ())):
        others = [] if portable else [one for one in specialized((kernel,)) if not refusal(one, asked)]
        other = others[0] if others else registry.portable_of(kernel)
        configs[kernel] = config if kernel == variant.serves else config_for(other, asked)
    return strategy, configs


def run(
    variant: Variant, config: Config, asked: Problem, inputs: Tensors, softmax_scale: float | None = None,
    portable: bool = True,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What a config of one kernel makes of these tensors, with the other kernels as strategy_of says: o and lse, or the three
    gradients. Uninitialised memory holds NaN."""
    scale = asked.head_dim**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    strategy, configs = strategy_of(variant, config, asked, portable)
    with verify._strict("ieee"):
        o, lse = passes.forward(q, k, v, mask=asked.mask, softmax_scale=scale, score=asked.score, config=configs["fwd"])
        if not strategy:
            return {"o": o, "lse": lse}
        gradients = passes.backward(
            inputs["do"], inputs.get("dlse"), q, k, v, o, lse, mask=asked.mask, softmax_scale=scale, score=asked.score,
            strategy=strategy, configs=configs,
        )  # fmt: skip
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def as_they_are(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def sequence_first(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a (batch, seqlen, heads, dim) tensor."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def inside_a_wider_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of every dimension of a larger tensor, whose other elements are NaN."""
    b, h, m, d = tensor.shape
    wide = tensor.new_full((b + 1, h + 2, m + 3, d + 24), float("nan"))
    view = wide[1:, 1 : h + 1, 2 : m + 2, 8 : d + 8]
    return view.copy_(tensor)


VIEWS = (as_they_are, sequence_first, inside_a_wider_one)


@lru_cache(maxsize=1)
def answers(
    asked: Problem, with_dlse: bool, gradients: bool, softmax_scale: float | None, inputs: tuple[tuple[str, Any], ...]
) -> tuple[reference.Inputs, Tensors, Tensors]:
    """Inputs, oracle, reference: once for all configs that are checked on a problem one after the other."""
    made = reference.make_inputs(asked, "cuda", with_dlse=with_dlse, **dict(inputs))
    options = {"mask": asked.mask, "softmax_scale": softmax_scale, "score": asked.score}
    found = reference.oracle_and_reference(made, gradients=gradients, **options)  # type: ignore[arg-type]
    return made, *found


def check(
    variant: Variant, config: Config, asked: Problem, view: Callable[[torch.Tensor], torch.Tensor] = as_they_are,
    softmax_scale: float | None = None, with_dlse: bool = True, portable: bool = True, **inputs: Any,
) -> verify.Errors:  # fmt: skip
    """Raises WrongResult where a result breaks the error rule. portable: see strategy_of."""
    backward = variant.serves != "fwd"
    made, oracle, same = answers(asked, with_dlse and backward, backward, softmax_scale, tuple(sorted(inputs.items())))
    tensors = {f.name: getattr(made, f.name) for f in fields(made) if isinstance(getattr(made, f.name), torch.Tensor)}
    viewed = {name: view(tensor) if tensor.dim() == 4 else tensor for name, tensor in tensors.items()}
    return verify.compare(run(variant, config, asked, viewed, softmax_scale, portable), oracle, same)


#: (mask, (batch, heads_q, heads_kv), (seqlen_q, seqlen_k)): bounded on either side and on both, more keys than queries and more
#: queries than keys, rows that see no key, key tiles that no query sees, groups, odd lengths, more tiles than multiprocessors.
#: No window of (0, 0): dS of a row with one key is exactly 0, float32 sums leave 2e-6 of it, and the error rule allows nothing.
BOUNDED = (
    (Mask("band", 127, 0), (2, 4, 4), (512, 512)),
    (Mask("band", 0, 200), (1, 4, 2), (1000, 1300)),
    (Mask("band", 65, 300), (2, 4, 1), (1300, 1000)),
    (Mask("band", -1, 64), (1, 2, 2), (777, 1001)),
    (Mask("band", 300, -1), (1, 2, 1), (1001, 777)),
    (Mask("band", 16, 0), (1, 4, 2), (1300, 1000)),  # 300 rows see no key
    (Mask("band", 50, 0), (2, 2, 1), (77, 2000)),  # nor are most keys seen
    (Mask("band", 1, 0), (1, 3, 3), (513, 513)),
    (Mask("band", 7, 3), (1, 2, 2), (300, 10)),
    (Mask("band", 200, 0), (4, 12, 12), (1100, 900)),  # 384 tiles
    (Mask("band", 100, 30), (3, 16, 4), (640, 2100)),
    (Mask("chunked", 64), (1, 4, 2), (512, 512)),
    (Mask("chunked", 7), (1, 2, 1), (300, 500)),
    (Mask("chunked", 256), (2, 4, 4), (1300, 1000)),
    (Mask("chunked", 1000), (2, 12, 12), (900, 2222)),
)


def bounded(dtype: str, head_dim: int) -> list[Problem]:
    """The problems of BOUNDED."""
    return [
        Problem(dtype, *heads, *lengths, head_dim, head_dim, mask.fitted(*lengths)) for mask, heads, lengths in BOUNDED
    ]


def forms_of(variant: Variant, head_dim: int) -> list[dict[str, Any]]:
    """Every config that a row of this head dim names, and those of FORMS, each binary once."""
    named = [
        variant.space.completed(row.config)
        for layer in choosing.layers() for row in layer.rows
        if (row.key.kernel, row.key.head_dim, row.implementation) == (variant.serves, head_dim, WARP_SPECIALIZED)
    ]  # fmt: skip
    written = [form.config(variant) for form in FORMS if (form.variant, form.dim) == (variant.name, head_dim)]
    found = {repr(sorted(compiler.binary_config(variant, config).items())): config for config in [*written, *named]}
    return [dict(found[name]) for name in sorted(found)]


# ---- a program of its own


#: A variant, one of its configs, and a problem whose lengths, heads and batch are still to be drawn.
Fixed = tuple[Variant, dict[str, Any], Problem]


def binaries_of(
    variant: Variant, config: Config, asked: Problem, portable: bool = True
) -> list[tuple[Variant, Config]]:
    """What a check of a config launches, all of it."""
    spec, arch = asked.specialization, dispatch.gpu_of(0).arch
    _, configs = strategy_of(variant, config, asked, portable)
    return [launch for kernel, its in configs.items() for launch in passes.runs(kernel, spec, its, arch)]


def _compile(name: str, spec: Specialization, config: Config, arch: int) -> str:
    """In a child process: into Triton's cache. Why not, or ""."""
    try:
        compiler.compile_kernel(registry.variant_named(name), spec, config, arch)
    except compiler.CompileError as error:
        return str(error)
    return ""


def draw(dice: random.Random, variants: Sequence[Variant], count: int) -> list[Fixed]:
    """So many binaries to stress, compiled on all cores: the default config now and then, else any legal one."""
    found: list[Fixed] = []
    for _ in range(20 * count):
        variant, dims = dice.choice(variants), dice.choice(DIMS)
        asked = Problem(
            dice.choice(("bf16", "bf16", "fp16")), 1, 1, 1, 64, 64, *dims, CAUSAL if dice.random() < 0.6 else FULL
        )
        able = legal(variant, asked)
        if able:
            default = config_for(variant, asked)
            found.append((variant, dict(default) if dice.random() < 0.3 else dice.choice(able), asked))
        if len(found) == count:
            break
    return compilable(found)


def compilers() -> ProcessPoolExecutor:
    """Processes that compile: of all test processes together as many as there are cores."""
    cores, testing = len(os.sched_getaffinity(0)), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return ProcessPoolExecutor(max(1, cores // testing), multiprocessing.get_context("spawn"))


def compilable(cases: Sequence[Fixed]) -> list[Fixed]:
    """Those that compile, on all cores, into Triton's cache."""
    arch = dispatch.gpu_of(0).arch
    with compilers() as pool:
        jobs = [
            (fixed, pool.submit(_compile, one.name, fixed[2].specialization, config, arch))
            for fixed in cases for one, config in binaries_of(*fixed)
        ]  # fmt: skip
        refused = [fixed for fixed, job in jobs if job.result()]
    return [fixed for fixed in cases if fixed not in refused]


def drawn(dice: random.Random, asked: Problem) -> Problem:
    """Lengths, heads, batch: small enough for a float64 oracle; lengths of 1, tile edges and odd ones, rows that see no key."""
    lengths = [
        dice.choice(
            (1, dice.randrange(1, 40), 64 * dice.randrange(1, 20) + dice.randrange(-1, 2), dice.randrange(1, 1500))
        )
        for _ in range(2)
    ]
    if dice.random() < 0.3:
        lengths[1] = lengths[0]
    heads_kv, group = dice.choice(((1, 1), (2, 1), (1, 4), (2, 3), (12, 1), (3, 8)))
    return replace(
        asked, batch=dice.choice((1, 1, 2, 5)), heads_q=heads_kv * group, heads_kv=heads_kv, seqlen_q=lengths[0],
        seqlen_k=lengths[1],
    )  # fmt: skip


def stress(seconds: float, seed: int = 0, kernels: Sequence[str] = KERNELS, binaries: int = 24) -> dict[str, int]:
    """Random problems for random configs, until so many seconds are over, compiling aside; variant -> checks. Raises
    WrongResult, naming the case."""
    dice = random.Random(seed)
    variants = specialized(kernels)
    done = dict.fromkeys((variant.name for variant in variants), 0)
    pool = draw(dice, variants, binaries) if variants else []
    print(f"{len(pool)} binaries", flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until and pool:
        variant, config, asked = dice.choice(pool)
        asked, view = drawn(dice, asked), dice.choice(VIEWS)
        runtime = compiler.runtime_names(variant)  # the same binary, another launch
        config = {**config, **{name: dice.choice(variant.space.dimensions[name]) for name in sorted(runtime)}}
        if limits.before_compile(variant, asked.specialization, config, dispatch.gpu_of(0)) is not None:
            continue
        # where a row sees one key, or scale 10 makes its softmax one-hot, gradients are zero but for lse's, and the rule
        # allows a zero no error
        scale = dice.choice((1.0, 1.0, 10.0)) if asked.seqlen_q > 32 else 1.0  # of few rows the rule's maximum is luck
        with_dlse = asked.seqlen_k < 3 or scale > 1 or dice.random() < 0.5
        more = {"seed": dice.randrange(1 << 20), "scale": scale, "with_dlse": with_dlse}
        case = f"{variant.name} {asked} {config} {view.__name__} {more}"
        print("case", case, flush=True)  # the last one, if this process hangs
        try:
            check(variant, config, asked, view, **more)
        except verify.WrongResult as error:
            raise verify.WrongResult(f"{error}: {case}") from error
        torch.cuda.synchronize()
        done[variant.name] += 1
    return done


class Form(NamedTuple):
    """A form of a kernel that compute-sanitizer is to see, whatever default and spread are."""

    variant: str
    dim: int
    causal: bool
    changes: dict[str, Any]  #: beside the default of its head dim and mask, PERSISTENT, where that is a dimension

    def config(self, variant: Variant) -> dict[str, Any]:
        spec = Specialization("bf16", self.dim, self.dim, "causal" if self.causal else "full")
        config = {**variant.space.default(spec, 90), **self.changes}
        return config | {"PERSISTENT": True} if "PERSISTENT" in config else config


#: One consumer group, of programs that share a multiprocessor.
ONE = {"BLOCK_M": 64, "STAGES": 3, "Q_STAGES": 1, "PINGPONG": False}
#: Each on more tiles than there are programs, so that a program takes a second one.
FORMS = (
    Form("sm90/fwd", 64, True, {"Q_STAGES": 2}),  # the next tile's Q and scores, while this one ends
    *(
        Form("sm90/fwd", 64, causal, {**ONE, **sharing, "NUMBERED": numbered})
        for causal, sharing in (
            (True, {"BLOCK_N": 128, "maxnreg": 128}),  # two programs a multiprocessor
            (False, {"BLOCK_N": 64, "maxnreg": 80}),  # three
            (True, {"BLOCK_N": 64, "maxnreg": 80, "Q_STAGES": 2, "Q_IN_REGISTERS": True}),
        )
        for numbered in (False, True)
    ),
    *(
        Form("sm90/fwd", 128, causal, {"NUMBERED": True, "PINGPONG": turns})
        for causal, turns in product((False, True), repeat=2)
    ),
    *(
        Form("sm90/fwd", dim, causal, {"RESCALE": "never", **more})  # scores bounded by norms: two main loops
        for (dim, causal), more in zip(
            product((64, 128, 256), (False, True)), ({}, {}, {}, {}, {}, {"O_THROUGH": "q"}), strict=True
        )
    ),
    *(  # head dims in two parts, and of Q and K alone
        Form("sm90/fwd", dim, causal, {"IN_PARTS": parts, **more})
        for dim, causal, parts, more in (
            (96, True, "both", {"RESCALE": "never"}), (96, False, "qk", {"STAGES": 2}), (80, True, "both", {"Q_STAGES": 2}),
            (192, True, "both", {"RESCALE": "now"}), (40, False, "both", {"RESCALE": "never"}),
            (160, False, "both", {"BLOCK_N": 128, "STAGES": 2, "O_THROUGH": "q"}),
        )
    ),
    *(  # V in halves of a block
        Form("sm90/fwd", 192, causal, {"BLOCK_N": 128, "STAGES": 2, "O_THROUGH": "q", "PINGPONG": True, "NUMBERED": False,
                                       "IN_PARTS": "both", "V_HALVES": True, "RESCALE": rescale})
        for causal, rescale in ((False, "lazy"), (True, "lazy"), (False, "never"))
    ),
    *(
        Form(kernel, dim, causal, {"IN_PARTS": True, **more})
        for kernel, dim, causal, more in (
            ("sm90/bwd_dq", 192, True, {}), ("sm90/bwd_dq", 96, False, {}),
            ("sm90/bwd_dkdv", 192, True, {}), ("sm90/bwd_dkdv", 96, False, {}),
            ("sm90/bwd_fused", 96, True, {"ORDER": "behind"}), ("sm90/bwd_fused", 80, False, {"ORDER": "together"}),
            ("sm90/bwd_fused", 96, False, {"ORDER": "ahead"}), ("sm90/bwd_fused", 48, True, {"ORDER": "behind"}),
            ("sm90/bwd_fused", 40, False, {"BESIDE": True, "FINISH_BESIDE": True, "DYNAMIC": True}),
        )
    ),
    *(  # head dims up to 32 in tiles of as many columns
        Form("sm90/bwd_fused", dim, causal, {"NARROW": True, "REDUCE": "vector", **more})
        for dim, causal, more in (
            (32, True, {"ORDER": "behind", "EXPONENTIALS_FIRST": False}), (24, False, {"ORDER": "ahead", "STAGES": 3}),
            (32, False, {"ORDER": "together", "REDUCE": "tma", "BESIDE": True, "FINISH_BESIDE": True}),
            (16, True, {"ORDER": "together", "BLOCK_M": 64, "num_warps": 8, "EXPONENTIALS_FIRST": False}),
        )
    ),
    *(  # divisors from the host
        Form(kernel, dim, causal, {"DIVISORS": True, **more})
        for kernel, dim, causal, more in (
            ("sm90/fwd", 128, True, {"HEADS_PER_WAVE": 4}), ("sm90/fwd", 64, False, {"HEADS_PER_WAVE": 0}),
            ("sm90/fwd", 192, True, {"IN_PARTS": "both", "HEADS_PER_WAVE": 22}),
            ("sm90/bwd_dq", 256, True, {"HEADS_PER_WAVE": 4}), ("sm90/bwd_dkdv", 256, False, {"HEADS_PER_WAVE": 4}),
        )
    ),
    *(  # each kernel started before the one before it ends
        Form(kernel, dim, causal, {"EARLY_START": True, **more})
        for kernel, dim, causal, more in (
            ("sm90/bwd_fused", 64, True, {"BLOCK_M": 64, "ORDER": "together", "REDUCE": "vector", "num_warps": 8}),
            ("sm90/bwd_fused", 128, False, {"ORDER": "together", "REDUCE": "tma", "num_warps": 4}),
            ("sm90/bwd_dkdv", 256, True, {}), ("sm90/bwd_dkdv", 128, False, {}),
        )
    ),
    *(
        Form("sm90/bwd_fused", dim, causal, {
            "BLOCK_M": 128 if (dim, warps) == (64, 4) else 64, "ORDER": order, "REDUCE": reduce, "num_warps": warps,
            "PAIRS": tiles == "pairs", "DYNAMIC": tiles in ("counter", "beside", "both"),
            "BESIDE": tiles in ("beside", "both"), "FINISH_BESIDE": tiles == "both"})
        for dim, causal, order, reduce, warps, tiles in (
            (128, False, "together", "tma", 8, "counter"), (128, False, "together", "vector", 8, "in turn"),
            (128, False, "together", "tma", 4, "in turn"), (128, False, "behind", "vector", 4, "counter"),
            (128, False, "ahead", "tma", 4, "counter"),
            (128, True, "together", "vector", 8, "counter"), (128, True, "behind", "tma", 4, "counter"),
            (128, True, "behind", "tma", 4, "pairs"),
            (64, False, "together", "tma", 4, "in turn"), (64, False, "together", "tma", 4, "counter"),
            (64, False, "together", "vector", 8, "counter"), (64, False, "behind", "vector", 4, "counter"),
            (64, False, "ahead", "vector", 4, "in turn"),
            (64, True, "together", "tma", 4, "pairs"), (64, True, "together", "tma", 4, "counter"),
            (64, True, "together", "vector", 8, "pairs"), (64, True, "together", "vector", 8, "counter"),
            (64, True, "behind", "vector", 4, "pairs"), (64, True, "behind", "vector", 4, "counter"),
            (64, False, "together", "vector", 8, "beside"), (64, True, "together", "tma", 4, "beside"),
            (128, False, "behind", "vector", 4, "beside"), (128, True, "together", "vector", 8, "beside"),
            (64, False, "behind", "vector", 4, "both"), (64, True, "together", "tma", 4, "both"),
            (64, True, "together", "vector", 8, "both"), (128, False, "together", "vector", 8, "both"),
            (128, True, "behind", "vector", 4, "both"), (128, False, "together", "tma", 8, "both"),
        )
    ),
)  # fmt: skip


def small_cases(kernels: Sequence[str] = KERNELS) -> list[Fixed]:
    """What benchmarks/sanitize.py runs of these kernels: each variant's default, and of its spread each other binary, on a few
    tiles, as compute-sanitizer is a thousand times as slow as the GPU; and FORMS. ValueError names a form that is no longer
    legal."""
    variants = {variant.name: variant for variant in specialized(kernels)}
    cases: list[Fixed] = []
    for variant, dim, causal in product(variants.values(), (64, 128), (False, True)):
        problem = Problem("bf16", 1, 2, 1, 150, 277, dim, dim, CAUSAL if causal else FULL)
        if not refusal(variant, problem):
            binaries: list[dict[str, Any]] = []
            for config in (config_for(variant, problem), *spread(variant, problem)):
                if (binary := compiler.binary_config(variant, config)) not in binaries:
                    binaries.append(binary)
                    cases.append((variant, dict(config), problem))
    return cases + [case_of(form, variants[form.variant]) for form in FORMS if form.variant in variants]


def case_of(form: Form, variant: Variant) -> Fixed:
    """A form on more tiles than there are programs. ValueError: it is no longer legal."""
    gpu, config = dispatch.gpu_of(0), form.config(variant)
    # two query heads each, of one to three tiles of queries, and three of keys
    heads_kv = gpu.sm_count // 2 * (3 if config.get("maxnreg") else 1) + 4
    problem = Problem("bf16", 1, 2 * heads_kv, heads_kv, 150, 277, form.dim, form.dim, CAUSAL if form.causal else FULL)
    refused = limits.before_compile(variant, problem.specialization, config, gpu)
    if refused is not None:
        raise ValueError(f"{form}: not legal any more, {refused.name}: {refused.why}")
    return variant, config, problem


def small(kernels: Sequence[str] = KERNELS) -> None:
    """Runs small_cases. RuntimeError: one of them does not compile."""
    cases = small_cases(kernels)
    able = compilable(cases)
    if lost := [case for case in cases if case not in able]:
        raise RuntimeError(f"{len(lost)} of {len(cases)} cases do not compile: {lost}")
    for variant, config, problem in cases:
        inputs = reference.make_inputs(problem, "cuda")
        run(variant, config, problem, {"q": inputs.q, "k": inputs.k, "v": inputs.v, "do": inputs.do})
        torch.cuda.synchronize()
        print("ran", variant.name, problem, config, flush=True)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "stress":
        print(stress(float(rest[0]), int(rest[1]) if rest[1:] else 0, rest[2:] or KERNELS))
    else:
        small(rest or KERNELS)
