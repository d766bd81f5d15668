"""Scratch: packed Hopper forward, correctness (check) and times (time)."""
import itertools, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
from fa2tune import gpus
from fa2tune.calling import dispatch
from fa2tune.compiling import compiler, limits, registry
from fa2tune.launching import passes
from fa2tune.measuring import reference
from fa2tune.spec.extent import RAGGED, Extent
from fa2tune.spec.mask import CAUSAL, FULL, Mask, band
from fa2tune.spec.problem import Specialization

T0 = time.time()
H = dispatch.gpu_of(0) if torch.cuda.is_available() else gpus.named("h200")
DT = {"bf16": torch.bfloat16, "fp16": torch.float16}
BASE = dict(BLOCK_M=128, BLOCK_N=128, STAGES=2, Q_STAGES=1, PINGPONG=True, RESCALE="lazy", Q_IN_REGISTERS=False, O_THROUGH="own",
            NUMBERED=True, IN_PARTS="none", HEADS_PER_WAVE=0, maxnreg=0, num_warps=4)
C = {
    "128": BASE, "128q2": {**BASE, "Q_STAGES": 2, "Q_IN_REGISTERS": True, "NUMBERED": False},
    "128q2s": {**BASE, "Q_STAGES": 2}, "128r": {**BASE, "Q_IN_REGISTERS": True, "NUMBERED": False},
    "128n64": {**BASE, "BLOCK_N": 64, "STAGES": 3, "Q_IN_REGISTERS": True},
    "64s": {**BASE, "BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3, "PINGPONG": False, "NUMBERED": False, "maxnreg": 80, "Q_IN_REGISTERS": True},
    "64m": {**BASE, "STAGES": 3, "Q_STAGES": 2}, "64l": {**BASE, "BLOCK_M": 192, "STAGES": 3},
    "256": {**BASE, "BLOCK_N": 64, "O_THROUGH": "halves", "NUMBERED": False, "PINGPONG": False},
    "256q": {**BASE, "BLOCK_N": 64, "O_THROUGH": "q", "NUMBERED": False},
}
def spec_default(dtype, d, dv, mask):
    return registry.variant_of("fwd", {}).space.default(Specialization(dtype, d, dv, mask, extent=RAGGED), 90)

PACK = {
    "odd": ((1, 1), (0, 0), (513, 513), (77, 77), (127, 127), (128, 128), (129, 129), (1000, 1000), (63, 63), (64, 64), (65, 65)),
    "unequal": ((5, 900), (0, 40), (700, 300), (129, 0), (64, 64), (1, 2000), (257, 129)),
    "many": tuple((1 + n % 37, 1 + n % 41) for n in range(300)),
}
SPARE = 70

def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)

def views(*ts):
    return [t.transpose(0, 1)[None] for t in ts]

def plan_of(q, k, v, n, mask, config, longest=0):
    vs = views(q, k, v)
    problem = passes.describe(*vs, mask, q.shape[-1] ** -0.5, extent=Extent(RAGGED, n, longest))
    return passes.ForwardPlan(problem, *vs, q.shape[-1] ** -0.5, config)

def run(plan, q, k, v, sq, sk):
    """Into memory full of NaN."""
    o, lse, *block = plan.fresh()
    o.fill_(float("nan")); lse.fill_(float("nan"))
    for b in block: b.fill_(0x7f)
    plan.chain((*views(q, k, v), o, lse, sq, sk, *block))
    return o[0].transpose(0, 1), lse[0]

def check(dtype, pack, mask, cname, heads=(4, 2), dims=(128, 128)):
    lengths = PACK[pack]
    lq, lk = zip(*lengths)
    g = torch.Generator("cuda").manual_seed(1)
    q, k, v = (torch.randn(n + SPARE, h, d, device="cuda", generator=g, dtype=torch.float32).to(DT[dtype])
               for n, h, d in ((sum(lq), heads[0], dims[0]), (sum(lk), heads[1], dims[0]), (sum(lk), heads[1], dims[1])))
    q[sum(lq):] = float("nan"); k[sum(lk):] = float("nan"); v[sum(lk):] = float("inf")
    config = C.get(cname) or spec_default(dtype, *dims, mask.name)
    sq, sk = offsets(lq), offsets(lk)
    plan = plan_of(q, k, v, len(lengths), mask, config)
    o, lse = run(plan, q, k, v, sq, sk)
    again = run(plan, q, k, v, sq, sk)
    worst = worst_lse = 0.0
    a = b = 0
    for nq, nk in lengths:
        if nq:
            one = [t.transpose(0, 1)[None].double() for t in (q[a:a+nq], k[b:b+nk], v[b:b+nk])]
            ro, rl = reference.attention(*one, mask=mask)
            ro, rl = ro[0].transpose(0, 1), rl[0]
            mo, ml = o[a:a+nq].double(), lse[:, a:a+nq].double()
            dead = rl == -torch.inf
            ok = torch.equal(ml == -torch.inf, dead)
            worst = max(worst, (mo - ro).abs().nan_to_num(9).max().item())
            worst_lse = max(worst_lse, 9 if not ok else (ml - rl)[~dead].abs().nan_to_num(9).max().item() if (~dead).any() else 0)
        a += nq; b += nk
    tail = not o[a:].any().item() and bool((lse[:, a:] == -torch.inf).all()) and not o[a:].isnan().any().item()
    same = torch.equal(o, again[0]) and torch.equal(lse, again[1])
    # NaN in every second sequence reaches only itself
    o0, l0 = o.clone(), lse.clone()
    q2, k2, v2 = q.clone(), k.clone(), v.clone()
    a = b = 0; keep = torch.ones(len(o), dtype=torch.bool, device="cuda")
    for i, (nq, nk) in enumerate(lengths):
        if i % 2:
            q2[a:a+nq] = k2[b:b+nk] = v2[b:b+nk] = float("nan"); keep[a:a+nq] = False
        a += nq; b += nk
    o2, l2 = run(plan, q2, k2, v2, sq, sk)
    clean = torch.equal(o2[keep], o0[keep]) and torch.equal(l2[:, keep], l0[:, keep])
    good = worst < (0.02 if dtype == "bf16" else 0.004) and worst_lse < 2e-3 and tail and same and clean
    print(f"{'ok  ' if good else 'FAIL'} {dtype} {pack:8} {str(mask):14} {cname:8} {dims} o {worst:.1e} lse {worst_lse:.1e} tail {tail} same {same} clean {clean}", flush=True)
    return good

CASES = [
    *(("bf16", p, m, c, (4, 2), (128, 128)) for p in PACK for m in (CAUSAL, FULL) for c in ("128", "128q2")),
    *(("bf16", p, m, "128", (4, 2), (128, 128)) for p in ("odd", "unequal") for m in (band(128, 0), band(65, 300), Mask("chunked", 200))),
    *(("fp16", p, CAUSAL, c, (6, 2), (64, 64)) for p in PACK for c in ("64s", "64m", "64l")),
    ("fp16", "unequal", CAUSAL, "128n64", (4, 4), (128, 128)), ("bf16", "odd", CAUSAL, "128q2s", (4, 4), (128, 128)),
    *(("bf16", p, CAUSAL, c, (2, 1), (256, 256)) for p in ("odd", "unequal") for c in ("256", "256q")),
    ("bf16", "unequal", FULL, "default", (2, 1), (192, 128)), ("bf16", "odd", CAUSAL, "default", (2, 1), (96, 96)),
    ("bf16", "odd", CAUSAL, "default", (2, 1), (72, 40)), ("bf16", "odd", FULL, "default", (2, 1), (80, 80)),
]

def precompile(jobs):
    variant = registry.variant_of("fwd", {})
    found = {}
    for dtype, d, dv, mask, cname, extent in jobs:
        spec = Specialization(dtype, d, dv, mask.name, extent=extent)
        config = cname if isinstance(cname, dict) else C.get(cname) or variant.space.default(spec, 90)
        refused = limits.before_compile(variant, spec, config, H)
        if refused: print("refused", cname, spec, refused)
        found[str((spec, sorted(compiler.binary_config(variant, config).items())))] = (spec, compiler.binary_config(variant, config))
    with ThreadPoolExecutor(16 if torch.cuda.is_available() else 2) as pool:
        list(pool.map(lambda j: compiler.compile_kernel(variant, *j, 90), found.values()))
    print(f"compiled {len(found)} in {time.time() - T0:.0f} s", flush=True)

def checks():
    precompile([(c[0], *c[5], c[2], c[3], RAGGED) for c in CASES])
    results = []
    for case in CASES:
        try:
            results.append(check(*case))
        except Exception as error:
            print("FAIL", case, type(error).__name__, str(error)[:300], flush=True)
            results.append(False)
            if "CUDA" in str(error): break
    # what a graph replays with other lengths, wrong offsets
    q, k, v = (torch.randn(4096, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    plan = plan_of(q, k, v, 3, CAUSAL, C["128"])
    for wrong in ([-5, 100, 40000, 7], [300, 20, 512, 100], [0, 2**31 - 1, 5, 4096], [0, 0, 0, 0]):
        bad = torch.tensor(wrong, device="cuda", dtype=torch.int32)
        plan(*views(q, k, v), bad, bad)
    torch.cuda.synchronize()
    print(f"{sum(results)} of {len(CASES)} right, wrong offsets passed; {time.time() - T0:.0f} s")

def docs(n, total, longest):
    best = None
    for s in range(400):
        g = torch.Generator().manual_seed(s)
        x = torch.randn(n, generator=g).mul(0.9).exp(); x = (x / x.sum() * total).round().int().clamp(min=1)
        x[-1] += total - int(x.sum())
        if int(x.min()) > 0 and (best is None or abs(int(x.max()) - longest) < abs(int(best.max()) - longest)): best = x
    return tuple(best.tolist())

def graph_of(call):
    for _ in range(2): call()
    torch.cuda.synchronize()
    s = torch.cuda.Stream(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=s):
        for _ in range(8): call()
    return g

def times(calls, rounds=12):
    graphs = {name: graph_of(c) for name, c in calls.items()}
    got = {name: [] for name in calls}
    for g in graphs.values(): g.replay()
    for _ in range(rounds):
        for name, g in graphs.items():
            a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            a.record(); g.replay(); b.record(); torch.cuda.synchronize()
            got[name].append(a.elapsed_time(b) * 1e3 / 8)
    return {name: sorted(t)[len(t) // 2] for name, t in got.items()}

def timing():
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    jobs = [
        ("16x1024 h16x128", (1024,) * 16, (16, 16), 128, ("128", "128q2s", "128r", "128n64")),
        ("4x4096 h16x128", (4096,) * 4, (16, 16), 128, ("128", "128r")),
        ("20docs 32k h16x128", docs(20, 32768, 5067), (16, 16), 128, ("128", "128r", "128q2s")),
        ("53docs 32k h32/8x128", docs(53, 32768, 3756), (32, 8), 128, ("128", "128r", "128q2s", "128n64")),
        ("57docs 16k h32x64", docs(57, 16384, 1820), (32, 32), 64, ("64s", "64m", "64l")),
        ("32x512 h32x64", (512,) * 32, (32, 32), 64, ("64s", "64m")),
        ("4x4096 h32x64", (4096,) * 4, (32, 32), 64, ("64m", "64l")),
    ]
    precompile([("bf16", d, d, CAUSAL, c, e) for _, _, _, d, cs in jobs for c in cs for e in (RAGGED, "dense")])
    for _ in range(100): m @ m
    for name, lengths, heads, d, cs in jobs:
        total = sum(lengths)
        q, k, v = (torch.randn(total, h, d, device="cuda", dtype=torch.bfloat16) for h in (heads[0], heads[1], heads[1]))
        cu = offsets(lengths)
        flops = 4 * d * heads[0] * sum(n * (n + 1) / 2 for n in lengths)
        calls = {}
        for c in cs:
            p = plan_of(q, k, v, len(lengths), CAUSAL, C[c])
            calls[c] = lambda p=p: p(*views(q, k, v), cu, cu)
        for w in sorted({1, 4, heads[0]}):
            p = plan_of(q, k, v, len(lengths), CAUSAL, {**C[cs[0]], "HEADS_PER_WAVE": w}) if w in (4, ) else None
            if p: calls[f"{cs[0]},w{w}"] = lambda p=p: p(*views(q, k, v), cu, cu)
        vs = views(q, k, v)
        problem = passes.describe(*vs, CAUSAL, d**-0.5, extent=Extent(RAGGED, len(lengths)))
        portable = passes.ForwardPlan(problem, *vs, d**-0.5, dispatch.choose(problem, "fwd", H, False).config)
        calls["portable"] = lambda: portable(*views(q, k, v), cu, cu)
        if len(set(lengths)) == 1:
            dense = [t.unflatten(0, (len(lengths), -1)).transpose(1, 2) for t in (q, k, v)]
            asked = passes.describe(*dense, CAUSAL, d**-0.5)
            for c in cs:
                p = passes.ForwardPlan(asked, *dense, d**-0.5, C[c])
                calls[f"dense {c}"] = lambda p=p: p(*dense)
            p2 = passes.ForwardPlan(asked, *dense, d**-0.5, dispatch.choose(asked, "fwd", H, True).config)
            calls["dense row"] = lambda: p2(*dense)
        try:
            t = times(calls)
        except Exception as error:
            print("FAIL", name, str(error)[:300]); continue
        print(f"{name}: longest {max(lengths)}; us (TFLOP/s): " + ", ".join(f"{n} {us:.1f} ({flops / us / 1e6:.0f})" for n, us in t.items()), flush=True)
    # the order kernel alone
    print(f"{time.time() - T0:.0f} s")

if __name__ == "__main__":
    checks() if sys.argv[1] == "check" else timing()
