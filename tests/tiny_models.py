"""Tiny Transformers models with attn_implementation="fa2tune" and "eager", and the float64 rule between them: what tests/gpu
asks on the GPU and tests/interpreter on the CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from fa2tune.compat.transformers import NAME

DECODERS, ENCODERS = ("llama", "mistral", "qwen3", "gpt2"), ("bert", "modernbert")
VOCABULARY = 61
#: Scores of a few units: with Transformers' own 0.02 attention would be an average, whatever it sees.
SPREAD = {"initializer_range": 0.12}
NAMED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: Largest error of fa2tune against float64, in errors of eager in the same dtype; RMS. Of gradients GRADIENT.
FACTOR, GRADIENT = 2.0, 3.0


@dataclass(frozen=True)
class Size:
    """Of a row of tokens, its padding, its documents and the keys of a window; layers of models whose layers are alike.
    ``dim``: of a head, None for a model's own; ``key_heads``: of decoders that may have fewer."""

    tokens: int
    padding: int
    documents: tuple[int, ...]
    window: int
    layers: int = 1
    heads: int = 2
    key_heads: int = 1
    dim: int | None = None

    @property
    def positions(self) -> torch.Tensor:
        return torch.cat([torch.arange(length) for length in self.documents])[None]

    @property
    def offsets(self) -> torch.Tensor:
        return torch.tensor([0, *self.documents]).cumsum(0).to(torch.int32)


def drawn(name: str, seed: int, most: int) -> Size:
    """At random: up to ``most`` tokens. Where tokens are rotated, head dims are even."""
    dice = random.Random(f"{name} {seed}")
    key_heads, tokens = dice.choice((1, 2, 3)), dice.randint(most // 3, most)
    ends = sorted(dice.sample(range(1, tokens), dice.randint(1, 4)))
    documents = tuple(end - start for start, end in itertools.pairwise((0, *ends, tokens)))
    return Size(
        tokens, dice.randrange(1, tokens), documents, window=dice.randint(2, tokens), layers=dice.choice((1, 2)),
        heads=key_heads * dice.choice((1, 2, 4)), key_heads=key_heads,
        dim=dice.randint(9, 100) if name in ("gpt2", "bert") else 2 * dice.randint(5, 50),
    )  # fmt: skip


def config(name: str, size: Size) -> Any:
    """As ``size`` says; head dims of 16 to 64 where it leaves them to the model."""

    def of_dim(dim: int, layers: int = size.layers) -> dict[str, Any]:
        return {"vocab_size": VOCABULARY, "hidden_size": size.heads * (size.dim or dim), "intermediate_size": 32,
                "num_hidden_layers": layers, "num_attention_heads": size.heads,
                "max_position_embeddings": 2 * size.tokens, **SPREAD}  # fmt: skip

    decoder = {"num_key_value_heads": size.key_heads, **NAMED}
    if name == "llama":
        return transformers.LlamaConfig(**of_dim(64), **decoder)
    if name == "mistral":
        return transformers.MistralConfig(**of_dim(32), **decoder, sliding_window=size.window)
    if name == "qwen3":
        return transformers.Qwen3Config(**of_dim(16), **decoder, head_dim=size.dim or 24)
    if name == "gemma2":
        window = {"sliding_window": size.window, "attn_logit_softcapping": 5.0}
        return transformers.Gemma2Config(**of_dim(16, 2), **decoder, **window, head_dim=size.dim or 16)
    if name == "gpt2":
        none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        return transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=2 * size.tokens, n_embd=size.heads * (size.dim or 16), n_layer=size.layers,
            n_head=size.heads, **none, **SPREAD, **NAMED,
        )  # fmt: skip
    if name == "bert":
        return transformers.BertConfig(**of_dim(40), attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    return transformers.ModernBertConfig(
        **of_dim(48, 2), local_attention=2 * size.window, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2,
        **NAMED,
    )  # fmt: skip


def model(
    name: str, implementation: str, size: Size, dtype: torch.dtype = torch.float32, device: str = "cpu", like: Any = None
) -> Any:  # fmt: skip
    """``like``: another model, whose weights it takes."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if name in ENCODERS else transformers.AutoModelForCausalLM
    with torch.device(device):
        made = auto.from_config(config(name, size), attn_implementation=implementation, dtype=dtype).train()
    with torch.no_grad():
        for mine, theirs in zip(made.parameters(), () if like is None else like.parameters(), strict=like is not None):
            mine.copy_(theirs)
    return made


def ids(size: Size, rows: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, size.tokens), generator=torch.Generator().manual_seed(1))


CASES = ("plain", "left", "right", "packed")
#: Models and cases that are compiled.
COMPILED = (
    ("llama", "plain"), ("llama", "left"), ("llama", "packed"), ("mistral", "left"), ("qwen3", "packed"), ("gpt2", "left"),
    ("bert", "right"), ("modernbert", "packed"),
)  # fmt: skip


def sequences(case: str, size: Size) -> list[tuple[int, slice]]:
    """(row, its tokens) of each sequence. Of a padded case the first row has padding."""
    if case == "packed":
        ends = [0, *itertools.accumulate(size.documents)]
        return [(0, slice(*ends)) for ends in itertools.pairwise(ends)]
    first = {"left": slice(size.padding, None), "right": slice(0, size.tokens - size.padding)}
    return [(0, first.get(case, slice(None))), (1, slice(None))]


def attended(case: str, size: Size) -> torch.Tensor:
    """(rows, tokens), 1 for tokens and 0 for padding."""
    found = torch.zeros(2, size.tokens, dtype=torch.long)
    for row, tokens in sequences(case, size):
        found[row, tokens] = 1
    return found


def given(name: str, case: str, size: Size, device: str) -> dict[str, Any]:
    """What a model is called with, besides its tokens."""
    found: dict[str, Any] = {} if name in ENCODERS else {"use_cache": False}
    if case == "packed":
        found["position_ids"] = size.positions.to(device)
        if name in ENCODERS:  # of which Transformers looks for no documents
            starts, longest = size.offsets.to(device), max(size.documents)
            found |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts)
            found |= dict.fromkeys(("max_length_q", "max_length_k"), longest)
    elif case != "plain":
        mask = attended(case, size)
        found |= {"attention_mask": mask.to(device), "position_ids": (mask.cumsum(1) - 1).clamp(min=0).to(device)}
    return found


def alone(one: Any, name: str, case: str, tokens: torch.Tensor, size: Size) -> list[torch.Tensor]:
    """Logits of each sequence by itself, for eager."""
    options = given(name, "plain", size, tokens.device.type)
    return [one(input_ids=tokens[row, of][None], **options).logits[0] for row, of in sequences(case, size)]


def tokens_of(case: str, size: Size, device: str) -> torch.Tensor:
    return ids(size, 1 if case == "packed" else 2).to(device)


def logits_of(one: Any, name: str, case: str, size: Size) -> torch.Tensor:
    """Of tokens that are not padding."""
    device, eager = one.device.type, one.config._attn_implementation == "eager"
    tokens = tokens_of(case, size, device)
    # float64's least number, which masks padding, is -inf to eager's softmax in float32: rows of nothing else become NaN
    if eager and (one.dtype is torch.float64 or (case == "packed" and name in ENCODERS)):
        return torch.cat(alone(one, name, case, tokens, size))
    whole = one(input_ids=tokens, **given(name, case, size, device)).logits
    return torch.cat([whole[place] for place in sequences(case, size)])


def trained(one: Any, name: str, case: str, size: Size) -> dict[str, torch.Tensor]:
    """Logits and losses of tokens that are not padding, and gradients of all weights, in float64."""
    logits, following = logits_of(one, name, case, size), tokens_of(case, size, one.device.type).roll(-1, 1)
    targets = torch.cat([following[place] for place in sequences(case, size)])
    losses = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    one.zero_grad()
    losses.sum().backward()  # gradients of the mean would be subnormal in float16
    found = {"logits": logits.detach(), "loss": losses.detach()}
    for weight, parameter in one.named_parameters():
        if weight.endswith("c_attn.bias"):  # GPT-2's
            parts = (weight.replace("c_attn", part) for part in ("query", "key", "value"))
            found |= zip(parts, parameter.grad.chunk(3), strict=True)
        elif parameter.grad is not None:
            found[weight] = parameter.grad
    return {key: tensor.double() for key, tensor in found.items()}


def generated(one: Any, size: Size, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens behind prompts padded on the left, (rows, tokens + steps), and logits that chose them, (rows, steps, ...)."""
    found = one.generate(
        ids(size).to(one.device), attention_mask=attended("left", size).to(one.device), max_new_tokens=steps, do_sample=False,
        eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits, 1)


def continued(one: Any, name: str, tokens: torch.Tensor, size: Size, steps: int) -> torch.Tensor:
    """Logits by which eager chooses the same tokens: without a cache, each row alone."""
    return torch.stack([logits[-steps - 1 : -1] for logits in alone(one, name, "left", tokens, size)])


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def faults(
    found: Mapping[str, torch.Tensor], eager: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """What breaks the rule: of ``found`` by fa2tune, with ``eager`` in the same dtype and ``right`` in float64."""
    assert found.keys() == eager.keys() == right.keys()
    theirs = {name: rms(eager[name] - want) for name, want in right.items()}
    for name, want in right.items():
        allowed = theirs[name]
        if name.endswith("key.bias"):  # softmax does not see it: the gradient is 0, and what is found is rounding alone
            allowed = max(allowed, theirs[name.replace("key.bias", "query.bias")])
        allowed *= FACTOR if name in ("logits", "loss") else GRADIENT
        if not (error := rms(found[name] - want)) <= allowed:
            yield f"{name}: error {error:.2g}, allowed is {allowed:.2g} of {rms(want):.2g}"


def _three(name: str, size: Size, dtype: torch.dtype, device: str, implementation: str = NAME) -> list[Any]:
    """By fa2tune and by eager in ``dtype``, and eager in float64, with the same weights."""
    ours = model(name, implementation, size, dtype, device)
    return [ours, *(model(name, "eager", size, of, device, like=ours) for of in (dtype, torch.float64))]


def faults_trained(
    name: str, size: Size, dtype: torch.dtype, device: str = "cpu", implementation: str = NAME
) -> dict[str, list[str]]:
    """Of loss and gradients, by case. In one go: the cases share kernels, which a process compiles once."""
    three = _three(name, size, dtype, device, implementation)
    found = {case: [*faults(*(trained(one, name, case, size) for one in three))] for case in CASES}
    return {case: said for case, said in found.items() if said}


def faults_generated(
    name: str, size: Size, steps: int, dtype: torch.dtype, device: str = "cpu", implementation: str = NAME
) -> list[str]:
    """Of the logits of each step."""
    ours, eager, right = (one.eval() for one in _three(name, size, dtype, device, implementation))
    with torch.no_grad():
        tokens, logits = generated(ours, size, steps)
        assert tokens.shape == (2, size.tokens + steps)
        others = (continued(one, name, tokens, size, steps) for one in (eager, right))
        return [*faults(*({"logits": one.double()} for one in (logits, *others)))]


def faults_compiled(
    name: str, case: str, size: Size, dtype: torch.dtype, device: str = "cpu", backend: str = "inductor"
) -> list[str]:
    """Of the logits of a model that torch.compile makes one graph of, without gradients."""
    torch._dynamo.reset()  # graphs of other models count towards its limit
    three = _three(name, size, dtype, device)
    three[0].compile(fullgraph=True, backend=backend)
    with torch.no_grad():
        return [*faults(*({"logits": logits_of(one, name, case, size).double()} for one in three))]
