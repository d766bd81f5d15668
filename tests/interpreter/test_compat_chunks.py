"""Chunked attention of Transformers: a tiny Llama 4 with attn_implementation="fa2tune" and "eager"."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils as masks  # noqa: E402

import fa2tune.compat.transformers as compat  # noqa: E402
from fa2tune.compat import chunks  # noqa: E402

CHUNK, TOKENS = 5, 17
CONFIG = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "attention_chunk_size": CHUNK, "moe_layers": [],
    "num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def model(implementation):
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(**CONFIG)
    assert {chunks.KIND, "full_attention"} == set(config.layer_types)
    return transformers.Llama4ForCausalLM._from_config(config, attn_implementation=implementation).eval()


def ids():
    return torch.randint(3, 61, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def padded(side):
    tokens = torch.ones(2, TOKENS, dtype=torch.long)
    if side is not None:
        tokens[0, slice(0, 6) if side == "left" else slice(9, None)] = 0
    return tokens


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_logits_and_gradients(side):
    tokens, found = padded(side), []
    for implementation in ("fa2tune", "eager"):
        one = model(implementation)
        logits = one(ids(), attention_mask=tokens, use_cache=False).logits[tokens.bool()]
        logits.square().sum().backward()
        found.append((logits.detach(), {name: p.grad for name, p in one.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", [None, "left"])
def test_generation_passes_borders_of_chunks(side):
    options = {"attention_mask": padded(side), "max_new_tokens": 2 * CHUNK, "do_sample": False}
    found, right = (model(implementation).generate(ids(), **options) for implementation in ("fa2tune", "eager"))
    assert torch.equal(found, right) and found.shape[1] > TOKENS + CHUNK


@pytest.mark.parametrize("kv_offset", [0, 9])
@pytest.mark.parametrize("padding", [0, 3])
def test_one_query_sees_its_chunk(kv_offset, padding):
    position = 13
    tokens = torch.ones(1, position + 4, dtype=torch.long)
    tokens[0, :padding] = 0
    function = masks.chunked_causal_mask_function(CHUNK, torch.tensor([padding]))
    want = [
        bool(function(0, 0, torch.tensor(position), torch.tensor(key))) and key >= padding
        for key in range(kv_offset, position + 1)
    ]
    found = chunks.of_last_key(CHUNK, tokens[:, : position + 1].bool(), kv_offset)
    assert found.tolist() == [want]


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("length", [4, TOKENS])
def test_a_cache_with_room_behind_its_tokens(side, length):
    """Its empty places are no keys, at the prompt and in the steps behind it."""
    tokens, found = padded(side)[:, -length:], []
    for implementation in ("fa2tune", "eager"):
        one = model(implementation)
        cache = transformers.StaticCache(config=one.config, max_cache_len=32)
        given, seen, logits = ids()[:, -length:], tokens, []
        with torch.no_grad():
            for _ in range(4):
                step = one(given, attention_mask=seen, past_key_values=cache, use_cache=True).logits
                logits.append(step[:, -1])
                given, seen = ids()[:, :1], torch.nn.functional.pad(seen, (0, 1), value=1)
        found.append(torch.stack(logits))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def asked(**change):
    config = transformers.Llama4TextConfig(**CONFIG)
    left = torch.zeros(1, dtype=torch.long)
    call = {"batch_size": 1, "q_length": 8, "kv_length": 8, "config": config, "local_size": CHUNK,
            "mask_function": masks.chunked_causal_mask_function(CHUNK, left), "device": "cpu"}  # fmt: skip
    return compat.mask(**(call | change))


def test_what_there_is_not_is_refused_by_name():
    assert asked() is None
    assert asked(kv_length=24).tolist() == [[True] * 8]  # the other places of the cache hold no token yet
    with pytest.raises(NotImplementedError, match="several queries behind a cache that has dropped keys"):
        asked(q_length=2, q_offset=20, kv_offset=14)
    packed = masks.packed_sequence_mask_function(torch.zeros(1, 8, dtype=torch.long))
    both = masks.and_masks(masks.chunked_causal_mask_function(CHUNK, torch.zeros(1, dtype=torch.long)), packed)
    with pytest.raises(NotImplementedError, match="mask_function: got chunks with packed sequences"):
        asked(mask_function=both)
    holes = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]])
    layer = model("fa2tune").model.layers[0].self_attn
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 1, 8, 16)
    with pytest.raises(NotImplementedError, match=r"attention_mask: got padding between .* with chunks"):
        compat.forward(layer, q, k, k, holes.bool())
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q: got chunks with packed sequences"):
        compat.forward(layer, q, k, k, None, cu_seq_lens_q=torch.tensor([0, 8], dtype=torch.int32))
