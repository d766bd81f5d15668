"""The oracle and the error rule themselves: both must be right before they may judge anything."""

import math

import pytest
import torch

from fa2tune.measuring import reference, verify
from fa2tune.spec.mask import CAUSAL, FULL
from fa2tune.spec.problem import Problem


def problem(**changes):
    values = {
        "dtype": "fp32", "batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 7, "seqlen_k": 11, "head_dim": 16,
        "head_dim_v": 24, "mask": CAUSAL,
    }  # fmt: skip
    return Problem(**{**values, **changes})


def one_row_at_a_time(q, k, v, causal, scale):
    """The definition, in loops: o and lse of every row from its visible keys alone."""
    o = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = min(k.shape[2], max(0, i + 1 + k.shape[2] - q.shape[2])) if causal else k.shape[2]
                if seen:
                    scores = k[b, h // group, :seen] @ q[b, h, i] * scale
                    o[b, h, i] = torch.softmax(scores, 0) @ v[b, h // group, :seen]
                    lse[b, h, i] = torch.logsumexp(scores, 0)
    return o, lse


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"), [(7, 11, True), (11, 7, True), (9, 5, False), (1, 1, True)]
)
def test_oracle_is_the_definition(seqlen_q, seqlen_k, causal):
    case = problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    inputs = reference.make_inputs(case, "cpu", seed=3)
    q, k, v = (t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    o, lse = reference.attention(q, k, v, mask=CAUSAL if causal else FULL)
    want_o, want_lse = one_row_at_a_time(q.detach(), k.detach(), v.detach(), causal, 1 / math.sqrt(16))
    torch.testing.assert_close(o, want_o)
    torch.testing.assert_close(lse, want_lse)


def test_gradients_by_finite_differences_lse_included():
    case = problem(batch=1, heads_q=2, heads_kv=1, seqlen_q=5, seqlen_k=3)  # two rows see no key
    inputs = reference.make_inputs(case, "cpu", with_dlse=True)
    q, k, v = (t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))

    def scalar(q, k, v):
        o, lse = reference.attention(q, k, v, mask=CAUSAL, softmax_scale=-0.3)
        return (o * inputs.do.double()).sum() + (lse * inputs.dlse.double())[lse > float("-inf")].sum()

    assert torch.autograd.gradcheck(scalar, (q, k, v))
    got = reference.evaluate(inputs, torch.float64, mask=CAUSAL, softmax_scale=-0.3)
    for name, gradient in zip(("dq", "dk", "dv"), torch.autograd.grad(scalar(q, k, v), (q, k, v)), strict=True):
        torch.testing.assert_close(got[name], gradient)


def test_rows_that_see_no_key_are_zero_with_zero_gradient():
    inputs = reference.make_inputs(problem(seqlen_q=9, seqlen_k=4), "cpu", with_dlse=True)
    got = reference.evaluate(inputs, torch.float64, mask=CAUSAL)
    assert got["o"][:, :, :5].abs().max() == 0 and got["dq"][:, :, :5].abs().max() == 0
    assert torch.isneginf(got["lse"][:, :, :5]).all()
    assert all(torch.isfinite(got[name]).all() for name in ("o", "dq", "dk", "dv"))


def test_rows_that_are_filled_up_for_tf32_change_nothing():
    asked = Problem("fp32", 1, 4, 2, 11, 13, 20, 12, CAUSAL)
    inputs = reference.make_inputs(asked, "cpu", with_dlse=True)
    plain = reference.evaluate(inputs, torch.float32, mask=CAUSAL)
    with verify._strict("tf32"):
        padded = reference.evaluate(inputs, torch.float32, mask=CAUSAL)
    for name, tensor in plain.items():
        torch.testing.assert_close(padded[name], tensor, rtol=1e-6, atol=1e-6)


def test_no_keys_at_all():
    got = reference.evaluate(reference.make_inputs(problem(seqlen_k=0), "cpu"), torch.float64)
    assert got["o"].abs().max() == 0 and torch.isneginf(got["lse"]).all()
    assert got["dq"].abs().max() == 0 and got["dk"].shape == (2, 2, 0, 16)


def test_reference_stays_in_the_input_dtype():
    inputs = reference.make_inputs(problem(dtype="bf16"), "cpu")
    _, same = reference.oracle_and_reference(inputs, mask=CAUSAL)
    assert {tensor.dtype for tensor in same.values()} == {torch.bfloat16}


def test_inputs_scale_outlier_and_seed():
    one = reference.make_inputs(problem(), "cpu", seed=1)
    ten = reference.make_inputs(problem(), "cpu", seed=1, scale=10.0)
    torch.testing.assert_close(one.q * 10, ten.q)
    torch.testing.assert_close(one.do, ten.do)
    wild = reference.make_inputs(problem(), "cpu", seed=1, outlier=True)
    torch.testing.assert_close(wild.k[..., 0], one.k[..., 0] * reference.OUTLIER)
    torch.testing.assert_close(wild.k[..., 1:], one.k[..., 1:])
    assert not torch.equal(one.q, reference.make_inputs(problem(), "cpu", seed=2).q)


@pytest.mark.parametrize(
    ("magnitude", "dtype", "spacing"),
    [
        (1.0, torch.float16, 2**-10),
        (1.99, torch.bfloat16, 2**-7),
        (5.0, torch.float32, 2**-21),
        (0.0, torch.float16, 2**-24),
    ],
)
def test_ulp(magnitude, dtype, spacing):
    assert verify.ulp(magnitude, dtype) == spacing


def results(dtype="fp16"):
    oracle, same = reference.oracle_and_reference(reference.make_inputs(problem(dtype=dtype), "cpu"), mask=CAUSAL)
    return dict(same), oracle, same


def test_the_reference_keeps_its_own_rule_with_room():
    got, oracle, same = results()
    errors = verify.compare(got, oracle, same)
    assert set(errors) == {"o", "lse", "dq", "dk", "dv"}
    assert all(
        entry["max"] <= entry["max_allowed"] and entry["rms"] <= entry["rms_allowed"] for entry in errors.values()
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 100.0])
def test_one_wrong_element_fails(poison):
    got, oracle, same = results()
    got["dk"] = got["dk"].clone()
    got["dk"][0, 1, 2, 3] = poison
    with pytest.raises(verify.WrongResult, match="dk"):
        verify.compare(got, oracle, same)


def test_three_times_the_reference_error_fails():
    got, oracle, same = results("bf16")
    got["o"] = (oracle["o"] + 6 * (same["o"].double() - oracle["o"])).to(torch.bfloat16)
    with pytest.raises(verify.WrongResult, match=r"^o: "):
        verify.compare(got, oracle, same)


def test_a_blind_row_must_be_exactly_minus_infinity():
    inputs = reference.make_inputs(problem(seqlen_q=9, seqlen_k=4, dtype="fp16"), "cpu")
    oracle, same = reference.oracle_and_reference(inputs, mask=CAUSAL)
    lse = same["lse"].clone()
    lse[0, 0, 0] = 0.0
    with pytest.raises(verify.WrongResult, match="lse"):
        verify.compare({"lse": lse}, oracle, same)
    lse[0, 0, 0] = float("inf")
    with pytest.raises(verify.WrongResult, match="lse"):
        verify.compare({"lse": lse}, oracle, same)


def test_worst_keeps_the_case_nearest_its_bound():
    def entry(error):
        return {"max": error, "max_allowed": 1.0, "rms": 0.0, "rms_allowed": 1.0}

    assert verify.worst([{"o": entry(0.1)}, {"o": entry(0.9)}, {"o": entry(0.5)}]) == {"o": entry(0.9)}


@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_what_float32_rounds_off_dp_and_delta(mask):
    """dq and dk of exact P, with dP and delta summed in float32 as kernels do: their errors are what ``rounded_off`` says,
    neither far more nor far less, in the worst element. delta off by 16 half ulps is more than that."""
    asked = Problem("fp32", 1, 2, 1, 113, 203, 64, 64, mask)
    inputs = reference.make_inputs(asked, "cpu", outlier=True)
    oracle = reference.evaluate(inputs, torch.float64, mask=mask)
    allowed = reference.rounded_off(inputs, oracle, mask=mask)
    q, k, v, do = (tensor.double() for tensor in (inputs.q, inputs.k, inputs.v, inputs.do))
    p = torch.exp(q @ k.transpose(2, 3) / 8 - oracle["lse"][..., None])
    p = p.where(mask.visible(torch.arange(113)[:, None], torch.arange(203), 113, 203), 0.0)
    dp = torch.zeros(p.shape)
    for column in range(64):  # fused multiply-adds, one after the other
        dp = torch.addcmul(dp.double(), do[..., column, None], v[..., None, :, column]).float()
    delta = (oracle["o"].float() * inputs.do).sum(-1, keepdim=True)

    def share(delta):
        ds = p * (dp.double() - delta.double()) / 8
        found = {"dq": ds @ k, "dk": (ds.transpose(2, 3) @ q).sum(1, keepdim=True)}
        return [((found[name] - oracle[name]).abs() / allowed[name].clamp(min=1e-30)).max().item() for name in found]

    assert all(0.3 < one < 2.0 for one in share(delta)), share(delta)
    assert share(delta * (1 + 2.0**-20))[0] > 2.5


def test_what_is_rounded_off_is_taken_off_each_element():
    right = torch.ones(4, dtype=torch.float64)
    got = right.float() + torch.tensor([0.0, 3e-5, 0.0, 0.0])
    with pytest.raises(verify.WrongResult, match="dq: max error 3e-05"):
        verify.compare({"dq": got}, {"dq": right}, {"dq": right.float()})
    there, elsewhere = torch.tensor([0, 3e-5, 0, 0]).double(), torch.tensor([3e-5, 0, 3e-5, 3e-5]).double()
    verify.compare({"dq": got}, {"dq": right}, {"dq": right.float()}, {"dq": there})
    with pytest.raises(verify.WrongResult):
        verify.compare({"dq": got}, {"dq": right}, {"dq": right.float()}, {"dq": elsewhere})
