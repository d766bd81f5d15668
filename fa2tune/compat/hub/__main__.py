"""``export LOCAL_KERNELS=$(python -m fa2tune.compat.hub)``."""

import os

from fa2tune.compat import hub

print(hub.setting(os.environ.get(hub.SETTING, "")))
