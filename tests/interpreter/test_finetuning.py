"""benchmarks/finetuning.py on the CPU, whole: rows agree, its record and table, what it continues, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import script
from click.testing import CliRunner

pytest.importorskip("transformers")

finetuning, document_batches = script("finetuning"), script("document_batches")
TINY = ["--device", "cpu", "--dtype", "fp32", "--layers", "1", "--hidden", "64", "--head-dim", "16", "--vocabulary", "61",
        "--tokens", "16", "--longest", "8", "--median", "4", "--rounds", "1", "--steps", "1"]  # fmt: skip
SETTINGS = finetuning.Settings(1, 64, 16, 61, "fp32", 16, None, 8, 4.0, False, 0)
#: Why rows are absent without a GPU.
ABSENT = {
    "packed flex_attention": "torch has no backward of it on the CPU",
    "offsets flash_attention_2": "Transformers finds no package for flash_attention_2",
    "offsets flash_attention_4": "Transformers finds no package for flash_attention_4",
}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(finetuning.main, [*TINY, *arguments])


@pytest.fixture
def training() -> Any:
    return finetuning.Training(SETTINGS, torch.device("cpu"))


def test_the_whole_run_and_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(finetuning, "WARM", 0)
    out = tmp_path / "f.json"
    done = run("--out", str(out))
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["rows"].keys() == finetuning.ROWS.keys()
    assert {name: row["absent"] for name, row in record["rows"].items() if "absent" in row} == ABSENT
    right = {name: row for name, row in record["rows"].items() if name not in ABSENT}
    for name, row in right.items():
        assert len(row["ms"]) == 1 and row["ms"][0] > 0, name
        assert row["loss"] == pytest.approx(right["padded sdpa"]["loss"], rel=1e-6), name
        assert row["gradient_error"] < 1e-6 and row["worst"] < 2e-6, name
    assert {*record} == {"environment", "settings", "rounds", "steps", "date", "batch", "rows"}
    assert record["environment"]["gpu"] == "CPU" and all(
        record["environment"][part] for part in ("torch", "transformers")
    )
    batch = record["batch"]
    assert sum(batch["lengths"]) == batch["tokens"] == 16
    assert batch["positions"]["packed fa2tune"] == 16 < batch["positions"]["padded fa2tune"]

    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")] == ["batch, attention", *right]
    assert [line for line in lines if line.startswith("- ")] == [f"- {name}: {why}" for name, why in ABSENT.items()]
    assert CliRunner().invoke(finetuning.main, ["--table", str(out)]).output == done.output

    def never(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(finetuning.Training, "step", never)
    monkeypatch.setattr(finetuning, "check", never)
    assert run("--out", str(out)).output == done.output
    other = run("--out", str(out), "--seed", "1")
    assert other.exit_code == 2 and "--out" in other.output and "has settings" in other.output


def test_a_run_that_is_out_of_time_is_continued(training: Any, tmp_path: Path) -> None:
    out = tmp_path / "f.json"
    stopped = run("--out", str(out), "--only", "sdpa", "--seconds", "0")
    assert stopped.exit_code == 0 and "not reached: any row" in stopped.output, stopped.output
    assert json.loads(out.read_text())["rows"] == {}

    found: dict[str, Any] = {}
    rows = [finetuning.ROWS[name] for name in ("padded sdpa", "packed sdpa", "packed flex_attention")]
    finetuning.check(training, rows[:1], found, lambda: True, lambda: None)
    for answers in ([False], [True, True, False]):
        begins = iter(answers)
        finetuning.measure(training, found, 2, 1, lambda begins=begins: next(begins), lambda: None)
        assert len(found["padded sdpa"].get("ms", ())) == answers.count(True) // 2
    finetuning.check(training, rows[1:], found, lambda: True, lambda: None)
    finetuning.measure(training, found, 2, 1, lambda: True, lambda: None)
    assert {name: len(row.get("ms", ())) for name, row in found.items()} == {row.name: 2 for row in rows[:2]} | {
        "packed flex_attention": 0
    }


def test_rows_have_the_gradients_of_padded_sdpa(training: Any) -> None:
    found = {}
    for name in ("padded sdpa", "packed sdpa", "packed fa2tune"):
        loss = training.passes(finetuning.ROWS[name])
        found[name] = [loss, *(weight.grad for weight in training.model.parameters())]
        training.free()
    for name in found:
        for one, right in zip(found[name], found["padded sdpa"], strict=True):
            torch.testing.assert_close(one, right, atol=2e-7, rtol=1e-5, msg=name)


def test_tokens_that_see_other_documents_are_found(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache Transformers looks for no documents."""

    def cached(model: Any, inputs: Any, targets: int) -> torch.Tensor:
        loss = model(**inputs[0], use_cache=True, num_items_in_batch=targets).loss
        loss.backward()
        return loss.detach()

    right = finetuning.alone(training)
    baseline = finetuning.errors(training, finetuning.BASELINE, right)
    assert finetuning.wrong(baseline, baseline, "fp32") is None
    monkeypatch.setattr(finetuning, "passes", cached)
    found = finetuning.errors(training, finetuning.ROWS["packed sdpa"], right)
    assert "is let pass" in finetuning.wrong(found, baseline, "fp32")
    assert finetuning.wrong({**found, "loss_error": 0.0}, baseline, "bf16").startswith("gradient error")


def test_wrong_results_are_not_timed_and_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetuning, "wrong", lambda found, baseline, dtype: None if found is baseline else "loss off")
    done = run("--only", "sdpa")
    assert done.exit_code == 1
    assert "- packed sdpa: loss off" in done.output and "wrong results: packed sdpa" in done.output


@pytest.mark.parametrize("seed", range(4))
def test_drawn_documents_fill_the_step_and_micro_batches_the_packed_row(seed: int) -> None:
    sizes = document_batches.lengths(16384, None, 4096, 250.0, seed)
    assert sum(sizes) == 16384 and min(sizes) >= 4 and max(sizes) <= 4096
    assert len(document_batches.lengths(None, 7, 4096, 250.0, seed)) == 7
    documents = [torch.zeros(size, dtype=torch.long) for size in sizes]
    positions = []
    for by_length in (False, True):
        groups = document_batches.micro_batches(documents, by_length)
        areas = [document_batches.padded(group)["input_ids"].numel() for group in groups]
        assert sum(map(len, groups)) == len(sizes) and max(areas) <= 16384
        positions.append(sum(areas))
    assert positions[1] < positions[0]


def test_a_packed_row_is_what_transformers_collator_makes() -> None:
    from transformers import DataCollatorWithFlattening

    documents = [torch.arange(size) + 3 for size in (5, 4, 7)]
    found = document_batches.packed(documents, offsets=True)
    features = [{"input_ids": text.tolist()} for text in documents]
    right = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(features)
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--hidden", "100"], "--hidden: got 100, must be a multiple of 64, four heads of --head-dim 16"),
        (["--documents", "3"], "--documents: got 3 with --tokens 16, allowed is one of both"),
        (
            ["--only", "fa3"],
            "--only: got 'fa3', must be parts, with commas, of: padded sdpa, padded fa2tune, packed sdpa,",
        ),
        (["--dtype", "fp8"], "'--dtype': 'fp8' is not one of 'bf16', 'fp32'"),
        (["--layers", "0"], "'--layers': 0 is not in the range x>=1"),
        (["--device", "cuda"], "--device: got cuda, there is no GPU here: allowed is cpu"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], named: str) -> None:
    if arguments == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    refused = run(*arguments)
    assert refused.exit_code == 2 and named in " ".join(refused.output.split())
