"""Configs of published models: which attention they ask for, what of it fa2tune computes, with which exit code."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cache_rows import CONFIG, row
from click.testing import CliRunner, Result

from fa2tune import gpus
from fa2tune.cli.cache import cache
from fa2tune.fleet import coverage, families, modelconfig
from fa2tune.fleet.modelconfig import MAX_COUNT, Model
from fa2tune.rows import reader
from fa2tune.rows.store import Store

pytest.importorskip("transformers", minversion="5.17", reason="needs the extra: pip install 'fa2tune[models]'")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
#: model -> verdict for inference, for training, and (part, layers, heads, key heads, head dim, mask, computed up to, why not
#: beyond)
MODELS: dict[str, tuple[str, str, list[tuple[Any, ...]]]] = {
    "bart-large": ("covered", "partly covered", [
        ("encoder", 12, 16, 16, 64, "full", 1024, ""),
        ("decoder", 12, 16, 16, 64, "causal", 1024, ""),
        ("cross attention", 12, 16, 16, 64, "full", 1024, ""),
    ]),
    "bert-base-uncased": ("covered", "partly covered", [
        ("", 12, 12, 12, 64, "full", 512, ""),
    ]),
    "bloom-560m": ("not covered", "not covered", [
        ("", 24, 16, 16, 64, "causal", 0, "ALiBi is added to its scores"),
    ]),
    "clip-vit-base-patch32": ("covered", "covered", [
        ("text", 12, 8, 8, 64, "causal", 77, ""),
        ("vision", 12, 12, 12, 64, "full", 50, ""),
    ]),
    "deberta-v3-base": ("not covered", "not covered", [
        ("", 12, 12, 12, 64, "full", 0, "a relative position bias is added to its scores"),
    ]),
    "deepseek-v3": ("covered", "covered", [
        ("", 61, 128, 128, (192, 128), "causal", 163840, ""),
    ]),
    "embeddinggemma-300m": ("covered", "covered", [
        ("", 20, 3, 1, 256, "full", 2048, ""),
        ("", 4, 3, 1, 256, "full", 2048, ""),
    ]),
    "falcon-40b": ("covered", "covered", [
        ("", 60, 128, 8, 64, "causal", 2048, ""),
    ]),
    "falcon-7b": ("covered", "covered", [
        ("", 32, 71, 1, 64, "causal", 2048, ""),
    ]),
    "falcon-h1-0.5b": ("covered", "covered", [
        ("", 36, 8, 2, 64, "causal", 16384, ""),
    ]),
    "falcon-rw-1b": ("not covered", "not covered", [
        ("", 24, 32, 32, 64, "causal", 0, "ALiBi is added to its scores (alibi)"),
    ]),
    "gemma-2-9b": ("covered", "covered", [
        ("", 21, 16, 8, 256, "causal", 8192, ""),
        ("", 21, 16, 8, 256, "causal", 8192, ""),
    ]),
    "gemma-3-4b-it": ("partly covered", "partly covered", [
        ("text", 29, 8, 4, 256, "causal", 131072, ""),
        ("text", 5, 8, 4, 256, "causal", 131072, ""),
        ("vision", 27, 16, 16, 72, "full", 4097, ""),
    ]),
    "gpt-neo-1.3b": ("covered", "covered", [
        ("", 12, 16, 16, 128, "causal", 2048, ""),
        ("", 12, 16, 16, 128, "causal", 2048, ""),
    ]),
    "gpt-neox-20b": ("covered", "covered", [
        ("", 44, 64, 64, 96, "causal", 2048, ""),
    ]),
    "gpt-oss-20b": ("not covered", "not covered", [
        ("", 12, 64, 8, 64, "causal", 0, "its softmax has attention sinks"),
        ("", 12, 64, 8, 64, "causal", 0, "its softmax has attention sinks"),
    ]),
    "gpt2": ("covered", "partly covered", [
        ("", 12, 12, 12, 64, "causal", 1024, ""),
    ]),
    "jamba-v0.1": ("covered", "covered", [
        ("", 4, 32, 8, 128, "causal", 262144, ""),
    ]),
    "llama-3.1-8b": ("covered", "covered", [
        ("", 32, 32, 8, 128, "causal", 131072, ""),
    ]),
    "llama-4-scout": ("covered", "covered", [
        ("text", 36, 40, 8, 128, "causal", 10485760, ""),
        ("text", 12, 40, 8, 128, "causal", 10485760, ""),
        ("vision", 34, 16, 16, 88, "full", 577, ""),
    ]),
    "llava-1.5-7b": ("covered", "covered", [
        ("text", 32, 32, 32, 128, "causal", 4096, ""),
        ("vision", 24, 16, 16, 64, "full", 577, ""),
    ]),
    "mamba-2.8b": ("not covered", "not covered", [
    ]),
    "mistral-7b-v0.1": ("covered", "covered", [
        ("", 32, 32, 8, 128, "causal", 32768, ""),
    ]),
    "mixtral-8x7b-v0.1": ("covered", "covered", [
        ("", 32, 32, 8, 128, "causal", 32768, ""),
    ]),
    "modernbert-base": ("covered", "covered", [
        ("", 8, 12, 12, 64, "full", 8192, ""),
        ("", 14, 12, 12, 64, "full", 8192, ""),
    ]),
    "mpt-7b": ("not covered", "not covered", [
        ("", 32, 32, 32, 128, "causal", 0, "ALiBi is added to its scores (alibi)"),
    ]),
    "nemotron-h-8b": ("covered", "covered", [
        ("", 4, 32, 8, 128, "causal", 8192, ""),
    ]),
    "opt-1.3b": ("covered", "covered", [
        ("", 24, 32, 32, 64, "causal", 2048, ""),
    ]),
    "phi-2": ("covered", "covered", [
        ("", 32, 32, 32, 80, "causal", 2048, ""),
    ]),
    "phi-3-mini-4k": ("covered", "covered", [
        ("", 32, 32, 32, 96, "causal", 4096, ""),
    ]),
    "qwen2-vl-7b-instruct": ("partly covered", "partly covered", [
        ("text", 28, 28, 4, 128, "causal", 32768, ""),
        ("vision", 32, 16, 16, 80, "full", 0, "several images are packed into one sequence, and each sees itself only"),
    ]),
    "qwen2.5-7b-instruct": ("covered", "covered", [
        ("", 28, 28, 4, 128, "causal", 32768, ""),
    ]),
    "qwen3-0.6b": ("covered", "covered", [
        ("", 28, 16, 8, 128, "causal", 40960, ""),
    ]),
    "qwen3-next-80b-a3b": ("covered", "covered", [
        ("", 12, 16, 2, 256, "causal", 262144, ""),
    ]),
    "roberta-base": ("covered", "partly covered", [
        ("", 12, 12, 12, 64, "full", 512, ""),
    ]),
    "starcoder2-3b": ("covered", "partly covered", [
        ("", 30, 24, 2, 128, "causal", 16384, ""),
    ]),
    "t5-base": ("partly covered", "partly covered", [
        ("encoder", 12, 12, 12, 64, "full", 0, "a relative position bias is added to its scores"),
        ("decoder", 12, 12, 12, 64, "causal", 0, "a relative position bias is added to its scores"),
        ("cross attention", 12, 12, 12, 64, "full", MAX_COUNT, ""),
    ]),
    "vit-base-patch16-224": ("covered", "covered", [
        ("", 12, 12, 12, 64, "full", 197, ""),
    ]),
    "wav2vec2-base": ("covered", "partly covered", [
        ("", 12, 12, 12, 64, "full", MAX_COUNT, ""),
    ]),
    "whisper-large-v3": ("covered", "covered", [
        ("encoder", 32, 20, 20, 64, "full", 1500, ""),
        ("decoder", 32, 20, 20, 64, "causal", 448, ""),
        ("cross attention", 32, 20, 20, 64, "full", 1500, ""),
    ]),
    "zamba2-2.7b": ("covered", "covered", [
        ("", 9, 32, 32, 160, "causal", 4096, ""),
    ]),
}  # fmt: skip


def fixture(name: str, **changes: Any) -> dict[str, Any]:
    found = json.loads((FIXTURES / f"{name}.json").read_text())
    return {key: value for key, value in {**found, **changes}.items() if value != "absent"}


def of(name: str, **changes: Any) -> Model:
    return modelconfig.model(fixture(name, **changes))


def word(model: Model, *lengths: int, training: bool = False) -> str:
    return coverage.verdict(model, lengths, training).word


def test_every_fixture_is_expected() -> None:
    assert {path.stem for path in FIXTURES.glob("*.json")} == set(MODELS)
    types = {json.loads(path.read_text())["model_type"] for path in FIXTURES.glob("*.json")}
    assert len(types) >= 30


@pytest.mark.parametrize("name", MODELS)
def test_attention_of_a_published_model(name: str) -> None:
    inference, training, expected = MODELS[name]
    found = of(name)
    assert found.unknown == ()
    dims = [
        one.head_dim if one.head_dim == one.head_dim_v else (one.head_dim, one.head_dim_v) for one in found.attentions
    ]
    assert [
        (one.part, one.layers, one.heads_q, one.heads_kv, dim, one.mask, one.longest, one.not_covered)
        for one, dim in zip(found.attentions, dims, strict=True)
    ] == expected
    assert (word(found), word(found, training=True)) == (inference, training)


# --- the wrong answers that this replaced


def test_alibi_is_not_covered() -> None:
    for name in ("falcon-rw-1b", "bloom-560m", "mpt-7b"):
        assert (
            coverage.verdict(of(name)).line.startswith("not covered: ") and "ALiBi" in coverage.verdict(of(name)).line
        )
    assert word(of("mpt-7b", attn_config={**fixture("mpt-7b")["attn_config"], "alibi": False})) == coverage.COVERED


def test_encoders_have_no_causal_mask() -> None:
    for name in ("bert-base-uncased", "roberta-base", "modernbert-base", "vit-base-patch16-224", "embeddinggemma-300m"):
        assert {one.mask for one in of(name).attentions} == {"full"}, name
    [decoder] = of("bert-base-uncased", is_decoder=True).attentions
    assert decoder.mask == "causal"
    assert {one.mask for one in of("embeddinggemma-300m", use_bidirectional_attention=False).attentions} == {"causal"}


def test_attention_dropout_concerns_training_only() -> None:
    found = of("gpt2")
    assert [one.dropout for one in found.attentions] == [0.1]
    assert word(found) == coverage.COVERED
    assert "attention dropout 0.1 in training" in coverage.verdict(found, training=True).line
    assert word(of("gpt2", attn_pdrop=0.0), training=True) == coverage.COVERED


def test_hybrid_models_count_their_attention_layers_only() -> None:
    layers = {"jamba-v0.1": (4, 28), "nemotron-h-8b": (4, 48), "zamba2-2.7b": (9, 45), "qwen3-next-80b-a3b": (12, 36)}
    for name, (with_, without) in layers.items():
        found = of(name)
        assert sum(one.layers for one in found.attentions) == with_, name
        assert any(note == f"{without} more layers have no softmax attention" for note in found.notes), found.notes


def test_falcons_key_heads() -> None:
    assert [of(name).attentions[0].heads_kv for name in ("falcon-7b", "falcon-40b", "falcon-rw-1b")] == [1, 8, 32]


def test_a_window_is_no_limit() -> None:
    found = of("mistral-7b-v0.1")
    [sliding] = found.attentions
    assert (sliding.longest, sliding.limit, sliding.window) == (32768, 32768, 4096)
    assert word(found, 2048, 4097) == word(found, 32768) == coverage.COVERED


def test_a_window_is_read_where_the_family_has_one() -> None:
    """Llama's code has no window, whatever the file says; Qwen's has one where the file switches it on."""
    found = of("llama-3.1-8b", sliding_window=4096)
    assert [(one.kind, one.window) for one in found.attentions] == [(families.FULL_KIND, 0)]
    assert "sliding_window is not read: Transformers' llama ignores it" in found.notes
    for name in ("mistral-7b-v0.1", "starcoder2-3b", "mixtral-8x7b-v0.1"):
        found = of(name, sliding_window=512)
        assert [one.window for one in found.attentions] == [512] and not any("not read" in one for one in found.notes)
    assert not any(one.window for one in of("mixtral-8x7b-v0.1", sliding_window=None).attentions)
    switched = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    for name, layers in (("qwen2.5-7b-instruct", 28), ("qwen3-0.6b", 28)):
        found = of(name, **switched, layer_types=None)
        assert {one.window: one.layers for one in found.attentions} == {0: 20, 4096: layers - 20}, name
        found = of(name, **(switched | {"use_sliding_window": False}), layer_types=None)
        assert [(one.window, one.layers) for one in found.attentions] == [(0, layers)], name
    listed = ["sliding_attention", "full_attention"]
    found = of("gemma-2-9b", layer_types=listed * 21, sliding_window=1024)
    assert {one.window: one.layers for one in found.attentions} == {0: 21, 1024: 21}


def test_the_families_that_read_a_window_are_those_whose_code_does() -> None:
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(transformers.__file__).parent / "models"
    read = set()
    for name, family in families.MODEL_FAMILIES.items():
        if family.refused or family.composite or name in ("qwen2_vl_vision", "qwen2_5_vl_vision"):  # beside their text
            continue
        config = transformers.CONFIG_MAPPING[name].from_dict({"sliding_window": 77, "use_sliding_window": True})
        if modelconfig._types(config) is None and config.sliding_window == 77:
            code = "".join(
                path.read_text() for path in (folder / model_type_to_module_name(name)).glob("modeling_*.py")
            )
            read |= {name} if "sliding_window" in code else set()
    assert read == families.WINDOW_WITHOUT_TYPES


def test_a_chunk_is_no_limit() -> None:
    found = of("llama-4-scout")
    [chunked] = [one for one in found.attentions if one.kind == families.CHUNKED]
    assert (chunked.chunk, chunked.window, chunked.longest) == (8192, 0, chunked.limit)
    assert word(found, 8192) == word(found, 8193, 1 << 20) == coverage.COVERED
    assert [one.chunk for one in found.attentions if one.kind != families.CHUNKED] == [0, 0]


def test_positions_of_roberta_start_behind_the_padding_token() -> None:
    assert [one.limit for one in of("roberta-base").attentions] == [512]


def test_positions_of_an_image() -> None:
    for size, limit in ((224, 197), ([224, 448], 14 * 28 + 1), ([], MAX_COUNT), ([224], MAX_COUNT), (0, MAX_COUNT)):
        assert [one.limit for one in of("vit-base-patch16-224", image_size=size).attentions] == [limit]


def test_defaults_of_transformers_are_said() -> None:
    assert (
        "the config has no num_attention_heads: 32, Transformers' default"
        in modelconfig.model({"model_type": "llama"}).notes
    )
    assert "text: the config has no num_attention_heads: 8, Transformers' default" in of("gemma-3-4b-it").notes
    assert not [
        note
        for name in ("gpt2", "t5-base", "whisper-large-v3", "falcon-7b")
        for note in of(name).notes
        if "has no" in note
    ]


def test_a_reason_that_several_parts_share_is_said_once() -> None:
    verdict = coverage.verdict(of("bart-large"))
    assert verdict.reasons == (
        "encoder (12 layers), decoder (12 layers), cross attention (12 layers): attention dropout 0.1 in training is not "
        "computed; inference has none",
    )
    (alone,) = coverage.verdict(of("bert-base-uncased")).reasons
    assert alone.startswith("12 layers: attention dropout 0.1")


# --- what is not understood


@pytest.mark.parametrize(
    "field",
    ["attention_sink_tokens", "alibi_slopes", "block_sparse_layout", "score_softcap", "is_causal", "position_bias", "n_head_kv",
     "use_bidirectional_attention", "attn_config", "dilated_window", "per_layer_config", "kv_sharing", "memory_config",
     "use_softmax_one", "score_bias_type", "scores_scale"],
)  # fmt: skip
def test_a_field_that_bears_on_attention_and_is_not_understood_is_named(field: str) -> None:
    found = of("llama-3.1-8b", **{field: {} if field.endswith("config") else 1})
    verdict = coverage.verdict(found)
    assert verdict.word == coverage.UNKNOWN
    assert field in verdict.line
    assert not any(one.longest or one.known for one in found.attentions)
    assert coverage.verdict(of("llama-3.1-8b", **{field: None})).word == coverage.COVERED, "null says nothing"


def test_a_field_of_a_part_is_named_with_its_part() -> None:
    text = {**fixture("gemma-3-4b-it")["text_config"], "attention_temperature": 2}
    found = of("gemma-3-4b-it", text_config=text)
    assert found.unknown == ("text: attention_temperature",)
    assert [one.known for one in found.attentions if one.part == "vision"] == [True]


def test_a_model_type_whose_attention_is_not_known() -> None:
    found = modelconfig.model({"model_type": "sam"})
    assert (word(found), found.unknown) == (coverage.UNKNOWN, ("model_type sam",))
    with pytest.raises(modelconfig.ModelConfigError, match="model_type sam: model_type sam is not understood"):
        modelconfig.attentions({"model_type": "sam"})
    inner = of("llava-1.5-7b", vision_config={"model_type": "swin2sr"})
    assert inner.unknown == ("model_type swin2sr",)


def test_layer_types_that_are_not_known() -> None:
    found = of("gpt-oss-20b", model_type="qwen3", layer_types=["full_attention"] * 23 + ["deepseek_sparse_attention"])
    assert [(one.layers, one.longest > 0) for one in found.attentions] == [(23, True), (1, False)]
    assert word(found) == coverage.UNKNOWN


def test_every_field_of_every_family_is_understood() -> None:
    """With the fields that Transformers' classes have: a file may hold any of them."""
    from transformers import CONFIG_MAPPING

    strange = []
    for name, family in families.MODEL_FAMILIES.items():
        config = CONFIG_MAPPING[name]()
        if not family.refused and (family.composite or not all(stack.refused for stack in family.stacks)):
            raw = {key: value for key, value in vars(config).items() if not key.startswith("_")}
            strange += [
                f"{name}: {one}" for one in modelconfig._not_understood(config, raw, name, set(config.sub_configs))
            ]
    assert not strange


def test_every_family_can_be_read() -> None:
    from transformers import CONFIG_MAPPING

    for name in families.MODEL_FAMILIES:
        config = json.loads(CONFIG_MAPPING[name]().to_json_string())
        try:
            found = modelconfig.model({**config, "model_type": name})
        except modelconfig.ModelConfigError as error:  # some classes' own defaults fit together badly
            assert "must be a multiple of num_attention_heads" in str(error), name
        else:
            assert found.attentions or found.refused, name
            assert not found.unknown, name


# --- hostile and absurd


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000, must be an integer of at most 4096"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: got -1"),
        ({"num_attention_heads": 0}, "num_attention_heads: got 0"),
        (dict.fromkeys(("num_attention_heads", "hidden_size"), 2 * MAX_COUNT) | {"head_dim": 64}, "heads: got 33554432"),
        ({"hidden_size": 10**30}, "hidden_size: got 1000000"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 10**9]]}, "attention_types: got 1000000000"),
        ({"layer_types": ["full_attention"] * (1 << 17)}, "layer_types: 131072 entries"),
        ({"x": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}, "x: nested more than 16 deep"),
        ({"f" * 200: 1}, "names are text of at most 128"),
        ({"model_type": "made-up"}, "model_type: got 'made-up', which Transformers 5"),
        ({"model_type": "made-up"}, "pip install -U transformers"),
        ({"model_type": "\x1b[2J"}, r"model_type: got '\\x1b\[2J'; must be a name"),
        ({"model_type": "absent"}, "model_type: it is missing"),
        ({"num_attention_heads": "\x1b]0;x\x07"}, "num_attention_heads"),
        ({"attention_dropout": 2.0}, "attention_dropout: got 2.0, must be a number from 0 to 1"),
    ],
)  # fmt: skip
def test_an_absurd_value_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(modelconfig.ModelConfigError, match=said) as raised:
        of("llama-3.1-8b", **changes)
    assert str(raised.value).isprintable()


def test_code_of_the_model_is_not_run_and_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = fixture(
        "llama-3.1-8b", auto_map={"AutoConfig": "evil.Config"}, _name_or_path=str(tmp_path), backbone="a/b"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = modelconfig.model(modelconfig.read(tmp_path))
    assert word(found) == coverage.COVERED
    assert any("auto_map" in note for note in found.notes)
    assert not (tmp_path / "ran").exists()


# --- the command


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reader, "shipped_paths", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return reader.user_path()


def run(name: str, *arguments: object) -> Result:
    path = FIXTURES / f"{name}.json"
    return CliRunner().invoke(cache, ["coverage", "--model", str(path), "--gpu", "h200", *map(str, arguments)])


def tune(model: Model, user: Path, *lengths: int) -> int:
    """Fresh rows of its own for every key of the forward."""
    from fa2tune.calling import choosing

    here, target, rows = choosing.toolchain(), gpus.named("h200"), {}
    for attention in model.attentions:
        for need in coverage.needs(
            attention, target, [], here, buckets=coverage.lengths(attention, lengths), training=False
        ):  # fmt: skip
            hashed = here.kernel_hashes[f"{need.key.kernel} {need.key.mask}"]
            rows[need.key] = row(
                asdict(need.key), config=CONFIG, triton=here.triton, driver=here.driver, kernel_hash=hashed
            )
    Store(user).put(list(rows.values()))
    return len(rows)


@pytest.mark.parametrize("name", MODELS)
def test_exit_code_of_a_model_with_all_rows(name: str, user: Path) -> None:
    count = tune(modelconfig.model(fixture(name), "bf16"), user)
    done = run(name, "--pass", "fwd", "--dtype", "bf16", "--json")
    found = json.loads(done.output)
    assert done.exit_code == found["exit_code"] == int(MODELS[name][0] != coverage.COVERED), done.output
    keys = {
        tuple(one[name] for name in ("kernel", "head_dim", "head_dim_v", "mask", "length")) for one in found["keys"]
    }
    assert (found["verdict"], len(keys), found["commands"]) == (MODELS[name][0], count, [])
    assert {one["served_by"] for one in found["keys"] if not (one["window"] or one["chunks"] or one["softcap"])} <= {
        coverage.OWN
    }
    assert {one["served_by"] for one in found["keys"] if one["window"]} <= {coverage.OTHER_ROW}
    assert {one["mask"] for one in found["keys"]} <= {one["mask"] for one in found["attention"]}


def test_windows_are_served_by_rows_without_one(user: Path) -> None:
    tune(of("mistral-7b-v0.1"), user)
    done = run("mistral-7b-v0.1", "--pass", "fwd", "--seqlen", 4096)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == "covered: 32 of 32 attention layers; 1 key on h200: 1 own row"
    done = run("mistral-7b-v0.1", "--pass", "fwd", "--seqlen", 4096, "--seqlen", 8192)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == "covered: 32 of 32 attention layers; 2 keys on h200: 1 own row, 1 other row"
    assert "note: sliding windows (window=) are served by rows that were tuned without a window" in done.output


def test_training_with_attention_dropout_is_exit_code_1(user: Path) -> None:
    tune(of("gpt2"), user)
    assert run("gpt2", "--pass", "fwd").exit_code == 0
    done = run("gpt2")
    assert done.exit_code == 1
    assert done.output.startswith("partly covered: 12 layers: attention dropout 0.1 in training is not computed")
    assert "fa2tune cache coverage --model" in done.output and "--pass fwd" in done.output


def test_a_decoder_used_as_an_encoder() -> None:
    found = json.loads(run("llama-3.1-8b", "--full", "--json", "--pass", "fwd").output)
    assert {one["mask"] for one in found["keys"]} == {"full"}


def test_everything_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from fa2tune.cli.cache import coverage as command

    screen = Console(force_terminal=True, width=80, highlight=False, markup=False)
    monkeypatch.setattr(command, "console", lambda: screen)
    for name in (
        "t5-base",
        "gemma-3-4b-it",
        "qwen2-vl-7b-instruct",
        "starcoder2-3b",
        "whisper-large-v3",
        "deepseek-v3",
    ):
        for line in run(name).output.splitlines():
            if str(FIXTURES) not in line:
                assert len(line) <= 80, line


def test_a_name_for_a_path_and_no_transformers_are_exit_code_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = CliRunner().invoke(cache, ["coverage", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "h200"])
    assert done.exit_code == 2
    assert "give the path of a config.json" in done.output and "not downloaded" in done.output
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "made-up"}))
    done = CliRunner().invoke(cache, ["coverage", "--model", str(tmp_path), "--gpu", "h200"])
    assert done.exit_code == 2 and "'made-up'" in done.output
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    done = run("gpt2")
    assert done.exit_code == 2
    assert "needs Transformers 5.17 or newer, found 4.57.6" in done.output
    assert "pip install 'fa2tune[models]'" in done.output


def test_a_checkpoint_in_float32_is_asked_about_in_16_bit_too(user: Path, tmp_path: Path) -> None:
    config = json.loads((FIXTURES / "bert-base-uncased.json").read_text()) | {"torch_dtype": "float32"}
    path = tmp_path / "config.json"
    name = str(path.with_suffix(""))
    path.write_text(json.dumps(config))
    done = run(name, "--pass", "fwd")
    said = " ".join(done.output.replace("\\\n", "").split())
    assert (
        "note: the config says float32, so fp32 is asked for; for a model that is served in 16 bit: --dtype bf16"
        in said
    )
    command = f"fa2tune cache coverage --model {path} --gpu h200 --dtype bf16 --pass fwd"
    assert command in said
    asked = run(name, "--pass", "fwd", "--dtype", "bf16")
    assert "float32" not in asked.output and command not in asked.output
    assert any("--dtype bf16" in note for note in json.loads(run(name, "--json").output)["notes"])
