"""What tests/quick_start.py forks behaves as a Python that was started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.usefixtures("quick_starts"),
    pytest.mark.skipif(sys.platform != "linux", reason="prctl"),
]

_ORDINARY = subprocess.Popen
SAYS = """
import json, os, sys
fresh = not [name for name in sys.modules if name.partition(".")[0] == "fa2tune"]
print(json.dumps([os.getppid(), os.getcwd(), sys.argv, __name__, sys.path[:2], os.environ.get("A"), sys.stdin.read(), fresh]))
"""
ASKS = (
    f"import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', {SAYS!r}], input='y', text=True).returncode)"
)


@pytest.mark.parametrize("started", [_ORDINARY, None], ids=["started", "forked"])
def test_it_has_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: type | None) -> None:
    """Under the ordinary Popen, too: what is expected is what Python does."""
    if started:
        monkeypatch.setattr(subprocess, "Popen", started)
    environment = {**os.environ, "A": "b", "PYTHONPATH": str(tmp_path)}
    about = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", SAYS, "x"], input="in", **about)  # type: ignore[call-overload]
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout) == [
        os.getpid(), str(tmp_path), ["-c", "x"], "__main__", ["", str(tmp_path)], "b", "in", True
    ]  # fmt: skip
    (tmp_path / "asks.py").write_text(ASKS)
    done = subprocess.run([sys.executable, str(tmp_path / "asks.py")], **about)  # type: ignore[call-overload]
    said, status = done.stdout.splitlines()
    assert json.loads(said)[0] != os.getpid() and json.loads(said)[6] == "y" and status == "0"
    for code, returned in (("sys.exit(3)", 3), ("sys.exit('no')", 1), ("1 / 0", 1), ("os.kill(os.getpid(), 9)", -9)):
        done = subprocess.run([sys.executable, "-c", f"import os, sys; {code}"], **about)  # type: ignore[call-overload]
        assert done.returncode == returned
        assert ("ZeroDivisionError" in done.stderr) == ("/" in code) and (done.stderr == "no\n") == ("no" in code)
    code = "import atexit, time; atexit.register(print, 'over'); print('here', flush=True); time.sleep(60)"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; what is started inherits it
        code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {code}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    assert os.getpgid(process.pid) == process.pid
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0] == "over\n" and process.returncode == -signal.SIGINT
