"""What docs/add-a-kernel.md promises, done to a copy of the repository: nothing is edited but the files named here, and the
tuner and the public call take it from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa2tune.launching import machine_code
from fa2tune.rows import reader
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store

pytestmark = pytest.mark.usefixtures("quick_starts")

ROOT = Path(__file__).parent.parent
TUNE = "tune", "--pass", "fwd", "--headdim", "64", "--causal", "--dtype", "fp16", "--seqlen", "512", "--workers", "1"

#: Runs one call in Triton's interpreter, with the cache that the environment names: prints what served it and how far its
#: result is from float64.
CALL = """
import json, torch, fa2tune
from fa2tune.measuring import reference
from fa2tune.spec.mask import CAUSAL
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, length, 64, dtype=torch.float16) for length in (70, 90, 90))
o = fa2tune.attention(q, k, v, causal=True)
exact = reference.attention(q.double(), k.double(), v.double(), mask=CAUSAL)[0]
served = fa2tune.explain(q, k, v, causal=True).kernels[0]
print(json.dumps({"config": served.config, "error": float((o - exact).abs().max())}))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copy = tmp_path / "tree"
    for name in ("fa2tune", "kernels", "search_spaces"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "cache").mkdir()  # no shipped rows
    return copy


@pytest.fixture
def run(tree: Path, tmp_path: Path) -> Callable[..., str]:
    def run(*arguments: str, status: int = 0, **environment: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(tree), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "home"),
               "TRITON_CACHE_DIR": str(tmp_path / "triton"), "FA2TUNE_KERNELS": "off", **environment}  # fmt: skip
        done = subprocess.run([sys.executable, *arguments], cwd=tree, env=env, capture_output=True, text=True)
        assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def tuned(run: Callable[..., str], path: Path, *options: str) -> list[Row]:
    run("-m", "fa2tune", *TUNE, "--cache", str(path), *options)
    return reader.read(path)


def called(run: Callable[..., str], path: Path) -> Any:
    return json.loads(run("-c", CALL, TRITON_INTERPRET="1", FA2TUNE_CACHE=str(path)).splitlines()[-1])


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new), encoding="utf-8")


def named(space: Path, name: str, default: str = "SPACE.default") -> None:
    """A space of the portable forward without LOADS, whose configs say what they are."""
    text = f"""
from fa2tune.search_spaces.lib.common import DESCRIPTOR_NEEDS_TMA
from fa2tune.spec.variant import Constraint, SearchSpace
dimensions = {{name: values for name, values in SPACE.dimensions.items() if name != "LOADS"}}
own = tuple(one for one in SPACE.constraints if one is not DESCRIPTOR_NEEDS_TMA)
tall = lambda config, spec, arch: config["BLOCK_M"] >= config["BLOCK_N"]
own += Constraint("tall_tiles", "tiles with more keys than rows", "so that there is one", tall),
SPACE = SearchSpace("fwd", {{**dimensions, "IMPLEMENTATION": ("{name}",)}}, own, {default})
"""
    space.write_text(space.read_text(encoding="utf-8") + text, encoding="utf-8")


def toy(tree: Path) -> None:
    """A kernel for compute capability 8.0: the portable forward by pointer alone, in two files, whose name says nothing."""
    for folder in ("kernels", "search_spaces"):
        (tree / folder / "sm80").mkdir(exist_ok=True)
        shutil.copy(tree / folder / "portable" / "fwd.py", tree / folder / "sm80" / "streamed.py")
    kernel = tree / "kernels" / "sm80" / "streamed.py"
    edit(kernel, "fa2tune.search_spaces.portable.fwd", "fa2tune.search_spaces.sm80.streamed")
    edit(kernel, "    kernel=fwd_kernel,\n", "    kernel=fwd_kernel,\n    min_arch=80,\n    max_arch=80,\n")
    edit(
        kernel,
        'constants=lambda spec, _config: {"NEGATE"',
        'constants=lambda spec, _config: {"LOADS": "pointer", "NEGATE"',
    )
    text = kernel.read_text(encoding="utf-8")
    start, end = text.index("    descriptors={"), text.index("    grid=")
    kernel.write_text(f"{text[:start]}    descriptors={{}},\n{text[end:]}", encoding="utf-8")
    space = tree / "search_spaces" / "sm80" / "streamed.py"
    named(
        space, "toy",
        'lambda spec, arch: {"IMPLEMENTATION": "toy", "BLOCK_M": 64, "BLOCK_N": 64, "MASKED": "inside", '
        '"HEADS_PER_WAVE": 1, "num_warps": 4, "num_stages": 2, "maxnreg": 0}',
    )  # fmt: skip


def test_a_kernel_is_two_files(tree: Path, run: Callable[..., str], tmp_path: Path) -> None:
    toy(tree)
    rows = tuned(run, tmp_path / "rows.sqlite", "--gpu", "a100", "--trials", "2")
    assert {"toy"} <= {row.implementation for row in rows} <= {"toy", "pointer", "descriptor", "sm80"}
    (row,) = (row for row in rows if row.implementation == "toy")
    assert row.config["IMPLEMENTATION"] == "toy" and "LOADS" not in row.config and row.time_us and row.errors
    shown = run("-m", "fa2tune", "cache", "show", "--cache", str(tmp_path / "rows.sqlite"))
    assert f"tiles with more keys than rows: {row.pruned['tall_tiles']}" in shown
    Store(tmp_path / "toy.sqlite").put([row])  # alone, so that no other is taken for faster
    found = called(run, tmp_path / "toy.sqlite")
    assert found["config"]["IMPLEMENTATION"] == "toy" and found["error"] < 2e-3
    assert "sm80/streamed" in run("-c", "from fa2tune.compiling import registry; print(*registry.variants())")


def test_where_no_row_serves_the_default_of_a_kernel_does_that_says_so(
    tree: Path, run: Callable[..., str], tmp_path: Path
) -> None:
    toy(tree)
    space, none = tree / "search_spaces" / "sm80" / "streamed.py", tmp_path / "none.sqlite"
    assert "LOADS" in called(run, none)["config"]
    edit(space, '"maxnreg": 0})', '"maxnreg": 0}, default_from=32, default_on=(80,))')
    found = called(run, none)
    assert found["config"]["IMPLEMENTATION"] == "toy" and found["error"] < 2e-3
    edit(space, "default_from=32", "default_from=512")  # wider heads alone
    assert "LOADS" in called(run, none)["config"]
    edit(space, "default_from=512, default_on=(80,)", "default_from=32, default_on=(90,)")  # another GPU alone
    assert "LOADS" in called(run, none)["config"]


#: As CALL, with a scale that the environment names.
SCALED_CALL = CALL.replace("causal=True", "causal=True, softmax_scale=scale").replace(
    "mask=CAUSAL", "mask=CAUSAL, softmax_scale=scale"
).replace("torch.manual_seed", 'scale = float(__import__("os").environ["SCALE"])\ntorch.manual_seed').replace(
    '"error"', '"refused": [one.why for one in served.refused], "error"'
)  # fmt: skip


def test_a_forward_without_the_sign_of_the_scale_serves_calls_of_a_positive_one(
    tree: Path, run: Callable[..., str], tmp_path: Path
) -> None:
    """Its row passes the tuner, whose calls have positive scales."""
    toy(tree)
    kernel = tree / "kernels" / "sm80" / "streamed.py"
    edit(kernel, " NEGATE: tl.constexpr,", "")
    edit(kernel, " NEGATE=NEGATE,", "")
    edit(kernel, ', "NEGATE": spec.negate}', "}")
    rows = tuned(run, tmp_path / "rows.sqlite", "--gpu", "a100", "--trials", "2")
    Store(tmp_path / "toy.sqlite").put([row for row in rows if row.implementation == "toy"])
    found = {
        scale: json.loads(
            run("-c", SCALED_CALL, TRITON_INTERPRET="1", FA2TUNE_CACHE=str(tmp_path / "toy.sqlite"), SCALE=scale)
        )
        for scale in ("0.2", "-0.2")
    }
    assert found["0.2"]["config"]["IMPLEMENTATION"] == "toy" and "LOADS" in found["-0.2"]["config"]
    assert found["-0.2"]["refused"] == [
        "sm80/streamed has no parameter NEGATE, and the call has a negative softmax_scale"
    ]
    assert max(one["error"] for one in found.values()) < 2e-3


def test_a_dimension_is_one_line_and_older_rows_serve(tree: Path, run: Callable[..., str], tmp_path: Path) -> None:
    """The kernel itself need not change to be searched over one more dimension, only to do something with it. This one
    is of all portable kernels that loop over tiles."""
    before = tuned(run, tmp_path / "before.sqlite", "--gpu", "a100", "--trials", "2")
    (portable,) = (row for row in before if row.implementation != "sm80")
    space, line = tree / "search_spaces" / "lib" / "common.py", '            "num_warps": (4, 8),\n'
    edit(
        space,
        "import DESCRIPTOR, POINTER, WARP_THREADS, Constraint, SearchSpace",
        "import DESCRIPTOR, POINTER, WARP_THREADS, Constraint, SearchSpace, added",
    )
    edit(space, line, f'            "FLIP": added(0, 1, older=0),\n{line}')
    found = called(run, tmp_path / "before.sqlite")
    assert found["config"] == {**portable.config, "FLIP": 0} and found["error"] < 2e-3
    after = tuned(run, tmp_path / "after.sqlite", "--gpu", "a100", "--trials", "2")
    found = [row for row in after if row.implementation != "sm80"]
    assert found and all(row.config["FLIP"] in (0, 1) for row in found)


def test_a_row_lives_as_long_as_its_machine_code(tree: Path, run: Callable[..., str], tmp_path: Path) -> None:
    """A row of edited sources is renewed by the hash of its machine code, without the sources from before; where the machine
    code is another it stays as it is."""
    path, kernel = tmp_path / "rows.sqlite", tree / "kernels" / "portable" / "fwd.py"
    rows = tuned(run, tmp_path / "tuned.sqlite", "--gpu", "a100", "--trials", "2")
    (before,) = (row for row in rows if row.implementation != "sm80")
    assert machine_code.known(before.binary_hash)
    Store(path).put([before])

    def renew(status: int = 0) -> str:
        said = run("-m", "fa2tune", "cache", "renew", "--cache", str(path), "--workers", "1", status=status)
        return said.rpartition(": ")[2].strip()

    assert renew() == "1 fresh"
    edit(kernel, "def fwd_kernel(", "def forward(")
    edit(kernel, "kernel=fwd_kernel,", "kernel=forward,")
    shared, line = tree / "kernels" / "lib" / "common.py", "pointers = start + (r[:, None] * stride_row + d[None, :])\n"
    edit(shared, line, "inside = r[:, None] * stride_row + d[None, :]\n        pointers = start + inside\n")
    assert renew() == "1 renewed"
    (after,) = reader.read(path)
    assert after == replace(before, kernel_hash=after.kernel_hash) and after.kernel_hash != before.kernel_hash
    assert renew() == "1 fresh"
    edit(kernel, "out = acc / total[:, None]", "out = acc / (total[:, None] + 1e-30)")
    assert renew(status=1) == "1 other machine code"
    assert reader.read(path) == [after]


#: Gradients of one call in Triton's interpreter: which kernels a row serves, and how far dQ is from float64.
BACKWARD_CALL = """
import json, torch, fa2tune
from fa2tune.spec.mask import CAUSAL
from fa2tune.measuring import reference
from fa2tune.spec.problem import Problem
inputs = reference.make_inputs(Problem("fp16", 1, 4, 2, 70, 90, 64, 64, CAUSAL), "cpu")
oracle, _ = reference.oracle_and_reference(inputs, mask=CAUSAL)
q, k, v = (t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
dq, _, _ = torch.autograd.grad(fa2tune.attention(q, k, v, causal=True), (q, k, v), inputs.do)
served = fa2tune.explain(q, k, v, causal=True).kernels
print(json.dumps({"kernels": [one.kernel for one in served if one.row], "times": float((dq / oracle["dq"]).median())}))
"""


def test_a_kernel_with_a_name_of_its_own_is_two_files(tree: Path, run: Callable[..., str], tmp_path: Path) -> None:
    """Another dQ, of a strategy of its own, tuned and served: its gradients are twice as large, so that results tell."""
    for folder in ("kernels", "search_spaces"):
        shutil.copy(tree / folder / "portable" / "bwd_dq.py", tree / folder / "portable" / "bwd_rows.py")
    kernel = tree / "kernels" / "portable" / "bwd_rows.py"
    edit(kernel, "fa2tune.search_spaces.portable.bwd_dq", "fa2tune.search_spaces.portable.bwd_rows")
    brings = 'products=(2, 1),\n    loop="bwd_dq",\n    title="backward, rows",\n'
    edit(
        kernel,
        'serves="bwd_dq",\n',
        f'serves="bwd_rows",\n    {brings}    strategy=("rows", "bwd_rows", "bwd_dkdv"),\n',
    )
    path = tmp_path / "rows.sqlite"
    run("-m", "fa2tune", *TUNE[:2], "bwd", *TUNE[3:], "--cache", str(path), "--gpu", "a100", "--trials", "2")
    rows = reader.read(path)
    own = [row for row in rows if row.strategy == "rows" or row.key.kernel in ("bwd_rows", "bwd_dkdv")]
    assert {row.key.kernel for row in own} == {"bwd", "bwd_rows", "bwd_dkdv"}
    assert all(row.time_us and row.errors for row in own)
    Store(tmp_path / "own.sqlite").put(own)
    edit(kernel, "acc * softmax_scale, start_m", "2.0 * acc * softmax_scale, start_m")
    found = json.loads(
        run("-c", BACKWARD_CALL, TRITON_INTERPRET="1", FA2TUNE_CACHE=str(tmp_path / "own.sqlite")).splitlines()[-1]
    )
    assert found["kernels"] == ["bwd", "bwd_rows", "bwd_dkdv"] and round(found["times"], 2) == 2
    run("-m", "fa2tune", "report", "--cache", str(path), "--out", str(tmp_path / "report.html"))
    assert "backward, rows" in (tmp_path / "report.html").read_text(encoding="utf-8")


#: Prefix language models: the keys of the prefix are seen by all queries, the others as under the causal mask.
PREFIX = """
import triton
import triton.language as tl

from fa2tune.spec.maskfile import MaskHooks


@triton.jit
def key_range(start, size, offset, seqlen_k, window, step):
    prefix = tl.minimum(window[0], seqlen_k)
    end = tl.maximum(tl.minimum(seqlen_k, tl.maximum(start + size + offset, 0)), prefix)
    full_end = tl.maximum(tl.minimum(seqlen_k, tl.maximum(start + 1 + offset, 0)), prefix) // step * step
    return 0, 0, full_end, end


@triton.jit
def query_range(start, size, offset, seqlen_q, window, step):
    last = tl.cdiv(seqlen_q, step) * step
    begin = tl.minimum(tl.maximum(start - offset, 0) // step * step, last)
    full_begin = tl.minimum(tl.cdiv(tl.maximum(start + size - 1 - offset, 0), step) * step, last)
    begin = tl.where(start < window[0], 0, begin)
    return begin, tl.where(start + size <= window[0], 0, full_begin), seqlen_q, seqlen_q


@triton.jit
def keep(rows, columns, offset, seqlen_k, window):
    return (columns < seqlen_k) & ((columns <= rows + offset) | (columns < window[0]))


@triton.jit
def sees(rows, offset, seqlen_k, window):
    return (rows + offset >= 0) | (window[0] > 0)


def visible(rows, columns, lengths, values):
    return (columns <= rows + lengths[1] - lengths[0]) | (columns < values[0])


MASK = MaskHooks("prefix", left=False, right=True, row_mask="causal", visible=visible, values={"prefix": (0, 2**31 - 1)})
"""
MASKED = """
import json, torch, fa2tune
from fa2tune import gpus
from fa2tune.calling import choosing
from fa2tune.compiling import registry
from fa2tune.measuring import reference, verify
from fa2tune.spec.problem import Problem
found = {"kernels": [], "refused": [], "pairs": []}
for lengths, prefix in (((70, 90), 40), ((150, 100), 20), ((150, 100), 0), ((70, 90), 1000)):
    mask = fa2tune.Mask("prefix", prefix)
    problem = Problem("fp16", 1, 4, 2, *lengths, 64, 64, mask)
    inputs = reference.make_inputs(problem, "cpu", with_dlse=True)
    q, k, v = (t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    o, lse = fa2tune.attention(q, k, v, mask=mask, return_lse=True)
    gradients = torch.autograd.grad((o, lse), (q, k, v), (inputs.do, inputs.dlse))
    named = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients))}
    verify.compare(named, *reference.oracle_and_reference(inputs, mask=mask))  # raises
    found["pairs"].append(mask.pairs(*lengths))
h200 = gpus.named("h200")
found["config"] = dict(choosing.choose(problem, "fwd", h200).config)
found["refused"] = [registry.refused_mask(variant, problem.specialization) for variant in registry.variants().values()]
print(json.dumps(found))
"""


COMPILED = """
from fa2tune.compiling import compiler, registry
from fa2tune.fleet import precompile
from fa2tune.spec.problem import Specialization
fwd, spec = registry.portable_of("fwd"), Specialization("bf16", 64, 64, "prefix")
print(compiler.build(fwd, spec, fwd.space.default(spec, 80), 80).kernel)
print("sm90/fwd causal" in next(iter(precompile.sources().values())))
"""


def test_a_mask_is_one_file(tree: Path, run: Callable[..., str], tmp_path: Path) -> None:
    (tree / "kernels" / "masks" / "prefix.py").write_text(PREFIX, encoding="utf-8")
    found = json.loads(run("-c", MASKED, TRITON_INTERPRET="1").splitlines()[-1])
    assert found["pairs"] == [
        sum(j <= i + keys - queries or j < prefix for i in range(queries) for j in range(keys))
        for (queries, keys), prefix in (((70, 90), 40), ((150, 100), 20), ((150, 100), 0), ((70, 90), 1000))
    ]
    # without hooks for Gluon the portable kernel serves, on a GPU that would run the warp-specialised one
    assert found["config"]["LOADS"] in ("pointer", "descriptor")
    refused = [why for why in found["refused"] if why]
    assert any("kernels/masks/prefix.py does not define blocks_below" in why for why in refused)
    assert len(refused) < len(found["refused"])
    # compiled for a GPU, too; and hashes of other masks' kernels do not mind that it is there
    assert run("-c", COMPILED).split() == ["portable/fwd", "True"]


#: Scores that grow ever slower: s / (1 + |s| / cap).
SOFTSIGN = """
import triton
import triton.language as tl

from fa2tune.spec.scorefile import ScoreHooks


@triton.jit
def apply(scores, score, rows, columns, offset, batch, head):
    return scores / (1.0 + tl.abs(scores) * score[0])


@triton.jit
def grad(ds, scores, score, rows, columns, offset, batch, head):
    slope = 1.0 - tl.abs(scores) * score[0]
    return ds * slope * slope


def transformed(scores, values, _places):
    return scores / (1.0 + scores.abs() / values[0])


def arguments(softmax_scale, values):
    return softmax_scale / values[0], 0.0


SCORE = ScoreHooks("softsign", transformed=transformed, values={"cap": (1e-3, 1e6)}, arguments=arguments)
"""
SCORED = """
from dataclasses import replace
from fa2tune.compiling.registry import portable_of
from fa2tune.launching import passes
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import KERNELS, STRATEGIES, Problem
from fa2tune.spec.score import Score
score = Score("softsign", 2.0)
problem = replace(Problem("fp16", 1, 4, 2, 70, 90, 32, 32, CAUSAL), score=score)
inputs = reference.make_inputs(problem, "cpu")
q, k, v, options = inputs.q, inputs.k, inputs.v, {"mask": CAUSAL, "softmax_scale": 32**-0.5, "score": score}
oracle, same = reference.oracle_and_reference(inputs, **options)
plain, _ = reference.oracle_and_reference(inputs, mask=CAUSAL, softmax_scale=32**-0.5)
configs = {name: portable_of(name).space.default(problem.specialization, 80) for name in KERNELS}
o, lse = passes.forward(q, k, v, **options, config=configs["fwd"])
verify.compare({"o": o, "lse": passes.lse_of(lse)}, oracle, same)  # raises
for strategy in STRATEGIES:
    found = passes.backward(inputs.do, None, q, k, v, o, lse, **options, strategy=strategy, configs=configs)
    verify.compare(dict(zip(("dq", "dk", "dv"), found)), oracle, same)
print(float((oracle["o"] - plain["o"]).abs().max()))
"""
#: The public calls, eager and as a graph: of one sequence, and of the same packed.
SCORED_CALLS = """
import json, torch, fa2tune
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Problem
score = fa2tune.Score("softsign", 2.0)
inputs = reference.make_inputs(Problem("fp16", 1, 4, 2, 70, 70, 32, 32, CAUSAL), "cpu", with_dlse=True)
oracle, same = reference.oracle_and_reference(inputs, mask=CAUSAL, score=score)
starts = torch.tensor([0, 70], dtype=torch.int32)
def packed(q, k, v, **options):
    o, lse = fa2tune.attention_varlen(*(t[0].transpose(0, 1) for t in (q, k, v)), starts, **options)
    return o.transpose(0, 1)[None], lse[None]
for call in (fa2tune.attention, packed):
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        q, k, v = (t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        o, lse = run(q, k, v, causal=True, return_lse=True, score=score)
        gradients = torch.autograd.grad((o, lse), (q, k, v), (inputs.do, inputs.dlse))
        found = {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients))}
        verify.compare(found, oracle, same)  # raises
said = []
for wrong in ("softsign", "softsine", fa2tune.Score("softsign", 0)):
    try:
        fa2tune.attention(q, k, v, score=wrong)
    except ValueError as error:
        said.append(str(error))
print(json.dumps([*said, fa2tune.explain(q, k, v, score=score).verdict]))
"""


def test_a_score_term_is_one_file(tree: Path, run: Callable[..., str]) -> None:
    (tree / "kernels" / "scores" / "softsign.py").write_text(SOFTSIGN, encoding="utf-8")
    assert float(run("-c", SCORED, TRITON_INTERPRET="1").splitlines()[-1]) > 0.05, "it does change the result"
    number, name, value, verdict = json.loads(run("-c", SCORED_CALLS, TRITON_INTERPRET="1").splitlines()[-1])
    assert number == "score: got 'softsign', softsign has 1 value: fa2tune.Score('softsign', cap)"
    assert name == "score: got 'softsine', allowed are none, softcap, softsign"
    assert value.startswith("score: got Score('softsign', 0.0), cap must be from 0.001")
    assert verdict.startswith("Not tuned")  # the copy has no rows
    explained = run("-m", "fa2tune", "explain", "--gpu", "a100", "--score", "softsign,2", "--json")
    assert json.loads(explained)["problem"]["score"] == "softsign 2"


#: A term of rows, columns, sequences and heads: gradients of dense calls, then of packed sequences one by one.
PLACED_CALLS = """
import torch, fa2tune
from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Problem
score, lengths = fa2tune.Score("alibi", 4), ((70, 90), (60, 40))
def gradients(call, inputs):
    q, k, v = (t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    o, lse = call(q, k, v, causal=True, return_lse=True, score=score)
    found = torch.autograd.grad((o, lse), (q, k, v), (inputs.do, inputs.dlse))
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), found))}
for sides in lengths:
    inputs = reference.make_inputs(Problem("fp16", 2, 4, 2, *sides, 32, 32, CAUSAL), "cpu", with_dlse=True)
    found = gradients(fa2tune.attention, inputs)
    verify.compare(found, *reference.oracle_and_reference(inputs, mask=CAUSAL, score=score))  # raises
starts = [torch.tensor([0, *side]).cumsum(0).to(torch.int32) for side in zip(*lengths)]
def packed(q, k, v, **options):
    o, lse = fa2tune.attention_varlen(*(t[0].transpose(0, 1) for t in (q, k, v)), *starts, **options)
    return o.transpose(0, 1)[None], lse[None]
inputs = reference.make_inputs(Problem("fp16", 1, 4, 2, 130, 130, 32, 32, CAUSAL), "cpu", with_dlse=True)
found, ends = gradients(packed, inputs), [0, 0]
for number, sides in enumerate(lengths):
    rows, keys = (slice(end, end + side) for end, side in zip(ends, sides))
    ends = [rows.stop, keys.stop]
    one = reference.Inputs(*(getattr(inputs, name)[:, :, keys if name in "kv" else rows]
                             for name in ("q", "k", "v", "do", "dlse")))
    right = reference.oracle_and_reference(one, mask=CAUSAL, score=score, sequence=number)
    verify.compare({name: t[:, :, keys if name in ("dk", "dv") else rows] for name, t in found.items()}, *right)
print(fa2tune.explain(inputs.q, inputs.k, inputs.v, score=score).problem.score)
"""


def test_a_term_may_take_rows_columns_sequences_and_heads(tree: Path, run: Callable[..., str]) -> None:
    shutil.copy(ROOT / "tests" / "score_terms" / "alibi.py", tree / "kernels" / "scores")
    assert run("-c", PLACED_CALLS, TRITON_INTERPRET="1").splitlines()[-1] == "alibi 4"


def test_a_gpu_is_one_row(tree: Path, run: Callable[..., str], tmp_path: Path) -> None:
    row = '    _gpu("a100-toy", ("A100-TOY",), "ga100", 80, 96, 1410, 280.0, 140.0, 17.5, 40, 40, 1400),\n'
    edit(tree / "fa2tune" / "catalogue.py", '    _gpu("a100-sxm-40gb",', f'{row}    _gpu("a100-sxm-40gb",')
    rows = tuned(run, tmp_path / "rows.sqlite", "--gpu", "a100-toy", "--trials", "2")
    assert rows and {(row.key.gpu, row.key.sm_count, row.key.arch) for row in rows} == {("a100-toy", 96, 80)}
    assert "a100-toy" in run("-m", "fa2tune", "gpus")


#: Tests that look at every kernel, term or GPU there is.
EVERY = ("compiling/test_variants", "compiling/test_composition", "spec/test_score", "rows/test_pruned", "test_gpus")


def test_tests_need_no_entry_of_what_is_added(tree: Path, run: Callable[..., str]) -> None:
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    toy(tree)
    alternative(tree)
    term = SOFTSIGN.replace("softsign", "bent").replace(
        "=arguments)", "=arguments, numbered=False)"
    )  # a name before others
    (tree / "kernels" / "scores" / "bent.py").write_text(term, encoding="utf-8")
    row = '    _gpu("a100-half", ("A100-HALF",), "ga100", 80, 96, 1410, 138.6, 69.3, 17.3, 40, 40, 1400),\n'
    edit(tree / "fa2tune" / "catalogue.py", '    _gpu("a100-sxm-40gb",', f'{row}    _gpu("a100-sxm-40gb",')
    path = f"{tree}{os.pathsep}{tree / 'tests'}"
    files = [f"tests/{name}.py" for name in EVERY]
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not are_shipped", *files, PYTHONPATH=path)
    assert " passed" in said and "a100-half" in run("-m", "fa2tune", "gpus")


OF_FWD = """
from dataclasses import replace
from fa2tune.calling import defaults
from fa2tune.compiling import fingerprint, registry
known = registry.variants_of("fwd")
hashes = fingerprint.kernel_hashes()
print([one.name for one in known], registry.portable_of("fwd").name, [one.portable for one in known])
print([hashes[f"fwd{filed} full"] == fingerprint.kernel_hash(registry.variant_named(name), "full")
       for filed, name in (("", "portable/fwd"), (" alt", "portable/alt"))], "fwd alt full" in list(hashes))
"""


def alternative(tree: Path, loads: bool = False) -> None:
    """A second implementation in the folder of portable kernels, whose path comes before the portable one's."""
    for folder in ("kernels", "search_spaces"):
        shutil.copy(tree / folder / "portable" / "fwd.py", tree / folder / "portable" / "alt.py")
    edit(tree / "kernels" / "portable" / "alt.py", "portable.fwd", "portable.alt")
    if not loads:
        named(tree / "search_spaces" / "portable" / "alt.py", "alt")


def test_another_implementation_beside_the_portable_kernel_does_not_take_its_place(
    tree: Path, run: Callable[..., str]
) -> None:
    alternative(tree)
    names, hashes = run("-c", OF_FWD).splitlines()
    assert names == "['portable/fwd', 'portable/alt', 'sm80/fwd', 'sm90/fwd'] portable/fwd [True, False, False, False]"
    assert hashes == "[True, True] True"


def test_two_portable_kernels_are_an_error(tree: Path, run: Callable[..., str]) -> None:
    alternative(tree, loads=True)
    said = run("-c", f"try:\n    exec({OF_FWD!r})\nexcept ValueError as error:\n    print(error)")
    assert said.startswith("kernel fwd: portable/alt and portable/fwd are both portable, as their configs have LOADS")


#: A call of few queries, whose keys are split among programs; how its output relates to the right one, and what runs.
SPLIT_CALL = """
import json, torch, fa2tune
from fa2tune.calling.schedules import key_splits_schedule
from fa2tune.measuring import reference
from fa2tune.spec.mask import CAUSAL
key_splits_schedule.MEASURED_ON = (80, 90)  # the interpreter passes for an A100
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, length, 16) for heads, length in ((4, 2), (2, 400), (2, 400)))
o = fa2tune.attention(q, k, v, causal=True)
exact = reference.attention(q.double(), k.double(), v.double(), mask=CAUSAL)[0]
served = fa2tune.explain(q, k, v, causal=True).kernels[0]
print(json.dumps({"runs": list(served.runs), "split": served.split, "times": float((o / exact).median()),
                  "even": bool((o / exact).std() < 1e-3)}))
"""


def helper(tree: Path, kernel: str, name: str, factor: tuple[str, str]) -> tuple[Path, Path]:
    """A copy of a portable kernel in another folder, of which ``factor`` changes a line so that results tell; the file of its
    search space."""
    for folder in ("kernels", "search_spaces"):
        shutil.copy(tree / folder / "portable" / f"{kernel}.py", tree / folder / "sm80" / f"{name}.py")
    copy = tree / "kernels" / "sm80" / f"{name}.py"
    edit(copy, *factor)
    edit(copy, f"fa2tune.search_spaces.portable.{kernel}", f"fa2tune.search_spaces.sm80.{name}")
    return copy, tree / "search_spaces" / "sm80" / f"{name}.py"


THRICE = "acc / total[:, None])", "3.0 * acc / total[:, None])"  # of fwd_combine


def test_another_kernel_of_a_role_is_two_files(tree: Path, run: Callable[..., str]) -> None:
    """What puts parts together, and a forward with keys in parts, each served in place of the portable one."""

    def called() -> Any:
        return json.loads(run("-c", SPLIT_CALL, TRITON_INTERPRET="1").splitlines()[-1])

    before = called()
    assert before["runs"] == ["fwd_split", "fwd_combine"] and before["even"] and round(before["times"], 3) == 1
    helper(tree, "fwd_combine", "merged", THRICE)
    after = called()
    assert after["runs"] == ["fwd_split", "sm80/merged"] and after["split"] == before["split"]
    assert after["even"] and round(after["times"], 3) == 3

    doubled = "acc, mask=mask)\n        if LEFT_BOUNDED", "2.0 * acc, mask=mask)\n        if LEFT_BOUNDED"
    kernel, space = helper(tree, "fwd_split", "few", doubled)
    edit(space, '"LOADS": DESCRIPTOR if described else POINTER,', '"IMPLEMENTATION": "few",')
    named(space, "few")
    edit(kernel, '{"k": ("BLOCK_N", "BLOCK_D"), "v": ("BLOCK_N", "BLOCK_DV")}', "{}")
    edit(kernel, '{"NEGATE": spec.negate}', '{"NEGATE": spec.negate, "LOADS": "pointer"}')
    after = called()
    assert after["runs"] == ["sm80/few", "sm80/merged"] and after["split"]["IMPLEMENTATION"] == "few"
    assert after["even"] and round(after["times"], 3) == 6

    for name, other in (("pointer", "portable/fwd_split"), ("warp_specialized", "sm90/fwd_split")):
        space.write_text(space.read_text(encoding="utf-8").replace('"few"', f'"{name}"'), encoding="utf-8")
        both = run("-c", f"try:\n    exec({SPLIT_CALL!r})\nexcept ValueError as e:\n    print(e)", TRITON_INTERPRET="1")
        assert f"are both {name}" in both and "sm80/few" in both and other in both
        space.write_text(space.read_text(encoding="utf-8").replace(f'"{name}"', '"few"'), encoding="utf-8")


#: Which kernel puts parts together on these GPUs.
COMBINED = """
from fa2tune.compiling import registry, support
from fa2tune.spec.problem import Specialization
for arch in (80, 90):
    try:
        print(support.companion("fwd_combine", Specialization("bf16", 64, 64, "full"), arch).name)
    except ValueError as error:
        print(error)
"""


def test_two_kernels_of_a_role_for_the_same_gpus_are_an_error(tree: Path, run: Callable[..., str]) -> None:
    kernel, _ = helper(tree, "fwd_combine", "merged", THRICE)
    edit(kernel, '    role="fwd_combine",\n', '    role="fwd_combine",\n    max_arch=80,\n')
    assert run("-c", COMBINED).splitlines() == ["sm80/merged", "portable/fwd_combine"]
    for folder in ("kernels", "search_spaces"):
        shutil.copy(tree / folder / "sm80" / "merged.py", tree / folder / "sm80" / "again.py")
    edit(tree / "kernels" / "sm80" / "again.py", "sm80.merged", "sm80.again")
    both, portable = run("-c", COMBINED).splitlines()
    assert both.startswith("role fwd_combine: sm80/again and sm80/merged both compute such a call on 8.0")
    assert portable == "portable/fwd_combine"
    edit(kernel, "max_arch=80", "max_arch=89")  # the other is of fewer GPUs
    assert run("-c", COMBINED).splitlines() == ["sm80/again", "portable/fwd_combine"]


def test_a_kernel_that_lacks_what_its_role_asks_is_refused_by_name(tree: Path, run: Callable[..., str]) -> None:
    kernel, space = helper(tree, "fwd_combine", "merged", THRICE)
    edit(kernel, '"stats": "fp32", ', "")
    edit(space, '        "SPLITS": tuple(', '        "PARTS": tuple(')
    edit(space, "def config_of(arch: int, splits: int)", "def config_of(arch: int, parts: int)")
    edit(space, '"SPLITS": splits', '"SPLITS": parts')
    said = (
        "kernels/sm80/merged.py: role fwd_combine: it lacks tensor stats, dimension SPLITS of its search space, "
        "config_of(arch, splits) of its search space's file (fa2tune/spec/roles.py)"
    )
    assert run("-c", COMBINED).splitlines() == [said, said]
    edit(kernel, 'role="fwd_combine"', 'role="combine"')
    listed = "try:\n    import fa2tune.compiling.registry as r; r.variants()\nexcept ValueError as e: print(e)"
    assert run("-c", listed).startswith("kernels/sm80/merged.py: role: got 'combine', allowed are ")
    edit(kernel, 'role="combine"', 'ordered_form_of="sm80/no_such"')
    said = "kernels/sm80/merged.py: ordered_form_of: got 'sm80/no_such', which is no kernel's path"
    assert run("-c", listed).splitlines() == [said]


def test_stray_files_in_a_folder_of_kernels_are_not_read(tree: Path, run: Callable[..., str]) -> None:
    for folder in ("kernels", "search_spaces"):
        (tree / folder / "portable" / ".#fwd.py").symlink_to("someone@somewhere.1234")
        (tree / folder / "portable" / "._fwd.py").write_bytes(b"\x00\x05\x16\x07\xff")
    (tree / "kernels" / "sm90" / "__init__.py").touch()
    code = "from fa2tune.compiling import fingerprint, registry; from fa2tune.report import facts; facts.reasons(); "
    assert "__init__" not in run("-c", f"{code}fingerprint.source_digest(); print(*registry.variants())")
