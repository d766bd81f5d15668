"""The failure record: what crashed, hung or did not compile, and why. It is kept across runs and studies, so that with one
Triton, driver and GPU no candidate fails twice. A compile that took too long is the exception: the wall clock decides, on a
host that may have been busy, so it counts once a later run has seen it again.

A table in the storage (storage.py), shared by all workers; short transactions, so that processes may write at the same
time. Cache files never contain any of it. An entry is keyed by what the failure depends on: Triton, architecture, kernel and
its hash, specialization; where it happened on the GPU also GPU and driver. A config that cannot be compiled stands for all
that share its binary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from fa2tune.compiling import compiler, fingerprint
from fa2tune.sharing.storage import Storage
from fa2tune.spec.problem import Config, Specialization
from fa2tune.spec.variant import Variant

COMPILE, LAUNCH = "compile", "launch"  #: where it happened

#: What is the candidate's own doing, and would happen again.
FAULTS = frozenset(
    ("compile_error", "miscompiled", "launch_error", "crash", "illegal_access", "device_assert", "timeout",
     "out_of_memory")
)  # fmt: skip
#: What is not, or is not known to be: an exception on the host, a process killed from outside. Tried again by the next run.
BLAMELESS = frozenset(("failed", "killed"))

ONCE = "timeout_once"  #: filed for a compile that took too long in one run so far: tried again by the next

FAILURES = sa.Table(
    "failures",
    sa.MetaData(),
    *(
        sa.Column(name, sa.TEXT, primary_key=True)
        for name in ("triton", "arch", "kernel", "kernel_hash", "specialization", "stage", "gpu", "driver", "config")
    ),
    sa.Column("fate", sa.TEXT, key="status", nullable=False),
    *(sa.Column(name, sa.TEXT, nullable=False) for name in ("why", "created")),
    sqlite_with_rowid=False,
)


@dataclass(frozen=True)
class FailureScope:
    """What failures depend on, beside kernel and config."""

    triton: str  #: version
    gpu: str = ""  #: name of the GPU that launches; "" where nothing is launched
    driver: str = ""  #: its version


@dataclass(frozen=True)
class Failure:
    stage: str  #: COMPILE or LAUNCH
    status: str  #: one of FAULTS
    why: str  #: the reason in full
    created: str  #: when, UTC


def _text(config: Config) -> str:
    return json.dumps(dict(config), sort_keys=True)


class FailureRecord:
    """The failures in a storage."""

    def __init__(self, storage: Storage, scope: FailureScope) -> None:
        self.storage = storage
        self.scope = scope
        self.insert = postgresql.insert if storage.shared else sqlite.insert
        storage.create(FAILURES)

    def of_kernel(self, variant: Variant, spec: Specialization, arch: int) -> KernelFailures:
        """The failures of one kernel and specialization on one architecture, in this record's scope."""
        return KernelFailures(self, variant, spec, arch)


class KernelFailures:
    """See ``FailureRecord.of_kernel``. Read once; what this object adds it also knows."""

    def __init__(self, failure_record: FailureRecord, variant: Variant, spec: Specialization, arch: int) -> None:
        self._record = failure_record
        self._variant = variant
        self._about = {
            "triton": failure_record.scope.triton,
            "arch": str(arch),
            "kernel": variant.short_name,
            "kernel_hash": fingerprint.kernel_hash(variant, spec.mask),
            "specialization": json.dumps(asdict(spec), sort_keys=True),
        }
        self._found: dict[tuple[str, str], Failure] = {}
        self._slow: set[str] = set()  #: configs filed as ONCE by earlier runs
        for stage in (COMPILE, LAUNCH):
            query = sa.select(FAILURES).where(*self._conditions(stage))
            for row in failure_record.storage.select(query):
                if row.status == ONCE:
                    self._slow.add(row.config)
                else:
                    self._found[stage, row.config] = Failure(row.stage, row.status, row.why, row.created)

    def _key(self, stage: str) -> dict[str, str]:
        launched = stage == LAUNCH
        scope = self._record.scope
        place = {"gpu": scope.gpu if launched else "", "driver": scope.driver if launched else ""}
        return {**self._about, "stage": stage, **place}

    def _conditions(self, stage: str) -> list[sa.ColumnElement[bool]]:
        return [FAILURES.c[name] == value for name, value in self._key(stage).items()]

    def _config(self, stage: str, config: Config) -> str:
        """As it is filed: a compile depends on what the binary depends on."""
        return _text(config if stage == LAUNCH else compiler.binary_config(self._variant, config))

    def of(self, config: Config) -> Failure | None:
        """How this config failed before, or None."""
        if not self._found:
            return None
        return next((f for s in (COMPILE, LAUNCH) if (f := self._found.get((s, self._config(s, config))))), None)

    def add(self, stage: str, config: Config, status: str, why: str) -> None:
        """File a failure; one that is not the candidate's own doing is left out."""
        if status not in FAULTS:
            return
        text = self._config(stage, config)
        failure = Failure(stage, status, why, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        self._found[stage, text] = failure
        filed = ONCE if (stage, status) == (COMPILE, "timeout") and text not in self._slow else status
        what = {"status": filed, "why": why, "created": failure.created}
        statement = self._record.insert(FAILURES).values(**self._key(stage), config=text, **what)
        index = list(FAILURES.primary_key.columns)
        self._record.storage.execute(statement.on_conflict_do_update(index_elements=index, set_=what))

    def forgotten(self, config: Config, status: str) -> bool:
        """Whether a study that remembers this end should try again: it failed in another scope, or was asked to be
        tried again, or is not known to be the cause."""
        return status in BLAMELESS or (status in FAULTS and self.of(config) is None)

    def forget(self) -> int:
        """Strike out everything in this part, so that it is tried again. How many entries there were."""
        count = len(self._found) + len(self._slow)
        self._found.clear()
        self._slow.clear()
        for stage in (COMPILE, LAUNCH):
            statement = sa.delete(FAILURES).where(*self._conditions(stage))
            self._record.storage.execute(statement)
        return count

    def failing(self, configs: Iterable[Config]) -> list[tuple[Config, Failure]]:
        """Those of ``configs`` that failed before, with how."""
        return [(config, failure) for config in configs if (failure := self.of(config)) is not None]
