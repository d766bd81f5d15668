"""A PostgreSQL of the tests' own: a fresh cluster in a temporary folder, on a free port, with a password, run as user
``postgres`` where the tests run as root (PostgreSQL refuses to)."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PASSWORD = "s3cret-w0rd"  #: must be in no output
INSTALL = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "postgresql"]


def folder_of_programs() -> Path | None:
    """Where initdb and pg_ctl are."""
    found = shutil.which("initdb")
    if found is not None and Path(found).resolve().with_name("pg_ctl").exists():
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name.split(".")[0]))
    return folders[-1] if folders else None


class Server:
    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs, self.folder = programs, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (folder / "password").write_text(PASSWORD)
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            for path in (folder, folder / "password"):
                os.chown(path, user.pw_uid, user.pw_gid)
        self._run(
            "initdb", "--pgdata=data", "--username=fleet", "--auth=scram-sha-256", "--pwfile=password", "--no-sync"
        )

    def _run(self, program: str, *arguments: str) -> None:
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        done = subprocess.run(
            [*as_user, str(self.programs / program), *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{program}: {done.stdout[-2000:]}{done.stderr[-2000:]}"

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder} -c fsync=off"
        # its output into a file: the server would keep a pipe open
        self._run("pg_ctl", "--pgdata=data", "--wait", "--log=log", f"--options={options}", "start")

    def stop(self) -> None:
        """At once, with every connection cut off."""
        self._run("pg_ctl", "--pgdata=data", "--wait", "--mode=immediate", "stop")

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        return f"postgresql+psycopg://fleet:{password}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """A new, empty database; its URL."""
        import psycopg

        url = self.url().replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"create database {database}")
        return self.url(database)


def missing(why: str) -> None:
    """A skip; where CI runs, a failure."""
    if os.environ.get("FA2TUNE_CI"):
        pytest.fail(f"{why}: .ci/run installs it, or says why not", pytrace=False)
    pytest.skip(f"{why} ({' '.join(INSTALL)}; pip install psycopg[binary])")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    programs = folder_of_programs()
    if programs is None:
        missing("no PostgreSQL here")
    try:
        import psycopg  # noqa: F401
    except ImportError:
        missing("no psycopg here")
    assert programs is not None
    with tempfile.TemporaryDirectory(prefix="fa2tune-pg-", dir="/tmp") as name:
        folder = Path(name)
        found = Server(programs, folder)
        found.start()
        try:
            yield found
        finally:
            found.stop()
