"""What a model needs, by its config.json, and what serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cache_rows import CONFIG, row
from click.testing import CliRunner, Result
from variant_fakes import DEFAULT

from fa2tune.cli.cache import cache
from fa2tune.fleet.modelconfig import MOST, Attention, ModelConfigError, attentions, read
from fa2tune.rows import reader
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.variant import WARP_SPECIALIZED

#: The fields that matter of the config.json of published models.
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN25 = {
    "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
    "max_position_embeddings": 131072, "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "num_hidden_layers": 28, "max_position_embeddings": 40960, "sliding_window": None, "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None,
    "num_hidden_layers": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA = {
    "model_type": "gemma", "hidden_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
    "num_hidden_layers": 28, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16},
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 61,
    "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
}  # fmt: skip


def full(**changes: Any) -> Attention:
    values = {
        "layers": 32,
        "heads_q": 32,
        "heads_kv": 8,
        "head_dim": 128,
        "head_dim_v": 128,
        "dtype": "bf16",
        "longest": 8192,
    }
    return Attention(**{**values, **changes})


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (LLAMA, [full()]),
        (QWEN25, [full(layers=28, heads_q=28, heads_kv=4, longest=131072)]),
        (QWEN3, [full(layers=28, heads_q=16, heads_kv=8, longest=40960)]),
        (GEMMA, [full(layers=28, heads_q=16, heads_kv=16, head_dim=256, head_dim_v=256)]),
        (DEEPSEEK, [full(layers=61, heads_q=128, heads_kv=128, head_dim=192, longest=163840)]),
    ],
    ids=["llama", "qwen2.5", "qwen3", "gemma", "deepseek"],
)
def test_models_with_full_attention(config: dict[str, Any], found: list[Attention]) -> None:
    assert attentions(config) == found


def test_a_window_is_plain_causal_attention_as_far_as_it_reaches() -> None:
    [sliding] = attentions(MISTRAL)
    assert (sliding.layers, sliding.longest) == (32, 4096)
    assert "beyond 4096" in sliding.not_covered
    sliding, plain = sorted(attentions(GEMMA3), key=lambda a: a.longest)
    assert (plain.layers, plain.head_dim, plain.longest, plain.not_covered) == (5, 256, 131072, "")
    assert (sliding.layers, sliding.longest) == (29, 1024)
    types = ["sliding_attention", "full_attention", "linear_attention"]
    kinds = {a.kind: a for a in attentions({**LLAMA, "layer_types": types, "sliding_window": 512})}
    assert [kinds[kind].longest for kind in types] == [512, 8192, 0]
    assert "no softmax attention" in kinds["linear_attention"].not_covered
    [qwen] = attentions({**QWEN25, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 4096})
    assert qwen.longest == 4096


def test_what_no_kernel_computes_is_said() -> None:
    for change, said in (
        ({"head_dim": 320}, "head dim 320"),
        ({"head_dim": 100}, "head dim 100"),
        ({"attn_logit_softcapping": 50.0}, "soft-capped"),
        ({"model_type": "gpt_oss"}, "sinks"),
    ):
        [found] = attentions({**LLAMA, **change})
        assert said in found.not_covered
        assert found.longest == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": None}, "num_attention_heads: it is missing, must be an integer"),
        ({"num_attention_heads": "32"}, "num_attention_heads: got '32'"),
        ({"num_attention_heads": True}, "num_attention_heads: got True"),
        ({"num_attention_heads": -1}, "num_attention_heads: got -1"),
        ({"num_attention_heads": MOST * 2}, "num_attention_heads: got"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: got 5, must divide"),
        ({"hidden_size": 4097}, "hidden_size: got 4097"),
        ({"torch_dtype": "float8"}, "torch_dtype: got 'float8', allowed are bfloat16"),
        ({"layer_types": "full"}, "layer_types: got"),
        ({"layer_types": []}, r"layer_types: got \[\], must be a list"),
        ({"layer_types": [1]}, "layer_types: got"),
        ({"layer_types": ["\x1b[2J"]}, "layer_types: got"),
        ({"sliding_window": "x"}, "sliding_window: got"),
        ({"sliding_window": 1, "use_sliding_window": 1}, "use_sliding_window: got 1"),
        ({"max_position_embeddings": 1e9}, "max_position_embeddings: got"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelConfigError, match=said):
        attentions({**LLAMA, **change})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"a":' * 20000, "cannot be read"),
        (b" " * (2 << 20), "larger than 1 MiB"),
    ],
    ids=["empty", "list", "no text", "deep", "large"],
)
def test_a_file_that_is_no_config_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=said):
        read(tmp_path / "config.json")
    with pytest.raises(ModelConfigError, match="no file"):
        read(tmp_path / "none")


# --- the command


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reader, "shipped_paths", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return reader.user_path()


def covered(folder: Path, config: dict[str, Any], *arguments: object) -> Result:
    (folder / "config.json").write_text(json.dumps(config))
    return CliRunner().invoke(cache, ["coverage", "--model", str(folder), *map(str, arguments)])


def served(**key: object) -> Row:
    return row(dict(key), config=CONFIG, triton="", driver="", kernel_hash="")


def fresh(**key: object) -> Row:
    from fa2tune.calling import dispatch

    here = dispatch.toolchain()
    made = served(**key)
    return row(dict(key), config=CONFIG, triton=here.triton, driver=here.driver,
               kernel_hash=here.kernel_hashes[made.key.kernel])  # fmt: skip


def test_every_key_its_row_and_the_commands_that_close_the_gaps(user: Path, tmp_path: Path) -> None:
    Store(user).put([fresh(bucket=4096), served(bucket=8192)])
    done = covered(
        tmp_path, LLAMA, "--gpu", "h200", "--pass", "fwd", "--seqlen", 2000, "--seqlen", 4096, "--seqlen", 8000
    )
    assert done.exit_code == 1, done.output
    lines = [line.split() for line in done.output.splitlines() if line.startswith("fwd ")]
    assert {line[4]: line[5] for line in lines} == {"2048": "other", "4096": "own", "8192": "stale"}
    assert "fa2tune tune --gpu h200 --headdim 128 --dtype bf16 --causal --pass fwd --seqlen 2048" in done.output
    assert "fa2tune cache verify --stale --repair" in done.output


def test_lengths_that_are_served_alike_are_one_line(user: Path, tmp_path: Path) -> None:
    Store(user).put([fresh(bucket=1024)])
    done = covered(tmp_path, LLAMA, "--gpu", "h200", "--pass", "fwd")
    lines = {line.split()[4]: line for line in done.output.splitlines() if line.startswith("fwd ")}
    assert "512" in lines and "1024" in lines and "2048-8192" in lines, done.output
    assert "own row" in lines["1024"] and lines["2048-8192"].rstrip().endswith("bucket 1024")
    assert "5 keys: " in done.output, "counted one by one"


def test_nothing_to_close_is_exit_code_0(user: Path, tmp_path: Path) -> None:
    Store(user).put([fresh(bucket=4096)])
    done = covered(tmp_path, LLAMA, "--gpu", "h200", "--pass", "fwd", "--seqlen", 4096)
    assert done.exit_code == 0, done.output
    assert "every key has a row of its own" in done.output


@pytest.mark.usefixtures("specialized_fakes")
def test_a_warp_specialised_backward_is_served_from_a_named_file(tmp_path: Path) -> None:
    ways = dict.fromkeys(("bwd_dq", "bwd_dkdv"), WARP_SPECIALIZED)
    rows = [row({"kernel": name}, variant=WARP_SPECIALIZED, config=dict(DEFAULT)) for name in ways]
    rows.append(row({"kernel": "bwd"}, variant=f"split_{WARP_SPECIALIZED}", config=ways))
    Store(tmp_path / "named.sqlite").put(rows)
    done = covered(tmp_path, LLAMA, "--gpu", "h200", "--seqlen", 4096, "--cache", tmp_path / "named.sqlite")
    standing = {
        line.split()[0]: line.split()[5] for line in done.output.splitlines() if line.startswith(("fwd ", "bwd"))
    }
    assert standing == {"fwd": "default", "bwd": "stale", "bwd_dq": "stale", "bwd_dkdv": "stale"}, done.output


def test_v_head_dims_windows_and_the_backward(user: Path, tmp_path: Path) -> None:
    done = covered(tmp_path, DEEPSEEK, "--gpu", "h200", "--seqlen", 4096)
    assert "192/128" in done.output
    assert (
        "fa2tune tune --gpu h200 --headdim 192 --headdim-v 128 --dtype bf16 --causal --pass both --seqlen 4096"
        in done.output
    )
    for kernel in ("fwd", "bwd", "bwd_dq", "bwd_dkdv"):
        assert any(line.startswith(f"{kernel} ") for line in done.output.splitlines()), kernel
    done = covered(tmp_path, GEMMA3, "--gpu", "h200", "--pass", "fwd")
    assert "29 layers" in done.output and "beyond 1024" in done.output
    done = covered(tmp_path, {**LLAMA, "head_dim": 320}, "--gpu", "h200")
    assert done.exit_code == 1
    assert "head dim 320" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h900"], "`fa2tune gpus` lists them"),
        (["--gpu", "h200", "--seqlen", 0], "0 is not in the range"),
        (["--gpu", "h200", "--seqlen", 9000], "at most 8192"),
        (["--gpu", "h200", "--cache", "/nowhere.sqlite"], "no such file"),
    ],
)
def test_bad_arguments_are_named(arguments: list[object], said: str, tmp_path: Path) -> None:
    done = covered(tmp_path, LLAMA, *arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_a_model_of_no_layers_is_named(tmp_path: Path) -> None:
    done = covered(tmp_path, {**LLAMA, "layer_types": []}, "--gpu", "h200")
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert "layer_types: got []" in done.output
