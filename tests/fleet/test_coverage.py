"""What a model needs, by its config.json, and what serves it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_rows import CONFIG, row
from click.testing import CliRunner, Result
from variant_fakes import DEFAULT

from fa2tune.calling import choosing
from fa2tune.cli.cache import cache
from fa2tune.fleet.modelconfig import MAX_COUNT, ModelConfigError, attentions, read
from fa2tune.rows import reader
from fa2tune.rows.row import Row
from fa2tune.rows.store import Store
from fa2tune.spec.variant import WARP_SPECIALIZED

pytest.importorskip("transformers", minversion="5.17", reason="needs the extra: pip install 'fa2tune[models]'")

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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_dim": 320}, "head dim 320: fa2tune has 16 to 256 in steps of 8"),
        ({"head_dim": 100}, "head dim 100"),
        ({"attn_logit_softcapping": 50.0}, "soft-capped, which its family is not known to be (attn_logit_softcapping)"),
        ({"model_type": "gpt_oss"}, "sinks"),
    ],
)
def test_what_no_kernel_computes_is_said(change: dict[str, Any], said: str) -> None:
    for found in attentions({**LLAMA, **change}):
        assert said in found.not_covered
        assert found.longest == 0


def test_window_layers_of_qwen2() -> None:
    found = attentions({**QWEN25, "use_sliding_window": True, "max_window_layers": 20, "sliding_window": 4096})
    assert {one.kind: (one.layers, one.longest) for one in found} == {
        "full_attention": (20, 131072),
        "sliding_attention": (8, 131072),
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": "32"}, "num_attention_heads"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_attention_heads": -1}, "num_attention_heads: got -1, must be an integer of at least 1"),
        ({"num_attention_heads": MAX_COUNT * 2}, r"number of attention heads .33554432."),
        ({"num_key_value_heads": 5}, "num_key_value_heads: got 5, must divide"),
        ({"hidden_size": 4097}, "hidden size .4097. is not a multiple"),
        ({"torch_dtype": "float8"}, "torch_dtype: got 'float8', allowed are bfloat16"),
        ({"layer_types": "full"}, "layer_types"),
        ({"layer_types": []}, r"number of .layer_types. .0."),
        ({"layer_types": ["\x1b[2J"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 3}, r"number of .layer_types. .3."),
        ({"model_type": "starcoder2", "sliding_window": "x"}, "'sliding_window' with value 'x'"),
        ({"max_position_embeddings": 1e9}, "max_position_embeddings"),
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
    with pytest.raises(ModelConfigError, match="no such file"):
        read(tmp_path / "none")


# --- the command


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(reader, "shipped_paths", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield reader.user_path()
    choosing.forget()  # what was read without the shipped files


def covered(folder: Path, config: dict[str, Any], *arguments: object) -> Result:
    (folder / "config.json").write_text(json.dumps(config))
    return CliRunner().invoke(cache, ["coverage", "--model", str(folder), *map(str, arguments)])


def following(done: Result) -> list[str]:
    """The commands that it ends with."""
    _, found, after = done.output.partition("\nnext:\n")
    assert found, done.output
    return [line.strip() for line in after.splitlines()]


def served(**key: object) -> Row:
    return row(dict(key), config=CONFIG, triton="", driver="", kernel_hash="")


def fresh(**key: object) -> Row:
    from fa2tune.calling import choosing

    here = choosing.toolchain()
    made = served(**key)
    return row(dict(key), config=CONFIG, triton=here.triton, driver=here.driver,
               kernel_hash=here.kernel_hashes[f"{made.key.kernel} {made.key.mask}"])  # fmt: skip


def test_every_key_its_row_and_the_commands_that_close_the_gaps(user: Path, tmp_path: Path) -> None:
    Store(user).put([fresh(bucket=4096), served(bucket=8192)])
    done = covered(tmp_path, LLAMA, "--gpu", "h200", "--pass", "fwd", "--seqlen", "2000,4096", "--seqlen", 8000)
    assert done.exit_code == 0, done.output
    assert "exit status" not in done.output
    assert done.output.splitlines()[0].endswith("3 keys on h200: 1 own row, 1 stale row, 1 other row")
    lines = [line.split() for line in done.output.splitlines() if line.startswith("fwd ")]
    assert {line[4]: line[5] for line in lines} == {"2048": "other", "4096": "own", "8192": "stale"}
    assert following(done) == [
        "on a machine with h200: fa2tune tune --headdim 128 --dtype bf16 --causal --pass fwd --seqlen 2048",
        "on a machine with h200: fa2tune cache verify --stale --repair",
    ]


def test_an_absent_gpu_is_predicted_only_where_no_row_and_no_warp_specialised_default_serves(
    user: Path, tmp_path: Path
) -> None:
    """A prediction for the key itself would stand before a row that was measured for another length."""
    asked = ("--gpu", "h200", "--seqlen", 512, "--seqlen", 1024)
    Store(user).put([fresh(bucket=4096)])
    assert following(covered(tmp_path, LLAMA, *asked)) == [
        "on a machine with h200: fa2tune tune --headdim 128 --dtype bf16 --causal --pass both --seqlen 512,1024",
    ]
    Store(user).put([fresh(head_dim=32, head_dim_v=32)])  # its default is portable
    assert following(covered(tmp_path, {**LLAMA, "head_dim": 32}, *asked)) == [
        "on a machine with h200: fa2tune tune --headdim 32 --dtype bf16 --causal --pass fwd --seqlen 512,1024",
        "fa2tune tune --gpu h200 --headdim 32 --dtype bf16 --causal --pass bwd --seqlen 512,1024",
    ]
    assert following(covered(tmp_path, LLAMA, "--gpu", "a100", "--seqlen", 512)) == [  # its defaults are by mma.sync
        "on a machine with a100-sxm-80gb: fa2tune tune --headdim 128 --dtype bf16 --causal --pass both --seqlen 512",
    ]


def test_a_gpu_that_is_here_is_tuned_here(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa2tune.cli.cache.coverage.is_here", lambda gpu: True)
    Store(user).put([fresh(bucket=4096), served(bucket=8192)])
    asked = ("--gpu", "h200", "--pass", "fwd", "--seqlen", 512, "--seqlen", 8192)
    assert following(covered(tmp_path, LLAMA, *asked)) == [
        "fa2tune tune --gpu h200 --headdim 128 --dtype bf16 --causal --pass fwd --seqlen 512",
        "fa2tune cache verify --stale --repair",
    ]


def test_a_stale_row_is_renewed_in_the_file_that_holds_it(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped.sqlite"
    Store(shipped).put([served(bucket=8192, gpu="a100-sxm-80gb", sm_count=108, arch=80)])
    monkeypatch.setattr(reader, "shipped_paths", lambda: [shipped])
    done = covered(tmp_path, LLAMA, "--gpu", "a100-sxm-80gb", "--pass", "fwd", "--seqlen", 8192)
    (command,) = following(done)
    assert command.endswith(f"fa2tune cache merge {shipped} && fa2tune cache verify --stale --repair")


def test_lengths_that_are_served_alike_are_one_line(user: Path, tmp_path: Path) -> None:
    Store(user).put([fresh(bucket=1024)])
    done = covered(tmp_path, LLAMA, "--gpu", "h200", "--pass", "fwd")
    lines = {line.split()[4]: line for line in done.output.splitlines() if line.startswith("fwd ")}
    assert "512" in lines and "1024" in lines and "2048-8192" in lines, done.output
    assert "own row" in lines["1024"] and lines["2048-8192"].rstrip().endswith("bucket 1024")
    assert "5 keys on h200: " in done.output, "counted one by one"


def test_nothing_to_close_is_exit_code_0(user: Path, tmp_path: Path) -> None:
    Store(user).put([fresh(bucket=4096)])
    done = covered(tmp_path, LLAMA, "--gpu", "h200", "--pass", "fwd", "--seqlen", 4096)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == "covered: 32 of 32 attention layers; 1 key on h200: 1 own row"


def test_exit_code_1_has_its_reason_on_a_line(user: Path, tmp_path: Path) -> None:
    Store(user).put([fresh(bucket=4096)])
    done = covered(tmp_path, LLAMA, "--gpu", "h200", "--seqlen", 4096)
    assert done.exit_code == 1
    first, second, *_ = done.output.splitlines()
    assert first == "covered: 32 of 32 attention layers; 4 keys on h200: 1 own row, 3 default configs"
    assert second == "exit status 1: no row serves 3 of 4 keys, so the default config does"
    found = json.loads(covered(tmp_path, LLAMA, "--gpu", "h200", "--seqlen", 4096, "--json").output)
    assert (found["exit_code"], found["shortfalls"]) == (1, ["no row serves 3 of 4 keys, so the default config does"])
    done = covered(tmp_path, {**LLAMA, "attn_logit_softcapping": 50.0}, "--gpu", "h200")
    assert done.exit_code == 1
    assert "exit status 1: the attention is not computed" in done.output.splitlines()


def test_rows_of_other_keys_serve_and_so_give_exit_code_0(user: Path, tmp_path: Path) -> None:
    Store(user).put([fresh(bucket=4096)])
    done = covered(tmp_path, LLAMA, "--gpu", "h200", "--pass", "fwd", "--seqlen", "512,1024", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["exit_code"], found["shortfalls"], found["seqlen"]) == (0, [], [512, 1024])
    assert [key["served_by"] for key in found["keys"]] == ["other row"] * 2
    assert found["commands"], "for rows of their own"


def test_windowed_layers_name_their_window(user: Path, tmp_path: Path) -> None:
    mixed = {**QWEN25, "use_sliding_window": True, "max_window_layers": 20, "sliding_window": 4096}
    Store(user).put([fresh(bucket=8192)])
    done = covered(tmp_path, mixed, "--gpu", "h200", "--pass", "fwd", "--seqlen", 8192)
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in done.output.splitlines()]
    assert [line[6] for line in cells if "self-attention" in " ".join(line)] == ["causal", "causal, window 4096"]
    assert [line[3] for line in cells if line and line[0] == "fwd"] == ["causal", "causal, window"]
    done = covered(tmp_path, mixed, "--gpu", "h200", "--pass", "fwd", "--seqlen", 8192, "--full")
    assert "full, window 4096 each side" in done.output


GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "num_hidden_layers": 2, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_soft_capped_layers_are_computed_and_have_no_rows_of_their_own(user: Path, tmp_path: Path) -> None:
    Store(user).put([fresh(head_dim=256, head_dim_v=256, bucket=2048)])
    asked = ("--gpu", "h200", "--pass", "fwd", "--seqlen", 2048)
    done = covered(tmp_path, GEMMA2, *asked)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("covered: 2 of 2 attention layers; 1 key on h200: 1 other row\n")
    assert "causal, soft cap 50" in done.output and "tuned without one" in done.output
    found = json.loads(covered(tmp_path, GEMMA2, *asked, "--json").output)
    assert [(key["served_by"], key["softcap"]) for key in found["keys"]] == [("other row", True)]
    assert [one["softcap"] for one in found["attention"]] == [50.0, 50.0]
    assert not found["commands"], "no tune measures soft caps"
    plain = json.loads(covered(tmp_path, {**GEMMA2, "attn_logit_softcapping": None}, *asked, "--json").output)
    assert [(key["served_by"], key["softcap"]) for key in plain["keys"]] == [("own row", False)]


@pytest.mark.parametrize("cap", [50.0, None])
def test_warp_specialised_rows_serve_a_soft_cap(user: Path, tmp_path: Path, cap: object) -> None:
    key = fresh(head_dim=256, head_dim_v=256, bucket=2048).key
    shipped = reader.read(Path(__file__).parents[2] / "cache" / "h200.sqlite")
    Store(user).put([each for each in shipped if each.key == key and each.implementation == WARP_SPECIALIZED])
    done = covered(
        tmp_path, {**GEMMA2, "attn_logit_softcapping": cap}, "--gpu", "h200", "--pass", "fwd", "--seqlen", 2048
    )
    assert "default config" not in done.output.splitlines()[0], done.output


@pytest.mark.parametrize("cap", [-1.0, 1e-9, "50", True, [50.0]])
def test_a_soft_cap_that_is_none_is_refused_by_name(tmp_path: Path, cap: object) -> None:
    done = covered(tmp_path, {**GEMMA2, "attn_logit_softcapping": cap}, "--gpu", "h200")
    assert done.exit_code in (1, 2) and "attn_logit_softcapping" in done.output


def test_layers_in_chunks_name_their_chunks(user: Path, tmp_path: Path) -> None:
    scout = json.loads((Path(__file__).parents[1] / "fixtures" / "models" / "llama-4-scout.json").read_text())
    Store(user).put([fresh(bucket=16384)])
    asked = ("--gpu", "h200", "--pass", "fwd", "--seqlen", "16384")
    done = covered(tmp_path, scout, *asked)
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in done.output.splitlines()]
    assert [line[6] for line in cells if line[:1] == ["chunked text"]] == ["causal, chunks of 8192"]
    assert sorted(line[3] for line in cells if line and line[0] == "fwd") == ["causal", "causal, chunks"]
    assert "is served by rows that were tuned without chunks" in done.output
    keys = json.loads(covered(tmp_path, scout, *asked, "--json").output)["keys"]
    assert sorted((key["chunks"], key["served_by"]) for key in keys) == [(False, "own row"), (True, "other row")]
    whole = covered(tmp_path, scout, *asked, "--full").output
    assert "attention in chunks is computed with the causal mask only" in whole and "chunks of" not in whole
    for length, chunks in ((8192, False), (16384, True)):  # one chunk is the causal mask
        short = covered(tmp_path, scout, "--gpu", "h200", "--pass", "fwd", "--seqlen", length, "--json").output
        assert any(key["chunks"] for key in json.loads(short)["keys"]) == chunks


def test_windowed_layers_without_any_row_have_a_command(tmp_path: Path) -> None:
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 1024}
    done = covered(tmp_path, mistral, "--gpu", "h200", "--pass", "fwd", "--seqlen", 4096)
    assert following(done) == [
        "on a machine with h200: fa2tune tune --headdim 128 --dtype bf16 --causal --pass fwd --seqlen 4096"
    ]


@pytest.mark.usefixtures("specialized_fakes")
def test_a_warp_specialised_backward_is_served_from_a_named_file(tmp_path: Path) -> None:
    implementations = dict.fromkeys(("bwd_dq", "bwd_dkdv"), WARP_SPECIALIZED)
    rows = [row({"kernel": name}, implementation=WARP_SPECIALIZED, config=dict(DEFAULT)) for name in implementations]
    rows.append(row({"kernel": "bwd"}, strategy="split", implementation=WARP_SPECIALIZED, config=implementations))
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
        "on a machine with h200: fa2tune tune --headdim 192 --headdim-v 128 --dtype bf16 --causal --pass both --seqlen 4096"
        in done.output
    )
    for kernel in ("fwd", "bwd", "bwd_dq", "bwd_dkdv"):
        assert any(line.startswith(f"{kernel} ") for line in done.output.splitlines()), kernel
    done = covered(tmp_path, GEMMA3, "--gpu", "h200", "--pass", "fwd")
    assert "sliding windows (window=) are served by rows that were tuned without a window" in done.output
    done = covered(tmp_path, {**LLAMA, "head_dim": 320}, "--gpu", "h200")
    assert done.exit_code == 1
    assert "head dim 320" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h900"], "`fa2tune gpus` lists them"),
        (["--gpu", "h200", "--seqlen", 0], "got 0, must be at least 1"),
        (["--gpu", "h200", "--seqlen", 9000], "at most 8192"),
        (["--gpu", "h200", "--seqlen", "512;1024"], "got '512;1024', expected numbers with commas between"),
        (["--gpu", "h200", "--cache", "/nowhere.sqlite"], "no such file"),
    ],
)
def test_bad_arguments_are_named(arguments: list[object], said: str, tmp_path: Path) -> None:
    done = covered(tmp_path, LLAMA, *arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_no_layer_types_are_named(tmp_path: Path) -> None:
    done = covered(tmp_path, {**LLAMA, "layer_types": []}, "--gpu", "h200")
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert "layer_types" in done.output
