"""How the rows of a run are obtained: on which GPU, with which versions."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fa2tune.compiling import fingerprint
from fa2tune.rows.row import MEASURED, PORTED, PREDICTED, SIBLING

PROOF = {MEASURED: "target", SIBLING: "sibling", PORTED: "sibling", PREDICTED: "interpreter"}


@dataclass(frozen=True)
class Provenance:
    """What every row of a run has in common."""

    obtained: str
    obtained_on: str = ""
    driver: str = ""

    def stamp(self) -> dict[str, Any]:
        return {
            "obtained": self.obtained, "proof": PROOF[self.obtained], "obtained_on": self.obtained_on, "driver": self.driver,
            "triton": fingerprint.triton_version(), "torch": importlib.metadata.version("torch"),
            "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }  # fmt: skip
