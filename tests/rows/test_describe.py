"""Configs as people read them."""

import pytest

from fa2tune.rows.describe import describe

pytestmark = pytest.mark.usefixtures("portable_kernels", "quick_starts")


def test_describe():
    config = {
        "BLOCK_M": 128,
        "BLOCK_N": 64,
        "LOADS": "pointer",
        "MASKED": "first",
        "num_warps": 8,
        "num_stages": 2,
        "maxnreg": 0,
    }
    assert describe(config) == "128x64 pointer first w8 s2"
    assert describe({}) == ""
