"""A fine-tuning step of a small Llama in Transformers: documents packed into a row, beside padding, beside Transformers' own.

    python benchmarks/finetuning.py --out f.json
    python benchmarks/finetuning.py --table f.json [--page PAGE, which has markers named finetuning]
    TRITON_INTERPRET=1 python benchmarks/finetuning.py --device cpu --dtype fp32 --layers 1 --hidden 64 --head-dim 16 \\
        --vocabulary 61 --tokens 16 --longest 8 --median 4 --rounds 1 --steps 1    # without a GPU, to see that it runs

The model has Llama 3.2 1B's shapes (hidden 2048, 32 / 8 heads of 64), by default half its 16 layers, Llama 2's vocabulary, and
random weights; nothing is downloaded. A step is forward, backward and AdamW, all in the dtype of the weights. The lengths of
its documents are drawn as those of instruction data fall: many short, few long. Rows differ in the form of the batch:

- "padded": on the right, up to the longest of a micro-batch. Micro-batches take documents in the order drawn (--by-length:
  sorted), as many as make no more positions than the packed row has, so memory is alike; gradients add up over them;
- "packed": all documents in one row, with position_ids that restart (DataCollatorWithFlattening);
- "offsets": the same with cu_seq_lens_q and cu_seq_lens_k as well (return_flash_attn_kwargs=True), for those that read them.

Transformers' own for a packed row: "sdpa" and "flex_attention" mask other documents where there is no attention_mask and no
cache, so with use_cache=False (its default in Trainer, not in a model's call); "flash_attention_2" and "flash_attention_4" take
the offsets. "eager" masks like "sdpa" and holds all scores of the row, so it is not among them.

Before anything is timed, loss and gradients of one step of each row are compared with those of each document alone, by sdpa in
float32. Losses may be LIMITS off; of the gradients padded sdpa's may be, those of any other row FACTOR times as far as padded
sdpa's, plus FLOOR, all together and the worst weight. Then all rows train one and the same model, turn by turn in random order.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import document_batches
import marked
import torch
import transformers
from document_batches import SHORTEST, Inputs
from transformers import utils as available

import fa2tune.compat.transformers  # noqa: F401  # registers attn_implementation="fa2tune"
from fa2tune.compiling import fingerprint
from fa2tune.rows import whole

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: By dtype: (of any loss, relative; of padded sdpa's gradients, the norm of the difference over the norm).
LIMITS = {"bf16": (2e-3, 0.1), "fp32": (1e-5, 1e-4)}
FACTOR, FLOOR = 2.0, {"bf16": 2e-3, "fp32": 1e-6}
RATE, WARM, WIDTH = 1e-5, 2, 100


@dataclass(frozen=True)
class Settings:
    """Of the model and its batch."""

    layers: int
    hidden: int
    head_dim: int
    vocabulary: int
    dtype: str
    tokens: int | None  #: of a step; None: as many as the documents have
    documents: int | None  #: None: as many as the tokens fill
    longest: int
    median: float
    by_length: bool
    seed: int


@dataclass(frozen=True)
class Row:
    """Of the table."""

    form: str  #: of the batch: "padded", "packed" or "offsets"
    implementation: str  #: Transformers' attn_implementation

    @property
    def name(self) -> str:
        return f"{self.form} {self.implementation}"


BASELINE = Row("padded", "sdpa")
ROWS = {
    row.name: row
    for row in (
        BASELINE, Row("padded", "fa2tune"), Row("packed", "sdpa"), Row("packed", "flex_attention"),
        Row("offsets", "flash_attention_2"), Row("offsets", "flash_attention_4"), Row("packed", "fa2tune"),
        Row("offsets", "fa2tune"),
    )
}  # fmt: skip

Gradients = list[torch.Tensor]


def absent(row: Row, device: torch.device) -> str | None:
    """Why a row cannot run here, or None."""
    name = row.implementation
    if name == "fa2tune" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "its kernels need TRITON_INTERPRET=1 on the CPU"
    if name == "flex_attention" and device.type == "cpu":
        return "torch has no backward of it on the CPU"
    # no other source: Transformers would download a kernel, or take fa2tune's where fa2tune.compat.hub redirects
    here = {
        "flash_attention_2": available.is_flash_attn_2_available,
        "flash_attention_4": available.is_flash_attn_4_available,
    }
    if name in here and not here[name]():
        return f"Transformers finds no package for {name}"
    return None


# ---- the batch


def texts(settings: Settings, device: torch.device) -> list[torch.Tensor]:
    """The documents of a step, random tokens (length,)."""
    source = torch.Generator().manual_seed(settings.seed)
    drawn = settings.tokens, settings.documents, settings.longest, settings.median, settings.seed
    return [
        torch.randint(settings.vocabulary, (size,), generator=source).to(device)
        for size in document_batches.lengths(*drawn)
    ]


def batches(row: Row, documents: Sequence[torch.Tensor], by_length: bool) -> list[Inputs]:
    """What the forwards of a step take."""
    if row.form == "padded":
        return [document_batches.padded(group) for group in document_batches.micro_batches(documents, by_length)]
    return [document_batches.packed(documents, row.form == "offsets")]


# ---- the step


def llama(settings: Settings, device: torch.device) -> Any:
    """Random weights. Four query heads to a key head, as in Llama 3.2 1B."""
    heads = settings.hidden // settings.head_dim
    config = transformers.LlamaConfig(
        vocab_size=settings.vocabulary, hidden_size=settings.hidden, intermediate_size=4 * settings.hidden,
        num_hidden_layers=settings.layers, num_attention_heads=heads, num_key_value_heads=heads // 4,
        head_dim=settings.head_dim, max_position_embeddings=settings.longest, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(settings.seed)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[settings.dtype]).train()


def passes(model: Any, inputs: Sequence[Inputs], targets: int) -> torch.Tensor:
    """Forward and backward of all micro-batches: the mean loss of the ``targets`` tokens that are predicted."""
    losses = []
    for one in inputs:
        fresh = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in one.items()}
        loss = model(**fresh, use_cache=False, num_items_in_batch=targets).loss
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


class Training:
    """A model, its optimizer, the documents of its step, and a step of a row."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.model = llama(settings, device)
        self.documents = texts(settings, device)
        self.tokens = sum(map(len, self.documents))
        self.targets = self.tokens - len(self.documents)
        self.inputs = {name: batches(row, self.documents, settings.by_length) for name, row in ROWS.items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=device.type == "cuda")

    def positions(self, row: Row) -> int:
        """Of a step, padding included."""
        return sum(one["input_ids"].numel() for one in self.inputs[row.name])

    def passes(self, row: Row) -> torch.Tensor:
        self.model.set_attn_implementation(row.implementation)
        return passes(self.model, self.inputs[row.name], self.targets)

    def step(self, row: Row) -> torch.Tensor:
        loss = self.passes(row)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def free(self) -> None:
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


# ---- what is right


def alone(training: Training) -> tuple[float, Gradients]:
    """Loss and gradients of each document alone, by sdpa in float32, with the same weights."""
    model = copy.deepcopy(training.model).float()
    model.set_attn_implementation("sdpa")
    inputs = [{"input_ids": text[None], "labels": text[None]} for text in training.documents]
    loss = float(passes(model, inputs, training.targets))
    return loss, [weight.grad for weight in model.parameters()]


def errors(training: Training, row: Row, right: tuple[float, Gradients]) -> dict[str, float]:
    """Of a row's loss and gradients: "loss", its relative "loss_error", "gradient_error" of all gradients as one vector, and
    "worst", the largest of one weight."""
    try:
        loss = float(training.passes(row))
        squares = [
            (float((weight.grad.float() - exact).square().sum()), float(exact.square().sum()))
            for weight, exact in zip(training.model.parameters(), right[1], strict=True)
        ]
    finally:
        training.free()
    return {
        "loss": loss, "loss_error": abs(loss / right[0] - 1),
        "gradient_error": math.sqrt(sum(off for off, _ in squares) / sum(size for _, size in squares)),
        "worst": max(math.sqrt(off / size) if size else math.inf * (off > 0) for off, size in squares),
    }  # fmt: skip


def wrong(found: Mapping[str, float], baseline: Mapping[str, float], dtype: str) -> str | None:
    """What is wrong with a row's ``errors``, or None. ``baseline``: those of padded sdpa, or the same for itself."""
    loss, gradient = LIMITS[dtype]
    itself = found is baseline
    allowed = {
        "loss_error": loss,
        "gradient_error": gradient if itself else FACTOR * baseline["gradient_error"] + FLOOR[dtype],
        "worst": math.inf if itself else FACTOR * baseline["worst"] + FLOOR[dtype],
    }
    for name, most in allowed.items():
        if not found[name] <= most:
            return f"{name.replace('_', ' ')} {found[name]:.2g}, {most:.2g} is let pass"
    return None


def said(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def check(
    training: Training, rows: Sequence[Row], found: dict[str, Any], begins: Callable[[], bool], save: Callable[[], None]
) -> None:
    """Adds to ``found`` name -> {"absent": why}, or a row's ``errors``, with {"wrong": what} where they are too large.
    ``begins``: whether another row may begin."""
    if rows and not begins():
        click.echo("not reached: any row")
        return
    right = alone(training)
    training.free()
    baseline = errors(training, BASELINE, right)
    for row in rows:
        if not begins():
            click.echo(f"not reached: {row.name}")
            continue
        try:
            reason = absent(row, training.device)
            result = {} if reason else baseline if row == BASELINE else errors(training, row, right)
        except Exception as error:  # an implementation that cannot take this batch raises what it likes
            reason = said(error)
        if reason is not None:
            found[row.name] = {"absent": reason}
        else:
            fault = wrong(result, baseline, training.settings.dtype)
            found[row.name] = {**result} if fault is None else {**result, "wrong": fault}
        save()


# ---- timing


def measure(
    training: Training, found: dict[str, dict[str, Any]], rounds: int, steps: int, begins: Callable[[], bool],
    save: Callable[[], None],
) -> None:  # fmt: skip
    """Adds to each row of ``found`` that is right "ms" of a step, one per round, the host's preparation of masks included, and
    "bytes", the most allocated. ``begins``: whether another round may begin."""
    order = [
        name for name, one in found.items() if not {"absent", "wrong"} & {*one} and len(one.get("ms", ())) < rounds
    ]
    if order and not begins():
        click.echo("not reached: any round")
        return
    for name in order.copy():
        try:
            for _ in range(WARM):
                training.step(ROWS[name])
            if training.device.type == "cuda":
                training.free()
                torch.cuda.reset_peak_memory_stats()
                training.step(ROWS[name])
                found[name]["bytes"] = torch.cuda.max_memory_allocated()
            found[name].setdefault("ms", [])
        except torch.OutOfMemoryError:
            found[name]["absent"] = "out of memory"
            order.remove(name)
            training.free()
    source = random.Random(training.settings.seed)
    for done in range(rounds):
        turn = [name for name in source.sample(order, len(order)) if len(found[name]["ms"]) <= done]
        if turn and not begins():
            click.echo(f"not reached: rounds {done + 1} to {rounds}")
            return
        for name in turn:
            if training.device.type == "cuda":
                training.step(ROWS[name])  # the allocator's blocks are those of another row
            training.wait()
            begun = time.perf_counter()
            for _ in range(steps):
                training.step(ROWS[name])
            training.wait()
            found[name]["ms"].append(1e3 * (time.perf_counter() - begun) / steps)
        save()


# ---- the record and the table


def environment(device: torch.device) -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "driver": fingerprint.driver_version(),
        "torch": torch.__version__, "triton": fingerprint.triton_version(), "transformers": transformers.__version__,
        "sources": fingerprint.source_digest()[:16],
    }  # fmt: skip


def begun(out: Path | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """The record in a file, or a new one. BadParameter: that file's is about something else."""
    if out is None or not out.exists():
        return {**about, "date": time.strftime("%Y-%m-%d", time.gmtime()), "rows": {}}
    before: dict[str, Any] = json.loads(out.read_text("utf-8"))
    for part, value in about.items():
        if before.get(part) != value:
            raise click.BadParameter(f"{out} has {part} {before.get(part)}, here {value}", param_hint="--out")
    return before


def batch(training: Training) -> dict[str, Any]:
    """What a step computes, for the record."""
    groups = document_batches.micro_batches(training.documents, training.settings.by_length)
    return {
        "tokens": training.tokens, "lengths": [*map(len, training.documents)], "micro_batches": len(groups),
        "parameters": sum(weight.numel() for weight in training.model.parameters()),
        "positions": {name: training.positions(row) for name, row in ROWS.items()},
    }  # fmt: skip


def setting(record: Mapping[str, Any]) -> str:
    """What was measured where."""
    here, model, step = record["environment"], record["settings"], record["batch"]
    rounds = sorted({len(row["ms"]) for row in record["rows"].values() if row.get("ms")}) or [0]
    count = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else rounds[0]
    heads, sizes = model["hidden"] // model["head_dim"], step["lengths"]
    driver = f", driver {here['driver']}" if here["driver"] else ""
    return (
        f"{here['gpu']}{driver}, torch {here['torch']}, Triton {here['triton']}, Transformers {here['transformers']}, "
        f"{record['date']}, {model['dtype']}. Llama of {model['layers']} layers, hidden {model['hidden']}, "
        f"{heads} / {heads // 4} heads of {model['head_dim']}, {step['parameters'] / 1e6:.0f} M weights. "
        f"{len(sizes)} documents of {min(sizes)} to {max(sizes)} tokens, median {statistics.median(sizes):.0f}, "
        f"{step['tokens']} in all; seed {model['seed']}. Padded in {step['micro_batches']} micro-batches"
        f"{', sorted by length' if model['by_length'] else ''}. "
        f"Medians of rounds of {record['steps']} steps in turns: {count}."
    )


def table(record: Mapping[str, Any]) -> Iterator[str]:
    """A record as Markdown, in WIDTH columns."""
    yield from textwrap.wrap(setting(record), WIDTH)
    yield ""
    yield "| batch, attention | tokens/s | ms a step | padding | peak GiB | loss | gradient error |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    step, missing = record["batch"], []
    for name in sorted(record["rows"], key=[*ROWS].index):
        row = record["rows"][name]
        reason = row.get("absent") or row.get("wrong") or ("" if row.get("ms") else "not timed yet")
        if reason:
            missing.append(f"- {name}: {reason}")
            continue
        ms = statistics.median(row["ms"])
        share = 1 - step["tokens"] / step["positions"][name]
        memory = f"{row['bytes'] / 2**30:.1f}" if "bytes" in row else "-"
        yield (
            f"| {name} | {1e3 * step['tokens'] / ms:.0f} | {ms:.1f} | {100 * share:.0f} % | {memory} | "
            f"{row['loss']:.4f} | {row['gradient_error']:.1e} |"
        )
    if missing:
        yield "\nNot timed:\n"
        for line in missing:
            yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ")


# ---- the command


def _chosen(only: str) -> list[Row]:
    found = [row for name, row in ROWS.items() if any(part in name for part in only.split(","))]
    if not found:
        raise click.BadParameter(
            f"got {only!r}, must be parts, with commas, of: {', '.join(ROWS)}", param_hint="--only"
        )
    return found


def _settings(given: dict[str, Any]) -> Settings:
    """BadParameter: no Llama, or no batch, is so."""
    whole_group = 4 * given["head_dim"]
    if given["hidden"] % whole_group:
        raise click.BadParameter(
            f"got {given['hidden']}, must be a multiple of {whole_group}, four heads of --head-dim {given['head_dim']}",
            param_hint="--hidden",
        )
    if given["documents"] is not None and given["tokens"] is not None:
        raise click.BadParameter(
            f"got {given['documents']} with --tokens {given['tokens']}, allowed is one of both",
            param_hint="--documents",
        )
    if given["documents"] is None and given["tokens"] is None:
        given["tokens"] = 16384
    return Settings(**given)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("got cuda, there is no GPU here: allowed is cpu", param_hint="--device")
    return torch.device(name)


@click.command(help=__doc__.partition("\n\n")[0])
@click.option("--layers", type=click.IntRange(1), default=8, show_default=True)
@click.option("--hidden", type=click.IntRange(1), default=2048, show_default=True, help="A multiple of 4 x --head-dim.")
@click.option("--head-dim", type=click.IntRange(16), default=64, show_default=True)
@click.option("--vocabulary", type=click.IntRange(2), default=32000, show_default=True)
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True, help="Of weights and step."
)
@click.option("--tokens", type=click.IntRange(2 * SHORTEST), help="A step.  [default: 16384, without --documents]")
@click.option("--documents", type=click.IntRange(1), help="A step, instead of --tokens.")
@click.option("--longest", type=click.IntRange(2 * SHORTEST), default=4096, show_default=True, help="Of a document.")
@click.option("--median", type=click.FloatRange(1), default=250.0, show_default=True, help="Of documents' lengths.")
@click.option("--by-length", is_flag=True, help="Sorts documents before padding.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of lengths, tokens, weights and turns.")
@click.option("--steps", type=click.IntRange(1), default=2, show_default=True, help="Timed in a turn.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Of turns.")
@click.option(
    "--seconds", type=float, default=200.0, show_default=True, help="Begins no row and no round after so long."
)
@click.option("--only", default="", help="Rows whose name has this text, or one of several: sdpa,flex.")
@click.option("--device", "place", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="JSON; what it has is not measured again.")
@click.option(
    "--table", "shown", type=click.Path(path_type=Path, exists=True), help="Print this file's table, measure nothing."
)
@marked.page_option
def main(steps: int, rounds: int, seconds: float, only: str, place: str, out: Path | None, shown: Path | None,
         page: Path | None, **given: Any) -> None:  # fmt: skip
    started = time.monotonic()
    if shown is not None:
        marked.publish(page, "finetuning", "finetuning", "\n".join(table(json.loads(shown.read_text("utf-8")))))
        return
    settings, rows, device = _settings(given), _chosen(only), _device(place)
    about = {"environment": environment(device), "settings": asdict(settings), "rounds": rounds, "steps": steps}
    record = begun(out, about)
    training = Training(settings, device)
    record["batch"] = batch(training)

    def save() -> None:
        if out is not None:
            whole.publish(out, lambda path: path.write_text(json.dumps(record, indent=1), "utf-8"))

    def begins() -> bool:
        return time.monotonic() - started < seconds

    if lacking := [row for row in rows if row.name not in record["rows"]]:
        check(training, lacking, record["rows"], begins, save)
    asked = {row.name: record["rows"][row.name] for row in rows if row.name in record["rows"]}
    measure(training, asked, rounds, steps, begins, save)
    save()
    click.echo("\n".join(table(record)))
    faults = [name for name, row in asked.items() if "wrong" in row]
    if faults:
        raise click.ClickException(f"wrong results: {', '.join(faults)}")


if __name__ == "__main__":
    main()
