"""Files that appear whole: filled under another name in the same folder, synced, and renamed into it.

A reader sees the old file or the new one, also when the writer is killed. What a killed writer leaves is removed by a later
one. Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: Seconds without a change after which an unfinished file is taken for a killed writer's. Writers may run on other hosts, so
#: the process number in its name says nothing.
ABANDONED_S = 600.0
#: "fa2tune" is in the name, so that no other program's file is taken for one.
_UNFINISHED = re.compile(r"\..+\.fa2tune-\d+-\d+(\.\w+)?\.tmp")


def publish(path: Path, fill: Callable[[Path], None], *, suffix: str = ".tmp", mode: int | None = None) -> None:
    """``fill`` a temporary file in the folder of ``path``, then rename it to ``path``. ``mode``: of the file; None: that of
    the file that is replaced. OSError names ``path``, and leaves what was there."""
    path = Path(os.path.realpath(path))  # a link stays, what it points to is replaced
    if path.exists() and not os.access(path, os.W_OK):  # renaming over it would not ask
        raise PermissionError(f"{path} is write-protected")
    temporary = path.with_name(f".{path.name}.fa2tune-{os.getpid()}-{threading.get_ident()}{suffix}")
    try:
        temporary.unlink(missing_ok=True)
        fill(temporary)
        _remove_abandoned(temporary)
        if mode is not None:
            temporary.chmod(mode)
        elif path.exists():
            shutil.copymode(path, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        why = f"cannot be written: {error.strerror}"
        raise OSError(error.errno, why, str(path)) from error  # not the temporary file, which the user does not know
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    if os.name == "posix":
        with suppress(OSError):  # the file is in place; some network disks sync no folders
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _remove_abandoned(mine: Path) -> None:
    """Those in the folder of ``mine``, which was just written: its time is by the clock of the disk."""
    with suppress(OSError):
        now = mine.stat().st_mtime
        with os.scandir(mine.parent) as entries:
            for entry in entries:
                if _UNFINISHED.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        if now - entry.stat().st_mtime > ABANDONED_S:
                            os.unlink(entry)
