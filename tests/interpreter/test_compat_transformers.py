"""Tiny Transformers models with attn_implementation="fa2tune" and "eager": logits, loss and gradients, padded, packed,
generating."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

transformers = pytest.importorskip("transformers")

import tiny_models  # noqa: E402
from transformers import masking_utils as masks  # noqa: E402

import fa2tune  # noqa: E402
import fa2tune.compat.transformers as compat  # noqa: E402
from fa2tune.compat import documents  # noqa: E402
from fa2tune.compat.remembered import held  # noqa: E402

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "max_position_embeddings": 64}  # fmt: skip
TOKENS = 12
SIZE = tiny_models.Size(TOKENS, padding=5, documents=(3, 5, 4), window=5)
DECODERS, ENCODERS = (*tiny_models.DECODERS, "gemma2"), tiny_models.ENCODERS


def model(name, implementation):
    return tiny_models.model(name, implementation, SIZE)


def ids(rows=2):
    return tiny_models.ids(SIZE, rows)


def padding(side):
    found = torch.ones(2, TOKENS, dtype=torch.long)
    found[0, slice(0, 5) if side == "left" else slice(7, None)] = 0
    return found


def restarts():
    """Positions of three documents."""
    return torch.cat([torch.arange(length) for length in (3, 5, 4)])[None]


def trained(name, implementation, tokens, **inputs):
    """Logits, loss and gradients; the loss is of tokens that are not padding, and whose prediction is none."""
    one = model(name, implementation)
    logits = one(input_ids=tokens, use_cache=False, **inputs).logits
    seen = inputs.get("attention_mask", torch.ones_like(tokens)).bool()
    loss = torch.nn.functional.cross_entropy(logits[seen], tokens.roll(-1, 1)[seen])
    loss.backward()
    return logits.detach()[seen], loss.detach(), {n: p.grad for n, p in one.named_parameters() if p.grad is not None}


def compared(name, tokens, **inputs):
    """In float32, where both round at the end of 24 bits."""
    found, right = (trained(name, which, tokens, **inputs) for which in ("fa2tune", "eager"))
    torch.testing.assert_close(found[0], right[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found[1], right[1], atol=1e-6, rtol=1e-6)
    assert found[2].keys() == right[2].keys()
    for parameter, gradient in right[2].items():
        torch.testing.assert_close(found[2][parameter], gradient, atol=2e-6, rtol=1e-4, msg=parameter)


LONGER = tiny_models.Size(24, padding=5, documents=(5, 11, 8), window=5)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_loss_and_gradients_against_float64(name):
    assert tiny_models.faults_trained(name, LONGER, torch.float16) == {}


@pytest.mark.parametrize("name", DECODERS)
def test_generate_against_float64(name):
    assert tiny_models.faults_generated(name, LONGER, 3, torch.float16) == []


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_padding(name):
    sides = ("left", "right") if name in ("llama", "mistral", "modernbert") else ("left",)
    for side in sides:
        compared(name, ids(), attention_mask=padding(side))


def test_labels_of_a_batch_padded_left():
    """The last padding token predicts the first token: without that label loss and gradients agree, with it they do not."""
    labels = ids().masked_fill(padding("left") == 0, -100)

    def with_gradients(implementation, labels):
        one = model("llama", implementation)
        loss = one(input_ids=ids(), attention_mask=padding("left"), labels=labels, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in one.parameters())]

    found, right = (with_gradients(which, labels)[0] for which in ("fa2tune", "eager"))
    assert (found - right).abs() > 1e-3
    labels[0, 5] = -100
    found, right = (with_gradients(which, labels) for which in ("fa2tune", "eager"))
    torch.testing.assert_close(found, right, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_no_padding(name):
    compared(name, ids(1))


@pytest.mark.parametrize(
    "options", [{}, {"use_sliding_window": True, "max_window_layers": 1}], ids=["phimoe", "qwen2_moe"]
)
def test_the_window_of_layers_that_do_not_pass_it(options):
    kinds = transformers.Qwen2MoeConfig if options else transformers.PhimoeConfig
    more = {"num_key_value_heads": 1, "sliding_window": 4, "initializer_range": 0.12, "pad_token_id": 0} | options
    more |= (
        {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1} if options else {"num_local_experts": 2}
    )
    found = []
    for which in ("eager", "fa2tune"):
        torch.manual_seed(0)
        asked = kinds(**SMALL | more | {"num_hidden_layers": 2})
        one = transformers.AutoModelForCausalLM.from_config(asked, attn_implementation=which).eval()
        with torch.no_grad():
            seen = one(input_ids=ids(), attention_mask=padding("left")).logits[padding("left").bool()]
            steps = one.generate(
                ids(1), max_new_tokens=3, eos_token_id=None, output_logits=True, return_dict_in_generate=True
            )
        found.append([one(input_ids=ids(), use_cache=False).logits, seen, torch.stack(steps.logits)])
    for right, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_by_positions_that_restart(name):
    compared(name, ids(1), position_ids=restarts())


STARTS = (0, 3, 8, TOKENS)


def apart(name, implementation="eager"):
    """Logits of the three documents by themselves."""
    one, parts = model(name, implementation), itertools.pairwise(STARTS)
    return torch.cat([one(input_ids=ids(1)[:, slice(*part)], use_cache=False).logits for part in parts], 1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("inputs", [{}, {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)}], ids=["", "ones"])
def test_documents_are_apart_where_transformers_looks_for_none(name, inputs):
    """With a cache or a mask, as with flash_attention_2. Positions may begin above 0."""
    with torch.no_grad():
        right = apart(name)
        found = model(name, "fa2tune")(input_ids=ids(1), position_ids=restarts(), **inputs)
        torch.testing.assert_close(found.logits, right, atol=2e-6, rtol=1e-5)
        assert found.past_key_values.get_seq_length() == TOKENS
    logits = trained(name, "fa2tune", ids(1), position_ids=restarts(), **inputs)[0]
    torch.testing.assert_close(logits, right[0], atol=2e-6, rtol=1e-5)


def attended(positions, queries=TOKENS, keys=TOKENS, rows=1, layer=None, **options):
    """The output; None: it is the same without positions."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(rows, 2, length, 16) for length in (queries, keys, keys))
    layer = torch.nn.Module() if layer is None else layer
    found, plain = (
        compat.forward(layer, q, k, v, None, position_ids=given, **options)[0] for given in (positions, None)
    )
    return None if torch.equal(found, plain) else found


def test_which_positions_say_documents(monkeypatch):
    """Those of one row, as many as keys, that come back to the least of them: as with flash_attention_2."""
    same = attended(restarts())
    assert torch.equal(attended(restarts() + 5), same)
    assert torch.equal(attended(restarts().to(torch.int32), is_causal=True), same)
    gap = torch.arange(TOKENS)[None] + torch.arange(TOKENS).ge(7)
    for positions in (torch.arange(TOKENS)[None], gap, None, restarts()[0], restarts()[None], restarts()[:, :5]):
        assert attended(positions) is None
    for positions in (restarts(), restarts().expand(2, -1)):
        assert attended(positions, rows=2) is None
    assert attended(restarts(), keys=TOKENS + 2) is None
    assert attended(torch.zeros(1, 1, dtype=torch.long), queries=1, keys=TOKENS) is None
    with FakeTensorMode():
        q, positions = torch.empty(1, 2, TOKENS, 16), torch.arange(TOKENS)[None]
        assert compat.forward(torch.nn.Module(), q, q, q, None, position_ids=positions)[0].shape == (1, TOKENS, 2, 16)
    known = restarts()
    attended(known)
    monkeypatch.setattr(compat.terms, "capturing", lambda: True)
    assert attended(restarts()) is None
    with pytest.raises(NotImplementedError, match=r"position_ids: got documents while a CUDA graph is captured"):
        attended(known)


def test_positions_are_read_once(monkeypatch):
    """And once more where they have changed; of a tensor of inference mode once a pass, as nothing tells."""
    reads, layers = [], [torch.nn.Module(), torch.nn.Module()]
    read = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: reads.append(tensor) or read(tensor))
    for inference in (False, True):
        with torch.inference_mode(inference):
            positions = torch.arange(TOKENS)[None].clone()
            for changed in (False, True):
                if changed:
                    positions.copy_(restarts())
                reads.clear()
                for layer in reversed(layers) if changed else layers:
                    assert (attended(positions, layer=layer) is not None) is changed
                assert len(reads) == 1
            kept = set(held(positions))
            for step in range(3):
                positions.copy_(restarts() + step)
                attended(positions, layer=layers[0])
            assert set(held(positions)) == kept  # nothing of what it held before


def test_documents_are_apart_in_a_graph_with_a_cache():
    one, tokens = model("llama", "fa2tune"), ids(1)
    torch._dynamo.reset()
    run = torch.compile(lambda given: one(input_ids=tokens, position_ids=given).logits, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(run(restarts()), apart("llama"), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(run(torch.arange(TOKENS)[None]), one(input_ids=tokens).logits, atol=2e-6, rtol=1e-5)


def test_offsets_of_documents_are_few_sizes():
    numbers = torch.tensor([[1, 1, 2, 2, 2, 0], [2, 2, 2, 2, 2, 3]], dtype=torch.int32)
    assert fa2tune.cu_seqlens(document_ids=numbers).tolist() == [0, 2, 5, 6, 11, 12, 12, 12, 12]
    assert fa2tune.cu_seqlens(document_ids=numbers[:1, :2]).tolist() == [0, 2]


def test_packed_by_offsets_is_packed_by_positions():
    starts = torch.tensor([0, 3, 8, TOKENS], dtype=torch.int32)
    with torch.no_grad():
        one = model("llama", "fa2tune")
        found = one(input_ids=ids(1), position_ids=restarts(), use_cache=False).logits
        packing = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5, "max_length_k": 5}
        same = one(input_ids=ids(1), position_ids=restarts(), use_cache=False, **packing).logits
    assert torch.equal(found, same)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_from_padded_prompts(cache):
    options = {"attention_mask": padding("left"), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    right = model("llama", "eager").eval().generate(ids(), **options)
    with torch.inference_mode():
        options |= {"cache_implementation": cache, "disable_compile": True} if cache else {}
        assert torch.equal(model("llama", "fa2tune").eval().generate(ids(), **options), right)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("padded", [True, False])
def test_generate_compiles_the_steps_of_a_static_cache(name, padded):
    """As it does on a GPU, unasked: one graph for all steps, also for the one that fills the cache."""
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["attention_mask"] = padding("left") if padded else torch.ones(2, TOKENS, dtype=torch.long)
    right = model(name, "eager").eval().generate(ids(), **options)
    torch._dynamo.reset()
    graphs = []
    compiling = transformers.CompileConfig(
        fullgraph=True, mode=None, backend=lambda graph, inputs: graphs.append(graph) or graph
    )
    compiling._compile_all_devices = True
    one = model(name, "fa2tune").eval()
    found = one.generate(ids(), **options, cache_implementation="static", compile_config=compiling)
    assert torch.equal(found, right)
    assert name != "llama" or len(graphs) == 1


@pytest.mark.parametrize("window", [13, 14])
def test_padding_in_the_window_of_a_static_cache_once_it_has_moved(window):
    """``generate`` makes a mask ahead, of which a model that makes it anew would leave out the same keys twice."""
    wide = transformers.MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=window)
    options = {"attention_mask": padding("left"), "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    options |= {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    found = []
    for implementation, cache in (
        ("eager", {}),
        ("fa2tune", {"cache_implementation": "static", "disable_compile": True}),
    ):
        torch.manual_seed(0)
        one = transformers.AutoModelForCausalLM.from_config(wide, attn_implementation=implementation).eval()
        found.append(torch.stack(one.generate(ids(), **options, **cache).logits))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_documents_of_any_integer_are_documents():
    numbers = torch.tensor([[0, 0, 1, 1, 2, 2]])
    torch.manual_seed(0)
    q = torch.randn(1, 2, 6, 16)
    outs = [compat.forward(torch.nn.Module(), q, q, q, numbers.to(dtype))[0] for dtype in (torch.int32, torch.uint8)]
    assert torch.equal(*outs)


def test_the_mask_of_one_query_of_a_static_cache_is_as_long_as_the_cache():
    """Nothing waits for the number of tokens so far, and no graph depends on it."""
    seen = torch.ones(2, 20, dtype=torch.bool)
    seen[0, :3] = False
    for tokens in (seen[:, :9], seen, None):
        found = compat.mask(2, 1, 16, q_offset=torch.tensor(8), attention_mask=tokens)
        assert found.shape == (2, 1, 1, 16) and found.dtype is torch.uint8
        assert found[1, 0, 0].tolist() == [1] * 9 + [0] * 7
        assert found[0, 0, 0].tolist() == [1 if tokens is None else 0] * 3 + [1] * 6 + [0] * 7
    assert compat.mask(2, 1, 4, 8, kv_offset=5, attention_mask=~seen[:, :9]).shape == (2, 1, 1, 4)
    found = compat.mask(2, 1, 4, q_offset=torch.tensor(8), kv_offset=5, attention_mask=seen[:, :9])
    assert found.flatten(1).tolist() == [[1] * 4] * 2
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 16, 16), torch.randn(2, 2, 16, 16)
    mask = compat.mask(2, 1, 16, q_offset=torch.tensor(8), attention_mask=seen)
    for window, first in ((None, 0), (4, 5)):
        out, _ = compat.forward(torch.nn.Module(), q, k, v, mask, sliding_window=window)
        visible = mask.bool() & (torch.arange(16) >= first)
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        torch.testing.assert_close(out, right.transpose(1, 2))


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_model_that_keeps_the_last_query_of_its_masks(cache):
    """Gemma 4, whose last layers take keys of layers before them."""
    shared = transformers.Gemma4TextConfig(
        **{**SMALL, "num_hidden_layers": 3}, num_key_value_heads=1, head_dim=16, global_head_dim=16, sliding_window=4,
        vocab_size_per_layer_input=61, hidden_size_per_layer_input=8, num_kv_shared_layers=1, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )  # fmt: skip
    options = {"attention_mask": padding("left"), "max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    options |= {"cache_implementation": cache, "disable_compile": True} if cache else {}
    found = []
    for implementation in ("fa2tune", "eager"):
        torch.manual_seed(0)
        one = transformers.AutoModelForCausalLM.from_config(shared, attn_implementation=implementation).eval()
        found.append(one.generate(ids(), **options))
    assert torch.equal(*found)
    keys = compat.mask(2, TOKENS, TOKENS, attention_mask=padding("left").bool(), config=shared)
    assert keys.shape == (2, 1, 1, TOKENS)
    q = torch.randn(2, 2, TOKENS, 16)
    with pytest.raises(NotImplementedError, match=r"attention_mask: got Tensor of shape \(2, 1, 1, 12\)"):
        compat.forward(torch.nn.Module(), q, q, q, keys)


def decoded(implementation, tokens, seen, steps):
    """Logits of a prompt and of a token at a time behind it, in a static cache as long as the mask ``seen``."""
    one = model("llama", implementation).eval()
    cache = transformers.StaticCache(config=one.config, max_cache_len=seen.shape[1])
    parts = tokens[:, :-steps], *tokens[:, -steps:].split(1, dim=1)
    return [one(input_ids=part, attention_mask=seen, past_key_values=cache).logits for part in parts]


def test_a_mask_as_long_as_a_static_cache():
    """It says nothing of how many tokens there are so far: 1 for each token to come, and padding on the left."""
    seen = torch.ones(2, TOKENS + 8, dtype=torch.long)
    seen[0, :3] = 0
    with torch.inference_mode():
        for filled in (1, 0):
            seen[:, TOKENS:] = filled
            found, right = (decoded(which, ids(), seen, 3) for which in ("fa2tune", "eager"))
            tokens = seen[:, : TOKENS - 3].bool()
            torch.testing.assert_close(found[0][tokens], right[0][tokens], atol=2e-6, rtol=1e-5)
            for one, other in zip(found[1:], right[1:], strict=True):
                torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("length", [None, 16, 20])
def test_a_mask_as_long_as_a_static_cache_is_refused_while_a_graph_is_made(monkeypatch, length):
    monkeypatch.setattr(compat.terms, "capturing", lambda: True)
    tokens = None if length is None else torch.ones(1, length, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"fa2tune: attention_mask: got (None|a mask of (16|20) tokens)"):
        compat.mask(1, 2, 16, q_offset=torch.tensor(4), attention_mask=tokens)
    assert compat.mask(1, 2, 16, q_offset=torch.tensor(4), attention_mask=torch.ones(1, 6)).shape == (1, 1, 1, 6)


@pytest.mark.parametrize("name, case", tiny_models.COMPILED)
def test_torch_compile_against_float64(name, case):
    assert tiny_models.faults_compiled(name, case, LONGER, torch.float16, backend="eager") == []


@pytest.mark.parametrize("inputs", [{"attention_mask": padding("right")[:1]}, {"position_ids": restarts()}], ids=str)
def test_torch_compile_without_graph_breaks(inputs):
    tokens = ids(1)
    with torch.no_grad():
        one = model("mistral", "fa2tune")
        run = torch.compile(
            lambda: one(input_ids=tokens, use_cache=False, **inputs).logits, fullgraph=True, backend="eager"
        )
        assert torch.equal(run(), one(input_ids=tokens, use_cache=False, **inputs).logits)


def test_padding_in_the_middle_and_rows_of_nothing_but_padding():
    """Holes keep the order of tokens; a row without a token gives zeros."""
    tokens = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 16) for _ in range(3))
    out, weights = compat.forward(torch.nn.Module(), q, k, v, tokens)
    right = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=tokens[:, None, None] & torch.ones(6, 6, dtype=torch.bool).tril()
    ).transpose(1, 2)
    assert weights is None
    torch.testing.assert_close(out[0, tokens[0]], right[0, tokens[0]])
    assert not out[1].any() and not out[0, ~tokens[0]].any()


def test_padding_in_the_middle_is_refused_where_a_window_would_count_it():
    """Mistral's window reaches 4 keys back: past three of padding it would reach 7."""
    holes = torch.tensor([[1, 1, 1, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 0, 0]])
    one, tokens = model("mistral", "fa2tune"), ids()[:, :9]
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"attention_mask: got padding between .* \(4, 0\)"):
        one(input_ids=tokens, attention_mask=holes, use_cache=False)
    compared("mistral", tokens[1:], attention_mask=holes[1:])
    compared("mistral", tokens[:1, 2:7], attention_mask=holes[:1, 2:7])  # the window hides nothing of 5 positions
    compared("llama", tokens[:1], attention_mask=holes[:1])
    q = torch.randn(1, 2, 9, 16)
    with pytest.raises(NotImplementedError, match=r"attention_mask: got padding between .* \(2, 2\)"):
        compat.forward(torch.nn.Module(), q, q, q, holes[:1].bool(), sliding_window=3, is_causal=False)


def test_a_cross_attention_attends_from_every_query():
    tokens = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, length, 16) for length in (5, 5, 5))
    out, _ = compat.forward(torch.nn.Module(), q, k, v, tokens, is_causal=False)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=tokens[:, None, None])
    torch.testing.assert_close(out, right.transpose(1, 2))


SIDE = {"d_model": 32, "vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PARTS = {f"{side}_{what}": value for side in ("encoder", "decoder")
         for what, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip


def sequences(implementation, config, **inputs):
    """Logits and gradients of a model with an encoder and a decoder."""
    torch.manual_seed(0)
    one = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=implementation).eval()
    logits = one(**inputs).logits
    logits.sin().sum().backward()
    return logits, {name: weight.grad for name, weight in one.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", ["bart", "t5gemma"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_sees_every_key_of_its_encoder(name, padded):
    """Fewer queries than keys; T5Gemma's encoder has a window that looks both ways."""
    if name == "bart":
        config = transformers.BartConfig(**SIDE, **PARTS, dropout=0.0, max_position_embeddings=64)
    else:
        side = {**SMALL, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4}
        config = transformers.T5GemmaConfig(encoder=side, decoder=side, vocab_size=61)
    inputs = {
        "input_ids": ids(),
        "decoder_input_ids": ids()[:, :5],
        "attention_mask": padding("right") if padded else None,
    }
    (found, gradients), (right, others) = (sequences(which, config, **inputs) for which in ("fa2tune", "eager"))
    torch.testing.assert_close(found, right, atol=2e-6, rtol=1e-5)
    assert gradients.keys() == others.keys()
    for weight, gradient in others.items():
        torch.testing.assert_close(gradients[weight], gradient, atol=1e-5, rtol=1e-3, msg=weight)


def test_models_that_attend_by_themselves_are_refused_by_name():
    """They do not look up fa2tune, and its mask would mean something else to them."""
    for config in (
        transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=2),
        transformers.MptConfig(vocab_size=61, d_model=32, n_layers=1, n_heads=2, max_seq_len=64),  # has a sub-config
    ):
        one = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="fa2tune")
        refusal = rf"attn_implementation: got 'fa2tune' for a model of type '{config.model_type}', allowed is 'eager'"
        with pytest.raises(NotImplementedError, match=refusal):
            one(input_ids=ids())
        with pytest.raises((NotImplementedError, RuntimeError), match=refusal):
            torch.compile(one, fullgraph=True, backend="eager")(input_ids=ids(), use_cache=False)


def test_layers_that_do_not_say_whether_they_are_causal_look_both_ways():
    """Splinter's. A user's own are causal, as in Transformers' sdpa."""
    small = {**SMALL, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    for seen in (None, padding("right")):
        found, right = (answered(which, small, seen) for which in ("fa2tune", "eager"))
        torch.testing.assert_close(found, right, atol=2e-6, rtol=1e-5)


def answered(implementation, small, seen):
    torch.manual_seed(0)
    one = transformers.AutoModel.from_config(
        transformers.SplinterConfig(**small), attn_implementation=implementation
    ).eval()
    with torch.no_grad():
        tokens = torch.ones_like(ids()) if seen is None else seen
        return one(input_ids=ids(), attention_mask=seen).last_hidden_state[tokens.bool()]


def test_a_vision_model_whose_layers_say_that_they_are_causal_looks_both_ways():
    found = []
    for implementation in ("fa2tune", "eager"):
        torch.manual_seed(0)
        config = transformers.Phi4MultimodalVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        )
        config._attn_implementation = implementation
        pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        one = transformers.Phi4MultimodalVisionModel(config).eval()
        with torch.no_grad():
            for weight in one.parameters():  # the model's own make scores of hundreds, which float32 rounds coarsely
                weight.normal_(std=0.1)
            found.append(one(pixel_values=pixels).last_hidden_state)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["BigBirdPegasus", "PegasusX", "NllbMoe"])
def test_models_whose_layers_deny_their_causal_masks_are_refused_by_name(name):
    """Without a padding token their masks are None, and say nothing."""
    config = getattr(transformers, f"{name}Config")(**SIDE, **PARTS, max_position_embeddings=64)
    one = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="fa2tune")
    refusal = f"a model of type '{config.model_type}', allowed is 'eager': this model's masks are causal"
    with pytest.raises(NotImplementedError, match=refusal):
        one(input_ids=ids(), decoder_input_ids=ids())


@pytest.mark.parametrize(("dim", "given"), [(16, {}), (12, {}), (16, {"attention_mask": padding("left").bool()})])
def test_outputs_can_be_viewed_as_batch_length_and_the_rest(dim, given):
    """AFMoE's queries are a contiguous (batch, heads, length, dim), and it views the output without a copy."""
    q = torch.randn(2, 2, TOKENS, dim)
    seen = given.get("attention_mask")
    for causal in (True, False):
        out, _ = compat.forward(torch.nn.Module(), q, q, q, seen, is_causal=causal)
        assert out.view(2, TOKENS, -1).shape == (2, TOKENS, 2 * dim)


def test_models_that_choose_keys_are_refused_by_name():
    """They index a mask as one of 4 dimensions, also where there is none."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
              "index_n_heads": 2, "index_head_dim": 16}  # fmt: skip
    for config, setting in (
        (transformers.DeepseekV32Config(**SMALL, **latent, index_topk=4, first_k_dense_replace=1), "index_topk: got 4"),
        (transformers.DogeConfig(**SMALL), "keep_window_size: got 2048"),
    ):
        one = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="fa2tune")
        for seen in (None, padding("left")):
            with pytest.raises(
                NotImplementedError, match=f"fa2tune: {setting} in the configuration of a model of type"
            ):
                one(input_ids=ids(), attention_mask=seen)


def test_masks_that_there_are_not_are_refused_by_name():
    left = torch.zeros(1, dtype=torch.long)
    for function, what in (
        (masks.chunked_causal_mask_function(4, left), "chunked attention"),
        (masks.or_masks(masks.causal_mask_function, masks.bidirectional_mask_function), "unions of masks"),
        (masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: q >= k), "masks of the model's own"),
    ):
        with pytest.raises(NotImplementedError, match=f"fa2tune: mask_function: got {what}"):
            compat.mask(1, 8, 8, mask_function=function)
    for function in (masks.sliding_window_causal_mask_function(4), masks.sliding_window_bidirectional_mask_function(4)):
        assert compat.mask(1, 8, 8, mask_function=function) is None


def test_what_a_model_may_ask_for_and_there_is_not_is_refused_by_name():
    q = torch.randn(1, 2, 8, 16)
    for name, value in (("dropout", 0.1), ("s_aux", torch.zeros(2)), ("position_bias", torch.zeros(1, 2, 8, 8)),
                        ("cache", object()), ("output_attentions", True), ("sinks", torch.zeros(1, 2, 8, 1)),
                        ("indices", torch.zeros(1, 8, 2)), ("block_indices", torch.zeros(1, 2, 8, 2))):  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"fa2tune: {name}: got .* allowed is"):
            compat.forward(torch.nn.Module(), q, q, q, None, **{name: value})
    with pytest.raises(NotImplementedError, match=r"attention_mask: got Tensor of shape \(1, 1, 8, 8\)"):
        compat.forward(torch.nn.Module(), q, q, q, torch.zeros(1, 1, 8, 8))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_attention_probabilities_are_refused_also_where_layers_are_not_told(name):
    """GPT-2 does not pass ``output_attentions`` on."""
    one = model(name, "fa2tune")
    assert one(input_ids=ids(), output_attentions=False, output_hidden_states=True).attentions is None
    with pytest.raises(NotImplementedError, match="fa2tune: output_attentions: got True, allowed is None or False"):
        one(input_ids=ids(), output_attentions=True)


def test_both_halves_are_registered():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS["fa2tune"] is compat.forward
    assert masks.ALL_MASK_ATTENTION_FUNCTIONS["fa2tune"] is compat.mask


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "fa2tune.compat.transformers")
    with pytest.raises(ImportError, match=r"fa2tune\.compat\.transformers needs .*pip install 'fa2tune\[models\]'"):
        importlib.import_module("fa2tune.compat.transformers")


def test_layers_share_one_schedule(monkeypatch):
    """Made once for what ``mask`` gives, of documents and of padding, which are sequences of their own each."""
    made = []
    schedule = documents.varlen_schedule
    monkeypatch.setattr(
        documents, "varlen_schedule", lambda *given, **rows: made.append(rows) or schedule(*given, **rows)
    )
    q, ids_of = torch.randn(2, 2, TOKENS, 16), torch.arange(TOKENS).div(3, rounding_mode="floor").int().expand(2, -1)
    for seen, sequences in ((ids_of, 1), (padding("left").bool(), 2)):
        made.clear()
        found = [
            compat.forward(torch.nn.Module(), q, q, q, seen, is_causal=causal)[0]
            for _layer in range(2)
            for causal in (True, False)
        ]
        assert len(made) == sequences
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
