"""What a request asks for: targets, devices, limits of its values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from tuner_runs import A100, H100, H200, HERE, asked

from fa2tune import gpus
from fa2tune.cli.tune import tune as tune_command
from fa2tune.rows import reader
from fa2tune.rows.row import MEASURED, PORTED, PREDICTED, SIBLING
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.plan import Target, TuneRequest, make_plan, resolve_target

pytestmark = pytest.mark.usefixtures("portable_kernels", "quick_starts")


def test_lists_are_given_with_commas_or_one_by_one(bench, monkeypatch):
    asked = []
    monkeypatch.setattr(
        plan, "make_plan", lambda request: asked.append(request) or (_ for _ in ()).throw(ValueError("stop"))
    )
    for arguments in (
        "--headdim 64,128 --seqlen 4096,512 --dtype fp16,bf16 --kernel fwd,bwd_dq",
        "--headdim 64 --headdim 128 --seqlen 4096 --seqlen 512 --dtype fp16 --dtype bf16 --kernel fwd --kernel bwd_dq",
        "--headdim 64,128 --headdim 64 --seqlen 512,4096 --dtype fp16,bf16,fp16 --kernel fwd --kernel bwd_dq,fwd",
        "",
    ):
        assert CliRunner().invoke(tune_command, arguments.split()).exit_code == 2
    lists = [(r.head_dims, r.buckets, r.dtypes, r.kernels) for r in asked]
    assert lists[:3] == [((64, 128), (512, 4096), ("fp16", "bf16"), ("fwd", "bwd_dq"))] * 3
    assert asked[3] == TuneRequest()


def test_the_command_refuses_before_it_compiles(bench):
    for arguments, says in [
        (["--gpu", "a1000"], "close to it are a100"),
        (["--gpu", "a100", "--headdim", "12"], "headdim: got 12"),
        (["--gpu", "a100", "--headdim", "64,x"], "'--headdim': got '64,x', expected numbers with commas between"),
        (["--gpu", "a100", "--headdim", "64,"], "'--headdim': got '64,'"),
        (["--gpu", "a100", "--seqlen", "512,1000"], "seqlen: got 1000, allowed are 512, 1024"),
        (["--gpu", "a100", "--dtype", "bf16,fp8"], "dtype: got 'fp8', allowed are bf16, fp16, fp32"),
        (["--gpu", "a100", "--pass", "fwd", "--kernel", "fwd,bwd_dq"], "kernel: got 'bwd_dq', allowed are fwd"),
        (["--gpu", "a100", "--trials", "0"], "trials: got 0"),
        (["--gpu", "a100", "--both", "--full"], "--both: not with --causal or --full"),
        (["--gpu", "a100", "--cache", "/proc/none/c.sqlite"], "/proc/none is not a folder"),
    ]:
        result = CliRunner().invoke(tune_command, arguments)
        assert result.exit_code == 2 and says in result.output


def test_how_much_is_tried_for_a_gpu_that_is_not_there_does_not_depend_on_the_cores(bench, monkeypatch):
    monkeypatch.setattr(plan, "resolve_target", lambda name: Target(A100, PREDICTED, None))
    cache = bench.folder / "cache.sqlite"
    plans = [make_plan(TuneRequest(gpu="a100", cache=cache, workers=workers)) for workers in (1, 2, 64)]
    assert {made.trials for made in plans} == {plan.PREDICTED_TRIALS}
    assert {made.time_budget_s for made in plans} == {plan.PREDICTED_SECONDS}


def test_targets(monkeypatch):
    monkeypatch.setattr(gpus, "present", lambda: None)
    assert resolve_target("a100") == Target(A100, PREDICTED, None)
    assert resolve_target("NVIDIA H200") == Target(H200, PREDICTED, None)
    with pytest.raises(ValueError, match=r"none is present here, so name one .`fa2tune gpus` lists"):
        resolve_target(None)
    monkeypatch.setattr(gpus, "present", lambda: H200)
    assert resolve_target(None) == resolve_target("h200") == Target(H200, MEASURED, H200)
    assert resolve_target("h100") == Target(H100, SIBLING, H200)
    assert resolve_target("a100") == Target(A100, PORTED, H200)
    assert resolve_target("NVIDIA H200") == Target(H200, MEASURED, H200)
    assert resolve_target("nvidia h100 80gb hbm3") == Target(H100, SIBLING, H200)
    small = gpus.named("a100-pcie-40gb")
    monkeypatch.setattr(gpus, "present", lambda: small)
    assert resolve_target("a100") == Target(small, MEASURED, small)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpu": "a1000"}, "gpu: got 'a1000', which is not known; close to it are a100"),
        ({"head_dims": (20,)}, "headdim: got 20, allowed are 16 to 256 in steps of 8"),
        ({"head_dims": (264,)}, "headdim: got 264"),
        ({"head_dim_v": 8}, "headdim-v: got 8"),
        ({"trials": 0}, "trials: got 0"),
        ({"time_budget_s": 0.0}, "time-budget: got 0.0"),
        ({"dtypes": ("fp8",)}, "dtype: got 'fp8', allowed are bf16, fp16, fp32"),
        ({"buckets": (1000,)}, "seqlen: got 1000"),
        ({"sampler": "best"}, "sampler: got 'best'"),
        ({"pass_": "fwd", "kernels": ("bwd_dq",)}, "kernel: got 'bwd_dq', allowed are fwd"),
        ({"cache": Path("/proc/none/cache.sqlite")}, "cache: /proc/none/cache.sqlite cannot be written"),
        ({"record": Path("/proc/none/record")}, "record: /proc/none/record cannot be written"),
    ],
)
def test_bad_requests_are_refused_at_once(tmp_path, monkeypatch, change, says):
    monkeypatch.setattr(gpus, "present", lambda: None)
    monkeypatch.setattr(os, "environ", {**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    with pytest.raises(ValueError) as caught:
        make_plan(TuneRequest(**{"gpu": "a100", "cache": tmp_path / "cache.sqlite", **change}))
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["poem", ""])
def test_a_cache_that_is_no_cache_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setattr(gpus, "present", lambda: None)
    (tmp_path / "cache.sqlite").write_text(text)
    with pytest.raises(reader.CacheFileError):
        make_plan(TuneRequest(gpu="a100", cache=tmp_path / "cache.sqlite"))


def test_devices_are_numbers_among_those_that_are_visible(tmp_path, used, monkeypatch):
    assert asked(monkeypatch, tmp_path, None).devices == ("",)
    assert asked(monkeypatch, tmp_path, "all").devices == ("0", "1", "2")
    assert asked(monkeypatch, tmp_path, (2, 0, 2)).devices == ("2", "0") and used[-1] == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8f1c,7")
    assert asked(monkeypatch, tmp_path, (1, 2)).devices == ("GPU-8f1c", "7")


@pytest.mark.parametrize(
    ("devices", "there", "target", "says"),
    [
        ((3,), [H200, H200], HERE, "devices: got 3, allowed are 0 to 1, or all"),
        ((-1,), [H200], HERE, "devices: got -1"),
        ((), [H200], HERE, "devices: got none"),
        ("all", [], HERE, "devices: no GPU is present here"),
        ("all", [H200, H100], HERE, "0 is h200, 1 is h100-sxm; one run tunes for one GPU model"),
        ("all", [H200], Target(H100, PREDICTED, H200), "devices: h100-sxm is not here"),
    ],
)
def test_devices_that_cannot_be_are_refused(tmp_path, monkeypatch, devices, there, target, says):
    monkeypatch.setattr(gpus, "visible", lambda: there)
    monkeypatch.setattr(gpus, "use", lambda number: None)
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        asked(monkeypatch, tmp_path, devices, target)


def test_equal_gpus_of_a_mixed_host_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "visible", lambda: [H100, H200, H200])
    monkeypatch.setattr(gpus, "use", lambda number: None)
    assert asked(monkeypatch, tmp_path, (1, 2), Target(H200, MEASURED, H200)).devices == ("1", "2")


def test_the_command_takes_numbers_or_all():
    result = CliRunner().invoke(tune_command, ["--devices", "first"])
    assert result.exit_code == 2 and "allowed are all, or numbers such as 0,2" in result.output.replace("\n", " ")
