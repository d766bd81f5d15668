"""GPT training with several implementations of attention: Table 1 of the FlashAttention-2 paper (arXiv 2307.08691), on any
number of GPUs.

    python benchmarks/gpt_training.py --model 1.3B --seqlen 8192 --layers 12 --out g.json               # one GPU
    torchrun --nproc-per-node 8 benchmarks/gpt_training.py --model 2.7B --seqlen 8192 --out g.json      # eight
    python benchmarks/gpt_training.py --curves 100 --model 1.3B --seqlen 2048 --layers 12 --out c.json  # loss curves
    python benchmarks/gpt_training.py --table g.json [--page docs/benchmarks.md]

The model is GPT-3's block: layer norm, attention, GELU of width 4 x hidden, learned positions, tied embeddings. Weights and
AdamW's moments are float32, sharded by FSDP2; products are bfloat16. All implementations train one and the same model, turn by
turn in random order, so clocks and temperature are the same for each. Tokens are random.

TFLOP/s a GPU are counted twice:

- "model": 6 x parameters x tokens + 12 x layers x hidden x seqlen x tokens, as the paper and Megatron-LM count;
- "causal": the same with the attention term halved, which is what a causal mask needs.

Neither counts what activation checkpointing computes again. Time in attention is the GPU's, between events around it in the
forward and in the backward, in steps of their own without torch.compile; it includes the copies that an implementation makes.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import marked
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fa2tune import gpus
from fa2tune.bench import peers
from fa2tune.rows import whole
from fa2tune.spec.mask import CAUSAL
from fa2tune.spec.problem import Problem

VOCABULARY = 50304  #: GPT-2's, rounded up to a multiple of 128
NAMES = ("fa2tune", "fa4", "sdpa-cudnn", "sdpa-flash", "standard")
#: Their scores of all layers do not fit: each block is computed again in the backward.
CHECKPOINTED = ("standard",)
TOKENS = 16384  #: a GPU and step
ROUNDS, STEPS = 5, 3  #: of turns, and timed steps in a turn
RATE, SEED = 2e-4, 20231


@dataclass(frozen=True)
class Shape:
    """Of a model and what it trains on."""

    layers: int
    hidden: int
    heads: int
    seqlen: int
    batch: int  #: sequences a GPU
    vocabulary: int = VOCABULARY

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Of blocks, embeddings and positions; biases and norms included."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + (self.vocabulary + self.seqlen) * self.hidden + 2 * self.hidden

    def operations(self, causal: bool) -> float:
        """Floating-point operations of a step and GPU."""
        tokens = self.batch * self.seqlen
        attention = 12.0 * self.layers * self.hidden * self.seqlen * tokens
        return 6.0 * self.parameters * tokens + attention / (2 if causal else 1)


#: GPT-3's (arXiv 2005.14165, Table 2.1), with the paper's heads of 128: layers, hidden, heads
MODELS: Mapping[str, tuple[int, int, int]] = {"1.3B": (24, 2048, 16), "2.7B": (32, 2560, 20)}

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# ---- the model


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        """x: (batch, seqlen, hidden); attention: of (batch, heads, seqlen, head_dim) views, whose output has their form."""
        q, k, v = (
            part.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.seqlen, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * shape.layers) if last else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor, attention: Attention, again: bool) -> torch.Tensor:
        """ids: (batch, seqlen + 1) -> the mean loss of the next token. again: blocks are computed again in the backward."""
        ids, targets = ids[:, :-1], ids[:, 1:]
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, attention, use_reentrant=False) if again else block(x, attention)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Training:
    """A model, sharded over all ranks, its optimizer, and a step with a given attention."""

    def __init__(self, shape: Shape, device: torch.device, compiled: bool) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.manual_seed(SEED)
        self.shape, self.device = shape, device
        self.model = GPT(shape).to(device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            if compiled:
                block.compile()
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
        )
        self.source = torch.Generator(device).manual_seed(SEED + int(os.environ.get("RANK", 0)))

    def batch(self) -> torch.Tensor:
        """Random tokens whose frequencies fall as those of words do (Zipf), so that there is something to learn."""
        sizes = (self.shape.batch, self.shape.seqlen + 1)
        uniform = torch.rand(sizes, generator=self.source, device=self.device)
        return (self.shape.vocabulary**uniform - 1).long().clamp_(0, self.shape.vocabulary - 1)

    def step(self, attention: Attention, again: bool) -> torch.Tensor:
        loss = self.model(self.batch(), attention, again)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


# ---- time in attention


class Watch:
    """Around an attention: CUDA events where its forward and its backward begin and end. ``microseconds`` adds them up."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.marks: dict[str, list[torch.cuda.Event]] = {"begin": [], "end": []}

    def mark(self, which: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks[which].append(event)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _Leave.apply(self, self.attention(*_Enter.apply(self, q, k, v)))  # type: ignore[no-any-return]

    def milliseconds(self) -> float:
        torch.cuda.synchronize()
        pairs = zip(self.marks["begin"], self.marks["end"], strict=True)
        total = sum(begin.elapsed_time(end) for begin, end in pairs)
        self.marks = {"begin": [], "end": []}
        return total


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, watch: Watch, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.watch = watch
        watch.mark("begin")
        return tuple(tensor.view_as(tensor) for tensor in qkv)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.watch.mark("end")
        return (None, *gradients)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, watch: Watch, o: torch.Tensor) -> torch.Tensor:
        ctx.watch = watch
        watch.mark("end")
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.watch.mark("begin")
        return (None, *gradients)


# ---- measuring


def attentions(shape: Shape, names: Sequence[str] | None) -> dict[str, Attention]:
    """Name -> attention of (batch, heads, seqlen, head_dim) views, for those that are installed. ValueError as
    ``peers.select`` raises it."""
    problem = Problem(
        "bf16",
        shape.batch,
        shape.heads,
        shape.heads,
        shape.seqlen,
        shape.seqlen,
        shape.head_dim,
        shape.head_dim,
        CAUSAL,
    )
    known = {name: peers.PEERS[name] for name in NAMES}
    chosen, _ = peers.select(names, known)
    return {name: _heads_first(peer.make(problem), peer.layout) for name, peer in chosen.items()}


def _heads_first(attention: Attention, layout: str) -> Attention:
    if layout == "bhsd":
        return attention
    return lambda q, k, v: attention(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)


def measure(
    training: Training, candidates: Mapping[str, Attention], warm: int, rounds: int, steps: int
) -> dict[str, Any]:
    """Name -> {"ms": of a step, one per round; "attention_ms": of a step; "bytes": the most allocated}, or {"failed": why}."""
    found: dict[str, Any] = {}
    for name, attention in candidates.items():
        again = name in CHECKPOINTED
        try:
            for _ in range(warm):
                training.step(attention, again)
            watch = Watch(attention)
            training.step(watch, again)
            watch.milliseconds()
            torch.cuda.reset_peak_memory_stats()
            training.step(watch, again)
            found[name] = {
                "ms": [], "attention_ms": watch.milliseconds(), "bytes": torch.cuda.max_memory_allocated(),
                "checkpointed": again,
            }  # fmt: skip
        except torch.OutOfMemoryError:
            training.optimizer.zero_grad()
            torch.cuda.empty_cache()
            found[name] = {"failed": "out of memory"}
    order = [name for name in candidates if "failed" not in found[name]]
    source = random.Random(SEED)  # every rank takes the same order
    for _ in range(rounds):
        for name in source.sample(order, len(order)):
            training.step(candidates[name], name in CHECKPOINTED)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(steps):
                training.step(candidates[name], name in CHECKPOINTED)
            torch.cuda.synchronize()
            found[name]["ms"].append(1e3 * (time.perf_counter() - begun) / steps)
    return found


def curves(
    shape: Shape, device: torch.device, candidates: Mapping[str, Attention], steps: int
) -> dict[str, list[float]]:
    """Name -> the loss of each step, all from the same weights on the same tokens. The first one runs twice: what differs
    between "name" and "name, again" is noise."""
    found = {}
    first = next(iter(candidates))
    for name, attention in {**candidates, f"{first}, again": candidates[first]}.items():
        training = Training(shape, device, compiled=False)
        found[name] = torch.stack([training.step(attention, name in CHECKPOINTED) for _ in range(steps)]).tolist()
        del training
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def spread(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Name -> the largest difference of its loss from that of the first, over all steps."""
    first = next(iter(found.values()))
    return {name: max(abs(a - b) for a, b in zip(first, losses, strict=True)) for name, losses in found.items()}


# ---- the record and the table


def figures(shape: Shape, result: Mapping[str, Any], peak_tflops: float) -> dict[str, float]:
    """What a row of the table says, from the median over rounds."""
    seconds = statistics.median(result["ms"]) / 1e3
    model, causal = (shape.operations(causal) / seconds / 1e12 for causal in (False, True))
    return {
        "ms": seconds * 1e3, "tokens": shape.batch * shape.seqlen / seconds, "model": model, "causal": causal,
        "mfu": model / peak_tflops, "gib": result["bytes"] / 2**30, "attention_ms": result["attention_ms"],
    }  # fmt: skip


def table(record: Mapping[str, Any]) -> Iterator[str]:
    here = record["environment"]
    yield (
        f"{here['ranks']} x {here['gpu']}, driver {here['driver']}, torch {here['torch']}, Triton {here['triton']}, "
        f"{record['date']}. {ROUNDS} rounds of {STEPS} steps, in turns; medians. Peak: {here['peak_tflops']:.0f} TFLOP/s."
    )
    for name, run in record["runs"].items():
        shape = Shape(**run["shape"])
        size = f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, {shape.batch} x {shape.seqlen} tokens a GPU"
        yield f"\n**{name}**: {size}\n"
        yield (
            "| attention | ms a step | tokens/s a GPU | TFLOP/s a GPU | causal counted half | MFU | peak GiB | attention, ms "
            "| its time / fa2tune's |"
        )
        yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
        ours = run["results"].get(peers.SUBJECT, {}).get("attention_ms", math.nan)
        for peer, result in run["results"].items():
            label = peers.PEERS[peer].label
            if "failed" in result:
                yield f"| {label} | {result['failed']} |||||||"
                continue
            row = figures(shape, result, here["peak_tflops"])
            again = ", blocks computed again" if result["checkpointed"] else ""
            yield (
                f"| {label}{again} | {row['ms']:.1f} | {row['tokens']:.0f} | {row['model']:.0f} | {row['causal']:.0f} | "
                f"{row['mfu']:.2f} | {row['gib']:.1f} | {row['attention_ms']:.1f} | "
                f"{result['attention_ms'] / ours:.2f} |"
            )
        for peer, losses in run.get("losses", {}).items():
            yield f"\n{peer}: loss {losses[0]:.4f} to {losses[-1]:.4f}, at most {spread(run['losses'])[peer]:.2g} apart"


def _environment() -> dict[str, Any]:
    from fa2tune.compiling import fingerprint

    gpu = torch.cuda.get_device_name()
    return {
        "gpu": gpu, "ranks": int(os.environ.get("WORLD_SIZE", 1)), "driver": fingerprint.driver_version(),
        "torch": torch.__version__, "triton": fingerprint.triton_version(), "sources": fingerprint.source_digest()[:16],
        "peak_tflops": gpus.named(gpu).peak("bf16"),
    }  # fmt: skip


def _record(out: Path | None, environment: Mapping[str, Any]) -> dict[str, Any]:
    """What the file has, for more runs of the same environment; a new one."""
    new = {"environment": environment, "date": time.strftime("%Y-%m-%d", time.gmtime()), "runs": {}}
    if out is None or not out.exists():
        return new
    record: dict[str, Any] = json.loads(out.read_text("utf-8"))
    if record["environment"] != environment:
        raise click.BadParameter(
            f"{out} has environment {record['environment']}, here {environment}", param_hint="--out"
        )
    return record


@click.command(help=__doc__.partition("\n\n")[0])
@click.option("--model", type=click.Choice(list(MODELS)), default="1.3B", show_default=True)
@click.option("--seqlen", type=click.IntRange(128), default=8192, show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Fewer, where memory asks for it.  [default: the model's]")
@click.option("--tokens", type=click.IntRange(128), default=TOKENS, show_default=True, help="A GPU and step.")
@click.option("--implementations", help=f"{', '.join(NAMES)}.  [default: those that are here]")
@click.option("--compile", "compiled", is_flag=True, help="torch.compile of each block.")
@click.option("--curves", "curve", type=click.IntRange(2), help="Loss curves of so many steps; nothing is timed.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON; runs are added to it.")
@click.option(
    "--table", "shown", type=click.Path(path_type=Path, exists=True), help="Print this file's table, run nothing."
)
@marked.page_option
def main(model: str, seqlen: int, layers: int | None, tokens: int, implementations: str | None, compiled: bool,
         curve: int | None, out: Path | None, shown: Path | None, page: Path | None) -> None:  # fmt: skip
    if shown is not None:
        text = "\n".join(table(json.loads(shown.read_text("utf-8"))))
        marked.publish(page, "gpt_training", "gpt_training", text)
        return
    if tokens % seqlen:
        raise click.BadParameter(f"got {tokens}, needs a multiple of --seqlen {seqlen}", param_hint="--tokens")
    if not torch.cuda.is_available():
        raise click.ClickException("gpt_training needs a GPU")
    depth, hidden, heads = MODELS[model]
    shape = Shape(layers or depth, hidden, heads, seqlen, tokens // seqlen)
    try:
        candidates = attentions(shape, implementations.split(",") if implementations else None)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--implementations") from None
    with _ranks() as device:
        record = _record(out, _environment())
        name = f"{model}, {shape.layers} layers, {seqlen}{', compiled' if compiled else ''}"
        run = record["runs"].setdefault(name, {"shape": asdict(shape), "results": {}})
        if curve:
            run["losses"] = curves(shape, device, candidates, curve)
            said = {name: f"{value:.2g}" for name, value in spread(run["losses"]).items()}
        else:
            run["results"] = measure(Training(shape, device, compiled), candidates, 3, ROUNDS, STEPS)
            said = {
                name: result.get("failed") or f"{statistics.median(result['ms']):.1f} ms"
                for name, result in run["results"].items()
            }
        if torch.distributed.get_rank() == 0:
            click.echo(f"{name}: " + "  ".join(f"{key} {value}" for key, value in said.items()))
            if out is not None:
                whole.publish(out, lambda path: path.write_text(json.dumps(record, indent=1), "utf-8"))


class _ranks:
    """The process group of torchrun, or of this process alone; gives this rank's device."""

    def __enter__(self) -> torch.device:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}.items():
            os.environ.setdefault(name, value)
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl", device_id=device)
        return device

    def __exit__(self, *_: object) -> None:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
