"""fa2tune as the kernel that Transformers loads for ``attn_implementation="flash_attention_2"`` without flash-attn.

The package ``kernels`` loads ``kernels-community/flash-attn2`` then. Its setting LOCAL_KERNELS names a folder to take in place
of a download: ``FOLDER``. Nothing is downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = "kernels-community/flash-attn2"
#: As ``kernels`` wants it: build/<variant>/ with metadata.json and __init__.py.
FOLDER = Path(__file__).parent
SETTING = "LOCAL_KERNELS"


def setting(before: str = "") -> str:
    """The value of LOCAL_KERNELS that adds the redirection to ``before``."""
    others = [entry for entry in before.split(":") if entry and entry.partition("=")[0] != REPOSITORY]
    return ":".join([*others, f"{REPOSITORY}={FOLDER}"])


def redirect() -> None:
    """Redirect models that this process loads from now on; what LOCAL_KERNELS says of other kernels stays.

    The package ``kernels`` must be of a version that the installed Transformers takes: its own error says which."""
    os.environ[SETTING] = setting(os.environ.get(SETTING, ""))
