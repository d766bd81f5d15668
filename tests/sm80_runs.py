"""Runs of the tuner with the forward of kernels/sm80: its default, and rows of it from another GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cache_rows import row
from tuner_fakes import ERRORS
from tuner_runs import SPEC

from fa2tune.compiling.registry import variant_named
from fa2tune.rows.row import PORTED, Row
from fa2tune.tuning.request.watcher import WorkerFunctions

FORWARD = variant_named("sm80/fwd")
DEFAULT = dict(FORWARD.space.default(SPEC, 80))
SM80_FAKES = WorkerFunctions(*(f"sm80_fakes:{name}" for name in ("compile_check", "race", "check", "check_backward")))


def of_another_gpu(config: dict[str, Any], **changes: Any) -> Row:
    key = row().key.with_(gpu="a10", sm_count=72, arch=86, head_dim=128, head_dim_v=128, mask="causal", bucket=4096)
    made = replace(row(), key=key.with_(**changes.pop("key", {})), implementation="sm80", config=config, errors=ERRORS)
    return replace(made, obtained=PORTED, proof="sibling", obtained_on="NVIDIA H200", **changes)
