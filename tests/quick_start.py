"""Python processes that need not import torch, Triton, Optuna and SQLAlchemy again, two to three seconds of a core each.

``Popen`` takes the place of ``subprocess.Popen``. For this interpreter's ``-c``, ``-m`` or a script, it asks a process that has
imported those packages, and nothing of fa2tune, to fork. Everything else it starts as ever. What is forked has the arguments,
environment, folder, open files, process group, ``sys.path`` and fresh ``__main__`` that it would have had, and is a child of
the calling process: its pid, exit status, signals and the death of its parent are real. It differs in what a start alone
decides, the hash seed, ``sys.flags``, and what third-party packages read from the environment at import, and in its end:
threads are waited for and exit functions run, but modules are not taken down.

Tests whose point is the start of a process, or what it imports, use subprocess as it is. The others ask for ``quick_starts``
(conftest.py). Linux only.

How a process forks a child for another: the caller is for a moment a subreaper (prctl), the server forks twice, and the
process in between ends. The orphan falls to the nearest subreaper among the server's ancestors. So each process that may call
needs a server below itself: one that runs a module or a script is forked together with a server of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

PACKAGES = (
    "torch", "optuna", "sqlalchemy", "sqlalchemy.orm", "sqlalchemy.dialects.sqlite", "numpy", "scipy.optimize", "scipy.linalg",
    "scipy.special", "click", "rich.console", "rich.table", "rich.progress",
)  # fmt: skip
TRITON = "triton", "triton.compiler", "triton.experimental.gluon", "triton.experimental.gluon.language"
INTERPRET = "TRITON_INTERPRET"  #: read when Triton is imported
_SUBREAPER = 36  # linux/prctl.h
_LARGE = 1 << 20  #: bytes of a request
PIPES = ("p2c", ("read", "write")), ("c2p", ("read", "write")), ("err", ("read", "write"))  #: subprocess's names
_HIGH = 400  #: file descriptors from here on are free in a child

_ORDINARY = subprocess.Popen
_forked = False  #: whether this process is a server's child
_turn = threading.Lock()  #: one request at a time
_server: list[socket.socket] = []  #: the connection to this process's, once there is one


def _subreaper(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


# --- the caller's side


def _connected() -> socket.socket | None:
    """To this process's server; None if it can have none."""
    if not _server and not _forked:  # what is forked has the one that it came with, or none
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            _ORDINARY(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip
        _server.append(ours)
    return _server[0] if _server else None


def _asked_of(arguments: Any) -> bool:
    """Whether a command is this interpreter's with code, a module or a script, and no options."""
    if not isinstance(arguments, list | tuple) or len(arguments) < 2 or str(arguments[0]) != sys.executable:
        return False
    return str(arguments[1]) in ("-c", "-m") or str(arguments[1]).endswith(".py")


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    def _execute_child(self, *values: Any) -> None:
        names = list(inspect.signature(_ORDINARY._execute_child).parameters)[1:]  # type: ignore[attr-defined]
        asked = dict(zip(names, values, strict=True))
        env: Mapping[str, str] = os.environ if asked["env"] is None else asked["env"]
        plain = asked["preexec_fn"] is None and not asked["shell"] and not asked["start_new_session"]
        server = _connected() if plain and _asked_of(asked["args"]) else None
        if server is None:
            super()._execute_child(*values)  # type: ignore[misc]
            return
        group = asked["process_group"]
        standard = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        descriptors = {target: source if source != -1 else target for target, source in enumerate(standard)}
        descriptors |= {number: number for number in asked["pass_fds"]}
        request = {
            "arguments": [os.fsdecode(part) for part in asked["args"][1:]], "environment": dict(env),
            "folder": os.fspath(asked["cwd"]) if asked["cwd"] else os.getcwd(), "targets": list(descriptors),
            "group": os.getpgrp() if group == -1 else group,
        }  # fmt: skip
        with _turn:
            _subreaper(True)
            try:
                socket.send_fds(server, [json.dumps(request).encode()], list(descriptors.values()))
                answer = server.recv(_LARGE)
            finally:
                _subreaper(False)
        if not answer:
            raise RuntimeError("the server of tests/quick_start.py has ended")
        self.pid = int(answer)
        self._child_created = True
        self._close_pipe_fds(*(asked[f"{pipe}{end}"] for pipe, ends in PIPES for end in ends))  # type: ignore[attr-defined]


# --- the server, and what it forks


def _search_path(request: Mapping[str, Any], base: list[str]) -> list[str]:
    first = request["arguments"][0]
    own = {"-c": "", "-m": request["folder"]}.get(first, os.path.dirname(os.path.realpath(first)))
    named = request["environment"].get("PYTHONPATH", "")
    return [own, *(os.path.abspath(part) for part in named.split(os.pathsep) if named), *base]


def _become(request: Mapping[str, Any], received: list[int], base: list[str]) -> Callable[[], None]:
    """Make this process the one asked for; -> what it is to run."""
    global _forked
    _forked = True
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in received]
    for fd in received:
        os.close(fd)
    for source, target in zip(high, request["targets"], strict=True):
        os.dup2(source, target, inheritable=True)
        os.close(source)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = _search_path(request, base)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115  # type: ignore[misc]
        2, "w", closefd=False, buffering=1, errors="backslashreplace"
    )
    kind, *rest = request["arguments"]
    main = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main
        return lambda: exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    if kind == "-m":
        sys.argv = rest
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True) and None
    sys.argv = [kind, *rest]
    return lambda: runpy.run_path(kind, run_name="__main__") and None


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)
    gc.freeze()  # children's collections need not look at all that, and copy its pages


def _serve(connection: socket.socket, base: list[str], loaded: bool = False) -> Callable[[], None] | None:
    """Fork what is asked for until the caller has ended. Returns None then, and in a child what it is to run.

    ``loaded``: Triton is imported, compiling or interpreting. A server that has not leaves code (``-c``) to one below it that
    has, and forks what may ask for more itself."""
    below: dict[str, socket.socket] = {}  #: by INTERPRET
    while True:
        try:
            data, received, _, _ = socket.recv_fds(connection, _LARGE, 64)
        except OSError:
            return None
        if not data:
            return None
        request = json.loads(data)
        alone = request["arguments"][0] == "-c"
        if alone and not loaded:
            interpret = request["environment"].get(INTERPRET, "")
            if interpret not in below:
                below[interpret], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for other in (connection, *below.values()):
                        other.close()
                    for fd in received:
                        os.close(fd)
                    os.environ[INTERPRET] = interpret
                    if not interpret:
                        del os.environ[INTERPRET]
                    _import(TRITON)
                    return _serve(theirs, base, loaded=True)
                theirs.close()
            socket.send_fds(below[interpret], [data], received)
            for fd in received:
                os.close(fd)
            connection.send(below[interpret].recv(_LARGE))
            continue
        pids, told = os.pipe()
        orphaned, go = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(told, str(child).encode())
                os._exit(0)
            for other in (connection, *below.values()):
                other.close()
            for fd in (pids, told, go):
                os.close(fd)
            os.read(orphaned, 1)  # the process in between has ended: the caller is the parent
            os.close(orphaned)
            with suppress(OSError):
                os.setpgid(0, request["group"])
            if not alone:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:  # the child's own server
                    ours.close()
                    for fd in received:
                        os.close(fd)
                    os.setpgid(0, 0)
                    return _serve(theirs, base)
                theirs.close()
                _server.append(ours)
                subprocess.Popen = Popen  # type: ignore[misc]
            return _become(request, received, base)
        os.waitpid(between, 0)
        child = int(os.read(pids, 32))
        for fd in (*received, pids, told, orphaned):
            os.close(fd)
        os.write(go, b"x")
        os.close(go)
        connection.send(str(child).encode())


def _status(run: Callable[[], None]) -> int:
    """Run it and end as Python does, but for taking down all modules, the better part of a second: its exit status."""
    status = 0
    try:
        run()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if status and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        # without the frames of this file and of runpy
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status & 0xFF


def _main() -> None:
    base = sys.path[1:]
    for part in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if part and os.path.abspath(part) in base:
            base.remove(os.path.abspath(part))
    sys.modules["quick_start"] = sys.modules["__main__"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import(PACKAGES)
    run = _serve(socket.socket(fileno=int(sys.argv[1])), base)
    os._exit(0 if run is None else _status(run))


if __name__ == "__main__":
    _main()
