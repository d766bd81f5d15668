"""fa2tune in place of kernels-community/flash-attn2: the folder for LOCAL_KERNELS, loaded as the package ``kernels`` does."""

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
