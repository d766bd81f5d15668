"""What is known about the attention of model families: which mask each ``model_type`` has, and what each config field means.

The modeling files of Transformers 5.17 were searched for what changes attention (biases, soft caps, sinks, windows); the code
of a few families was read. Attention of a listed family is softmax(scale Q Kᵀ + mask) V unless ``refused`` says otherwise. A
type that is not listed is "not known to be covered". Pure data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

CAUSAL_LAYERS, FULL_LAYERS = "causal", "full"


@dataclass(frozen=True)
class Stack:
    """Attention layers that are alike, and the config fields that describe them."""

    name: str  #: "" where the model has one stack only
    mask: str  #: CAUSAL_LAYERS or FULL_LAYERS
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    width: str = "hidden_size"  #: the head dim is this divided by the heads, where no field gives it
    length: str = "max_position_embeddings"
    reserved: int = 0  #: positions of ``length`` that no token takes
    refused: str = ""  #: why no kernel computes it


@dataclass(frozen=True)
class ModelFamily:
    """The attention of one model type."""

    stacks: tuple[Stack, ...] = ()
    composite: bool = False  #: its attention is that of its parts (text_config, vision_config, ...)
    refused: str = ""  #: why no kernel computes any of it
    partly: str = ""  #: what is not computed whatever the lengths, though the stacks are
    note: str = ""  #: what else to know


#: Causal decoders with the usual fields. Layers without attention (Mamba, convolution, experts) are told by layer types.
DECODERS = """
    afmoe apertus arcee aria_text bamba biogpt bitnet codegen cohere cohere2 cwm dbrx dots1 ernie4_5 ernie4_5_moe exaone4
    exaone_moe falcon falcon_h1 flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gptj
    granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jais2 jamba lfm2 lfm2_moe
    llama llama4_text minimax minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder mpt nemotron nemotron_h
    olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open stablelm
    starcoder2 vaultgemma xglm zamba zamba2 clip_text_model
"""
#: Causal decoders with multi-head latent attention.
LATENT = "deepseek_v2 deepseek_v3 glm4_moe_lite kimi_linear longcat_flash minicpm3 mistral4 youtu"
LATENT_NOTE = "latent attention as it is trained and prefilled; decoding with the compressed cache is not covered"
#: Encoders of text or sound. BERT's relatives are causal where the file says ``is_decoder``.
ENCODERS = """
    albert bert bert-generation distilbert electra ernie esm eurobert hubert megatron-bert modernbert nomic_bert rembert
    siglip_text_model unispeech unispeech-sat wav2vec2 xlm-roberta-xl
"""
#: The same with position numbers that start behind the padding token's.
ENCODERS_WITH_OFFSET = "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta"
#: Encoders of images: every patch sees every patch.
IMAGES = """
    audio-spectrogram-transformer clip_vision_model deit dinov2 dinov2_with_registers dinov3_vit idefics3_vision ijepa
    internvl_vision llama4_vision_model siglip_vision_model smolvlm_vision vit vit_mae vit_msn vivit videomae
"""
#: Images of several sizes packed into one sequence, each of which sees itself only; beside them Pixtral and Qwen2-VL.
PACKED_IMAGES = """
    glm4v_vision qwen2_5_vl_vision qwen3_5_moe_vision qwen3_5_vision qwen3_vl_moe_vision qwen3_vl_vision
"""
#: Models of several parts.
COMPOSITES = """
    aya_vision clip cohere2_vision idefics3 internvl llama4 llava llava_next llava_onevision mistral3 qwen2_5_vl qwen2_vl
    qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe siglip smolvlm vipllava
"""
#: Encoder and decoder, with the field names of BART.
TRANSLATORS = "bart blenderbot blenderbot-small m2m_100 marian mbart pegasus plbart speech_to_text whisper"
#: Encoder and decoder, with the field names of T5.
T5S = "longt5 mt5 pop2piano switch_transformers t5 udop umt5"

RELATIVE = "a relative position bias is added to its scores"
SPARSE = "sparse attention: a query sees some of the keys only"
NO_SOFTMAX = "it has no softmax attention"
#: Reason -> families with the usual fields, causal and full.
REFUSED = {
    "ALiBi is added to its scores": ("bloom", ""),
    "its softmax has attention sinks": ("gpt_oss granite_swa granitemoe_swa", ""),
    "differential attention: the difference of two softmaxes": ("diffllama", ""),
    RELATIVE: ("", "deberta deberta-v2 mpnet"),
}
#: Reason -> families of which nothing else is read.
REFUSED_UNREAD = {
    "its softmax has attention sinks": "mimo_v2_flash",
    RELATIVE: "beit donut-swin layoutlmv3 sew-d swin swinv2 wavlm xlnet",
    SPARSE: "big_bird bigbird_pegasus deepseek_v32 deepseek_v4 glm_moe_dsa led longformer minimax_m3_vl reformer",
    "its mask lets the tokens of a prefix see each other": "paligemma prophetnet",
    NO_SOFTMAX: "fnet falcon_mamba mamba mamba2 rwkv xlstm",
}
IMAGE_TOKENS = "text with images: the tokens of an image see each other"


def _t5(bias: str) -> tuple[Stack, ...]:
    encoder = Stack("encoder", FULL_LAYERS, length="", refused=bias)
    decoder = Stack("decoder", CAUSAL_LAYERS, layers="num_decoder_layers", length="", refused=bias)
    return encoder, decoder, replace(decoder, name="cross attention", mask=FULL_LAYERS, refused="")


def _bart(source: str, target: str) -> tuple[Stack, ...]:
    encoder = Stack("encoder", FULL_LAYERS, "encoder_layers", "encoder_attention_heads", length=source)
    decoder = Stack("decoder", CAUSAL_LAYERS, "decoder_layers", "decoder_attention_heads", length=target)
    longer = source  # cross attention reads what the encoder wrote
    return encoder, decoder, replace(decoder, name="cross attention", mask=FULL_LAYERS, length=longer)


def _table() -> dict[str, ModelFamily]:
    found: dict[str, ModelFamily] = {}

    def enter(names: str, family: ModelFamily) -> None:
        for name in names.split():
            assert name not in found, name
            found[name] = family

    enter(DECODERS, ModelFamily((Stack("", CAUSAL_LAYERS),)))
    enter(LATENT, ModelFamily((Stack("", CAUSAL_LAYERS),), note=LATENT_NOTE))
    enter(ENCODERS, ModelFamily((Stack("", FULL_LAYERS),)))
    enter(ENCODERS_WITH_OFFSET, ModelFamily((Stack("", FULL_LAYERS, reserved=2),)))
    enter(IMAGES, ModelFamily((Stack("", FULL_LAYERS, length=""),)))
    packed = "several images are packed into one sequence, and each sees itself only"
    pixtral = Stack("", FULL_LAYERS, length="", refused=packed)
    enter("pixtral", ModelFamily((pixtral,)))
    qwen = replace(pixtral, layers="depth", heads="num_heads")
    enter("qwen2_vl_vision", ModelFamily((replace(qwen, width="embed_dim"),)))
    enter(PACKED_IMAGES, ModelFamily((qwen,)))
    enter(COMPOSITES, ModelFamily(composite=True))
    enter("gemma3", ModelFamily(composite=True, partly=IMAGE_TOKENS))
    positions = dict.fromkeys(TRANSLATORS.split(), ("max_position_embeddings", "max_position_embeddings"))
    positions |= dict.fromkeys(("speech_to_text", "whisper"), ("max_source_positions", "max_target_positions"))
    for name, (source, target) in positions.items():
        enter(name, ModelFamily(_bart(source, target)))
    enter(T5S, ModelFamily(_t5(RELATIVE)))
    for why, (causal, full) in REFUSED.items():
        enter(causal, ModelFamily((Stack("", CAUSAL_LAYERS, refused=why),)))
        enter(full, ModelFamily((Stack("", FULL_LAYERS, refused=why),)))
    for why, names in REFUSED_UNREAD.items():
        enter(names, ModelFamily(refused=why))
    return found


MODEL_FAMILIES = _table()

#: Layer type -> the kind of softmax attention that it has; None: it has none.
FULL_KIND, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LAYER_KINDS: dict[str, str | None] = {
    **dict.fromkeys(("full_attention", "attention", "hybrid", "global"), FULL_KIND),
    **dict.fromkeys(("sliding_attention", "local"), SLIDING),
    "chunked_attention": CHUNKED,
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "moe", "mlp", "dense", "recurrent"), None),
}
#: Fields that hold a window's size.
WINDOWS = {SLIDING: ("sliding_window", "window_size"), CHUNKED: ("attention_chunk_size",)}
#: Families that ``use_bidirectional_attention`` takes the causal mask from.
MASK_SWITCH = frozenset(("gemma", "gemma2", "gemma3_text"))
#: Families without layer types whose code reads ``sliding_window``; that of others (Llama's, say) ignores the field.
WINDOW_WITHOUT_TYPES = frozenset(
    ["ministral3", "mistral", "mixtral", "olmoe", "phi3", "phimoe", "qwen3_moe", "starcoder2"]
)
#: Families whose layers of full attention have the window, too, where there is one.
WINDOW_ALWAYS = frozenset(("minimax",))
#: Fields that list the layers' types.
LAYER_TYPES = ("layer_types", "layers_block_type", "attention_layers")
#: Fields with the probability that a weight of the softmax is dropped in training.
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
#: Families whose ``dropout_rate`` is it.
DROPOUT_RATE = frozenset(T5S.split())
#: Field -> why no kernel computes what it switches on.
SWITCHES = {
    "alibi": "ALiBi is added to its scores",
    "use_alibi": "ALiBi is added to its scores",
    "attn_logit_softcapping": "its scores are soft-capped, which its family is not known to be",
    "use_relative_position_bias": RELATIVE,
    "use_shared_relative_position_bias": RELATIVE,
    "prefix_lm": "its mask lets the tokens of a prefix see each other",
    "attn_uses_sequence_id": "its mask keeps packed documents apart",
    "add_cross_attention": "the cross attention of a decoder of this type is not read",
}
#: The field of SWITCHES that holds a tanh soft cap of the scores, and the families whose code reads it.
SOFT_CAP, SOFT_CAPPED = "attn_logit_softcapping", frozenset(("gemma2", "gemma3_text", "vaultgemma"))
#: Position embeddings that leave the scores alone; others are a bias.
POSITIONS = frozenset(("absolute", "rope", "rotary", "nope", "learned", "sinusoidal"))

#: A field whose name bears on attention, or on the number and width of its heads.
SUSPECT = re.compile(
    r"att(n|ent)|pos(ition|_|$)|mask|drop|window|soft_?cap|cap(ping)?$|causal|bidirectional|is_decoder|sink|slid|local|global"
    r"|chunk|sparse|alibi|relative|block|layer_?types?|head|kv|quer(y|ies)|qk_|pattern|prefix|nope|score|softmax",
    re.IGNORECASE,
)


def _names(*lists: str) -> frozenset[str]:
    return frozenset(name for each in lists for name in each.split())


#: Fields that are read, here or by Transformers' class, which makes layer types, head dims and windows from them.
READ = _names(
    "_sliding_window_pattern alibi_bias_max attention_chunk_size attention_head_dim attention_hidden_size",
    "attention_layers attention_types attn_layer_indices attn_layer_offset attn_layer_period attn_type",
    "d_kv decoder_attention_heads encoder_attention_heads full_attention_interval full_attn_idxs",
    "global_attn_every_n_layers head_dim hybrid_layer_ids hybrid_override_pattern is_decoder kv_channels kv_lora_rank",
    "kv_n_heads layer_types layers_block_type linear_attn_config local_attention max_position_embeddings max_seq_len",
    "max_source_positions max_target_positions max_window_layers multi_query n_head n_heads n_positions",
    "new_decoder_architecture num_attention_heads num_head num_heads num_key_value_heads num_kv_heads",
    "num_query_groups position_embedding_type position_embeddings_type qk_head_dim qk_nope_head_dim qk_rope_head_dim",
    "sliding_window sliding_window_pattern use_sliding_window v_head_dim window_size",
    " ".join(DROPOUTS), " ".join(SWITCHES),
)  # fmt: skip
#: Fields that change Q, K and V before attention or its output after it, or the scale, which every kernel takes.
AROUND = _names(
    "attention_bias attention_in_multiplier attention_multiplier attention_out_multiplier attn_scale attn_temperature_tuning",
    "clip_qkv key_bias mlp_only_layers no_rope_layer_interval no_rope_layers num_ln_in_parallel_attn parallel_attn proj_bias",
    "qk_layernorm qk_ln qk_norm qkv_bias query_bias query_pre_attn_scalar reorder_and_upcast_attn",
    "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 scale_attn_by_inverse_layer_idx scale_attn_weights use_qk_norm",
    "use_qkv_bias use_shared_attention_adapter rope_interleave softmax_scale attn_output_gate full_attn_alpha_factor",
    "full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor partial_rotary_factor",
    "original_max_position_embeddings rope_local_base_freq global_rope_theta local_rope_theta",
)  # fmt: skip
#: Fields that have nothing to do with softmax attention, though their names might.
ELSEWHERE = _names(
    # dropout of hidden states, heads and whole layers
    "activation_dropout classif_dropout classifier_dropout classifier_dropout_prob decoder_layerdrop drop_path_rate dropout",
    "emb_pdrop embd_pdrop embed_dropout embedding_dropout encoder_layerdrop feat_proj_dropout feat_quantizer_dropout",
    "final_dropout hidden_dropout hidden_dropout_prob layerdrop mlp_dropout projection_dropout projector_dropout qa_dropout",
    "resid_dropout resid_pdrop residual_dropout seq_classif_dropout summary_first_dropout summary_last_dropout token_dropout",
    # caps of the model's output, not of the scores
    "final_logit_softcapping logits_soft_cap",
    # masks of training inputs
    "mask_feature_length mask_feature_min_masks mask_feature_prob mask_ratio mask_time_length mask_time_min_masks",
    "mask_time_prob mask_token_id mask_token_index use_mask_token",
    # layers without softmax attention, and experts
    "block_auto_adjust_ff_dim block_dim block_ff_dim block_ffn_dim_multiplier block_mlp_init_scale block_multiple_of",
    "block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init chunk_size chunk_size_feed_forward",
    "decoder_sparse_step linear_head_dim linear_key_head_dim linear_num_heads linear_num_key_heads linear_num_value_heads",
    "linear_value_head_dim mamba_chunk_size mamba_d_head mamba_head_dim mamba_headdim mamba_n_heads mamba_num_heads",
    "n_mamba_heads num_local_experts router_jitter_noise sparse_pred_ignore_index sparse_prediction mlp_layer_types",
    "mtp_layers_block_type num_sparse_encoder_layers num_sparse_decoder_layers encoder_sparse_step block_size",
    # positions that are added to or turned into the inputs
    "conv_pos num_conv_pos_embedding_groups num_conv_pos_embeddings learned_pos_emb num_position_embeddings",
    "pos_embed_jitter pos_embed_rescale pos_embed_shift position_id_per_seconds sinusoidal_pos_embds",
    "use_absolute_position_embeddings use_abs_pos pos_emb_height pos_emb_width sparse_layers",
    # heads of the model, and others
    "attention_out_bias conv_pos_batch_norm fullatt_block_indexes num_mem_blocks",
    "adapter_attn_dim attn_impl attn_implementation decoder_num_attention_heads deterministic_flash_attn head_weight",
    "head_bias lm_head_bias lm_head_multiplier num_masks vision_use_head use_lm_head head_type num_block num_blocks",
    "num_block_repeats output_attentions _attn_implementation _attn_implementation_autoset use_flash_attn use_flash_attention",
    "image_seq_length projector_query_dim latent_query_num",
)  # fmt: skip
UNDERSTOOD = READ | AROUND | ELSEWHERE
#: Fields of T5's relatives that are understood there: what they describe is refused as a whole.
REFUSED_WITH_FAMILY = _names(
    "relative_attention_num_buckets relative_attention_max_distance encoder_attention_type",
    "local_radius global_block_size relative_bias_args max_2d_position_embeddings dropout_rate",
)
#: Objects inside a config that describe no part of the model.
NO_PART = _names("quantization_config compression_config generation_config linear_attn_config ffn_config peft_config")


def not_understood(fields: Iterable[tuple[str, object]], also: Iterable[str] = ()) -> list[str]:
    """Names of the fields that bear on attention and are not understood. A field that is null says nothing."""
    known = UNDERSTOOD | set(also)
    return [
        name
        for name, value in fields
        if value is not None
        and name not in known
        and (SUSPECT.search(name) or (name.endswith("_config") and name not in NO_PART))
    ]
