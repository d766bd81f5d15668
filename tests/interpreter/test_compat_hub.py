"""fa2tune in place of kernels-community/flash-attn2: the folder for LOCAL_KERNELS, loaded as the package ``kernels`` does,
and by it where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa2tune.compat import flash_attn, hub

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("no_rows")


def test_the_folder_is_a_kernel_for_any_torch():
    (variant,) = (hub.FOLDER / "build").iterdir()
    assert variant.name == "torch-universal"  # no version of torch, no backend: nothing is compiled
    about = json.loads((variant / "metadata.json").read_text())
    assert about["name"] == hub.REPOSITORY.partition("/")[2] and about["python-depends"] == []
    spec = importlib.util.spec_from_file_location(about["id"], variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    calls = {name for name in dir(flash_attn) if name.startswith("flash_attn")}
    assert set(module.__all__) == calls - {"flash_attn_with_kvcache"}, "Transformers would take it for one that serves"
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    torch.testing.assert_close(module.flash_attn_func(q, k, v, causal=True), want.transpose(1, 2))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert", "modernbert"])
def test_transformers_runs_it_for_flash_attention_2(name, monkeypatch):
    """Redirected, loss, gradients and generated tokens are within the float64 rule; padded and packed, too."""
    pytest.importorskip("kernels")
    pytest.importorskip("transformers")
    from transformers import modeling_flash_attention_utils as loaded
    from transformers.utils import is_flash_attn_2_available, is_kernels_available

    if is_flash_attn_2_available() or not is_kernels_available():
        pytest.skip("Transformers takes flash-attn, or another version of kernels")
    import tiny_models

    monkeypatch.delenv(hub.SETTING, raising=False)
    monkeypatch.setenv(hub.SETTING, hub.setting())  # what redirect() does, undone afterwards
    size, asked = tiny_models.Size(24, padding=5, documents=(5, 11, 8), window=5), "flash_attention_2"
    assert tiny_models.faults_trained(name, size, torch.float16, implementation=asked) == {}
    assert loaded._flash_varlen_fn is flash_attn.flash_attn_varlen_func
    if name in tiny_models.DECODERS:
        assert tiny_models.faults_generated(name, size, 3, torch.float16, implementation=asked) == []


def test_the_setting_keeps_other_kernels(monkeypatch):
    entry = f"kernels-community/flash-attn2={hub.FOLDER}"
    assert hub.setting() == entry
    assert hub.setting("a/b=/x:kernels-community/flash-attn2=/old") == f"a/b=/x:{entry}"
    monkeypatch.setenv("LOCAL_KERNELS", "a/b=/x")
    hub.redirect()
    hub.redirect()
    assert os.environ["LOCAL_KERNELS"] == f"a/b=/x:{entry}"


def test_the_module_prints_the_setting_without_torch():
    code = "import runpy, sys; runpy.run_module('fa2tune.compat.hub', run_name='__main__'); assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_KERNELS": "a/b=/x"}
    said = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True, env=environment)
    assert said.stdout == f"a/b=/x:kernels-community/flash-attn2={hub.FOLDER}\n"
