"""How the suite runs.

Some tests run in child pytests, which work while this process runs the ordinary ones. Here each of them is an item like any
other (selectable, counted, reported); its reports come from the child.

``TRITON_INTERPRET`` is read when ``@triton.jit`` runs, so a process either compiles kernels or interprets them. Tests under
tests/interpreter therefore have a child of their own with ``TRITON_INTERPRET=1``. With that already set (say, for ``--pdb``),
they run in this process.

The files of ``COMPILING`` do little but compile, half of all that the suite has to compute, and those of ``COMPUTING`` compute
by themselves: both have a child as well, so that all cores have work. A file that the command line names runs in this process;
with ``--pdb`` all of them do. With ``FA2TUNE_TESTS_EVERY=24`` a 24th of the cases run of which machine code is read, of
each test of ``VALUES`` a twelfth, one at least, and of the tests in each file of ``LONG`` a third; and the interpreter does not
look for overflow of integers, which takes half of its time. ``FA2TUNE_GPU_SHARE=2/3`` is the second of three shares of
tests/gpu, with one case of each test at least.

Tests under tests/gpu are skipped where there is no CUDA device.
"""

from __future__ import annotations

import functools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

# Without a GPU, one thread a process: tensors are small, several processes share the cores, and threads that wait for the
# next product turn on them meanwhile.
if not Path("/dev/nvidiactl").exists():
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
os.environ["FA2TUNE_KERNELS"] = "off"  # kernels are imported and compiled, whatever binaries there are

TESTS = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PIPE = "FA2TUNE_TESTS_PIPE"  #: in a child: file descriptor of its end of the pipe
EVERY = int(os.environ.get("FA2TUNE_TESTS_EVERY", "1"))
GPU_SHARE, GPU_SHARES = (int(one) for one in os.environ.get("FA2TUNE_GPU_SHARE", "1/1").split("/"))
CHILD = PIPE in os.environ  # Reporter takes it out, so that what the tests start is no child
MOST_SECONDS = 600.0  #: of one test's set-up, call or end
#: In the order in which they run: the last has work for all cores, also for those that the other processes no longer need.
COMPILING = tuple(
    next(TESTS.rglob(f"test_{name}.py"))
    for name in (
        "operandcheck",
        "compile",
        "dispatch_phases",
        "backward_parts",
        "hopper_forward",
        "hopper_masks",
        "hopper_split",
        "hopper_grouped",
        "hopper_one_tile_forward",
        "hopper_scores",
        "backward_scores",
        "dq_parts_compiled",
        "one_tile_compiled",
        "backward_narrow",
        "early_start_compiled",
        "stored_ds_compiled",
        "longer_blocks_compiled",
        "shares_compiled",
        "hostside",
        "sm80",
        "hopper",
    )
)
READING = COMPILING[3:]  #: machine code
#: No test of these has a deadline.
COMPUTING = tuple(
    path
    for folder in ("launching", "calling", "predicting", "compiling")
    for path in sorted((TESTS / folder).glob("test_*.py"))
    if path not in COMPILING
)
#: Tests with many cases: forms, masks and lengths of kernels that Triton's interpreter computes, whole models, and what every
#: kernel compiles to. Of kernels that Python computes every case runs: nothing else tells without a GPU whether they are right.
VALUES = frozenset(
    TESTS / f"{name}.py"
    for name in (
        *(f"compiling/test_{name}" for name in ("compile", "operandcheck", "mask_hooks", "trimmed")),
        *(f"interpreter/test_{name}" for name in (
            "combinations", "compat_bands", "compat_chunks", "compat_flash_attn", "compat_transformers", "distributed_tensors",
            "few_queries", "group_parts", "bench", "masks", "packed_order",
        )),
    )
)  # fmt: skip
#: Tests of whole programs and models, up to minutes each.
LONG = frozenset(
    TESTS / f"{name}.py"
    for name in (
        *(f"interpreter/test_{name}" for name in (
            "bench", "compat_chunks", "compat_transformers", "distributed_tensors", "finetuning",
        )),
        "test_extending", "test_removing", "benchmarks/test_ship_binaries", "cli/test_tune_output", "fleet/test_roll_out",
        "fleet/test_upkeep", "measuring/test_isolation", "rows/test_bad_days", "tuning/run/test_poisoned",
        "tuning/run/test_settled",
    )
)  # fmt: skip
assert all(path.exists() for path in VALUES | LONG)


# --- the parent: one stand-in per test of a child


class Child:
    """A child pytest. Collects all of what it is for, waits for a choice, runs it, and sends every report."""

    def __init__(self, config: pytest.Config, paths: Sequence[Path], environment: Mapping[str, str]) -> None:
        self.config = config
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by stop()
        pipe, childs_end = Pipe()
        options = [f"--rootdir={config.rootpath}", f"--tb={config.option.tbstyle}", *["-v"] * config.option.verbose]
        options += ["--showlocals"] * config.option.showlocals
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *map(str, paths)],
            env={**os.environ, **environment, PIPE: str(childs_end.fileno())},
            cwd=config.rootpath, pass_fds=[childs_end.fileno()], stdout=self.output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        childs_end.close()
        self.pipe: Connection[Any, Any] = pipe
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A thread drains the pipe, so that the child never waits for this process.
        threading.Thread(target=self._drain, daemon=True).start()
        config.add_cleanup(self.stop)

    @functools.cached_property
    def found(self) -> tuple[list[str], dict[str, str]]:
        """(tests, errors by file) of its collection."""
        return self._receive() or ([], {})

    def _drain(self) -> None:
        try:
            while True:
                self.messages.put(self.pipe.recv())
        except (EOFError, OSError):
            self.messages.put(None)

    def _receive(self) -> Any:
        """The next message; None for ever once the child is gone."""
        message = self.messages.get()
        if message is None:
            self.messages.put(None)
        return message

    def start(self, chosen: list[str]) -> None:
        self.pipe.send(chosen)

    def reports(self, nodeid: str) -> Iterator[pytest.TestReport]:
        """Every report of one test, in the order chosen. RuntimeError if the child died on the way."""
        while (message := self._receive()) != ("finished", nodeid):
            if message is None:
                raise RuntimeError(self.death())
            yield self.config.hook.pytest_report_from_serializable(config=self.config, data=message)

    def death(self) -> str:
        status = self.process.wait()
        self.output.seek(0)
        return f"the child process ended with status {status}; the end of its output:\n{self.output.read()[-4000:]}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)  # as Ctrl-C: what its tests started ends as well
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.pipe.close()
        self.output.close()


class ChildsItem(pytest.Item):
    def runtest(self) -> None:
        """Only reached when the child died: pytest_runtest_protocol did not find this test's reports."""
        pytest.fail(self.child.death(), pytrace=False)

    @property
    def child(self) -> Child:
        return child_for(self.config, self.path)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


class ChildsFile(pytest.File):
    def collect(self) -> Iterator[ChildsItem]:
        child = child_for(self.config, self.path)
        collected, errors = child.found
        if self.nodeid in errors:
            raise self.CollectError(errors[self.nodeid])
        if not collected and not errors:
            raise self.CollectError(child.death())
        for nodeid in collected:
            file, _, name = nodeid.partition("::")
            if file == self.nodeid:
                yield ChildsItem.from_parent(self, name=name)


@functools.cache
def compiling_child(config: pytest.Config) -> Child:
    return Child(config, COMPILING, {})


@functools.cache
def computing_child(config: pytest.Config) -> Child:
    return Child(config, COMPUTING, {})


@functools.cache
def interpreting_child(config: pytest.Config) -> Child:
    return Child(config, [TESTS / "interpreter"], {"TRITON_INTERPRET": "1"})


def child_for(config: pytest.Config, path: Path) -> Child:
    if path in COMPILING:
        return compiling_child(config)
    return computing_child(config) if path in COMPUTING else interpreting_child(config)


def stays_here(config: pytest.Config, path: Path) -> bool:
    if CHILD:
        return True
    if path not in COMPILING + COMPUTING:
        return INTERPRETED or TESTS / "interpreter" not in path.parents
    named = {(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args}
    # a worker of pytest-xdist would start a child of its own
    return INTERPRETED or config.option.usepdb or path.resolve() in named or hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Where a whole folder is asked for, its children collect while this process does."""
    config = session.config
    if getattr(config.option, "dist", "no") != "no":  # pytest-xdist: it is its workers that collect
        return
    folders = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    for path in (COMPILING[0], COMPUTING[0], TESTS / "interpreter" / "any"):
        if any(folder in path.parents for folder in folders) and not stays_here(config, path):
            child_for(config, path)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> ChildsFile | None:
    return None if stays_here(parent.config, module_path) else ChildsFile.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not isinstance(item, ChildsItem):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        for report in item.child.reports(item.nodeid):
            item.ihook.pytest_runtest_logreport(report=report)
    except RuntimeError:
        return None  # pytest's own protocol runs the item, which fails with the reason
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    chosen: dict[Child, list[str]] = {}
    for item in session.items:
        if isinstance(item, ChildsItem):
            chosen.setdefault(item.child, []).append(item.nodeid)
    if not session.config.option.collectonly:
        for child, nodeids in chosen.items():
            child.start(nodeids)


# --- the child


class Reporter:
    """Tells the parent what was collected, runs what it chooses, and sends the reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.pipe: Connection[Any, Any] = Connection(int(os.environ.pop(PIPE)))
        self.errors: dict[str, str] = {}
        config.option.continue_on_collection_errors = True  # the parent decides what they stop

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors[report.nodeid] = report.longreprtext

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        items = {item.nodeid: item for item in session.items}
        self.pipe.send((list(items), self.errors))
        session.items[:] = [items[nodeid] for nodeid in self.pipe.recv()]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.pipe.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.pipe.send(("finished", nodeid))


def patch_once_per_launch() -> None:
    """Triton's interpreter replaces the functions of triton.language for a launch, and again for each call of a device function
    in it: nearly half the time of a launch. Here it does so once for each module that the functions are of."""
    from triton import language
    from triton.runtime import interpreter

    replace, own, nothing = interpreter._patch_lang, language.static_range, interpreter._LangPatchScope()
    done: set[str] = set()

    def patch(fn: Any) -> Any:
        if language.static_range is own:  # a launch
            done.clear()
        elif fn.__module__ in done:
            return nothing
        done.add(fn.__module__)
        return replace(fn)

    interpreter._patch_lang = patch


def look_for_no_overflow() -> None:
    """Of integers: the interpreter computes each of their sums and products once more, in int64."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def pytest_configure(config: pytest.Config) -> None:
    if INTERPRETED:
        patch_once_per_launch()
        if EVERY > 1:
            look_for_no_overflow()
    if PIPE in os.environ:
        os.nice(10)  # the parent's tests have the tighter deadlines
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit an ignored one
        config.pluginmanager.register(Reporter(config))


# --- every process


@contextmanager
def within_the_limit() -> Iterator[None]:
    """A test that waits for ever fails, and says where, and where other threads are. What hangs in C is not interrupted."""

    def fail(*_: object) -> None:
        frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()}
        stacks = "\n".join("".join(traceback.format_stack(frame)) for frame in frames.values())
        # an exception that tests and what they test do not handle
        pytest.fail(f"longer than {MOST_SECONDS} s; where other threads are:\n{stacks}")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS, 30.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limited(item: pytest.Item) -> Iterator[None]:
    if isinstance(item, ChildsItem) or item.config.option.usepdb or not hasattr(signal, "SIGALRM"):
        return (yield)
    with within_the_limit():
        return (yield)


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = pytest.hookimpl(wrapper=True)(limited)


def number_of(item: pytest.Item) -> int:
    """By the name of its case, so that tests of one case, which take one compilation, run or do not run together."""
    return zlib.crc32(item.name.partition("[")[2].encode())


def left_out(items: Sequence[pytest.Item]) -> set[str]:
    """The tests of LONG that do not run with ``FA2TUNE_TESTS_EVERY``. Of each file every n-th does, one at least; with n = 3
    others than with n = 6, so that CI takes half of them with one set of versions or the other. A child has chosen its own."""
    each = max(EVERY // 8, 1)
    tests: dict[Path, dict[str, None]] = {}
    for item in items:
        if item.path in LONG and not isinstance(item, ChildsItem):
            tests.setdefault(item.path, {})[item.nodeid.partition("[")[0]] = None
    return {
        test for names in tests.values() for place, test in enumerate(names)
        if place % each != min(each // 2, len(names) - 1)
    }  # fmt: skip


def shared_out(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Those that run with ``FA2TUNE_TESTS_EVERY``: of machine code that share of the cases, of values twice as many, and one
    case of each test where none falls into it; of LONG a share of the tests that is eight times as large; of tests/gpu those of
    ``FA2TUNE_GPU_SHARE``."""
    without = left_out(items)
    items = [item for item in items if item.nodeid.partition("[")[0] not in without]
    every = dict.fromkeys(READING, EVERY) | dict.fromkeys(VALUES, max(EVERY // 2, 1))

    def in_the_share(item: pytest.Item) -> bool:
        if TESTS / "gpu" in item.path.parents:
            return number_of(item) % GPU_SHARES == GPU_SHARE - 1
        return number_of(item) % every.get(item.path, 1) == 0

    least: dict[str, int] = {}
    for item in items:
        test, number = item.nodeid.partition("[")[0], number_of(item)
        least[test] = min(least.get(test, number), -1 if in_the_share(item) else number)
    for item in items:
        if in_the_share(item) or number_of(item) == least[item.nodeid.partition("[")[0]]:
            yield item


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chosen = list(shared_out(items))
    if len(chosen) < len(items) and not CHILD:
        items[0].config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    items[:] = chosen
    # last, so that this process does not wait for a child, and what takes longest at the very end
    turns = {path: turn for turn, path in enumerate(COMPILING, 2)}
    items.sort(key=lambda item: turns.get(item.path, 1) if isinstance(item, ChildsItem) else 0)
    on_gpu = [item for item in items if TESTS / "gpu" in item.path.parents]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _no_caches_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test sees the user's cache file, a fleet's, or what another test left; none writes to the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
    for name in ("FA2TUNE_CACHE", "FA2TUNE_CAPTURE_MISS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FA2TUNE_KERNELS", "off")


@pytest.fixture(scope="session", autouse=True)
def _shipped_files_are_read_once() -> Iterator[None]:
    """``reader._read`` and ``_Held.row``, but of a shipped file only once while it does not change: a tenth of a second of a
    core for all records and half a second for all rows, which every test with a choice of its own would spend. Each asker has
    rows of its own."""
    from fa2tune.rows import reader

    shipped, read, decoded = frozenset(reader.shipped_paths()), reader._read, reader._Held.row
    held: dict[tuple[Path, object], Any] = {}
    rows: dict[int, dict[int, Any]] = {}  # by the identity of what is held

    def once(path: Path) -> Any:
        if path not in shipped:
            return read(path)
        asked = path, reader._state(path)
        if asked not in held:
            held[asked] = read(path)
            rows[id(held[asked])] = {}
        return held[asked]

    def row(self: Any, number: int) -> Any:
        if (known := rows.get(id(self))) is None:
            return decoded(self, number)
        if number not in known:
            known[number] = decoded(self, number)
        found = known[number]
        return replace(found, config=dict(found.config), errors=dict(found.errors), pruned=dict(found.pruned))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_read", once)
        patch.setattr(reader._Held, "row", row)
        yield


@pytest.fixture
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes that a test starts need not import torch and its like again."""
    import quick_start

    if sys.platform == "linux":
        monkeypatch.setattr(subprocess, "Popen", quick_start.Popen)


@pytest.fixture
def portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner knows one variant of each kernel, the portable one, whatever others the house has."""
    from fa2tune.compiling import registry

    monkeypatch.setattr(registry, "variants_of", lambda kernel: (registry.portable_of(kernel),))


@pytest.fixture
def specialized_fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tuned kernel has the portable variant and a fake warp-specialised one (variant_fakes.py), and no other."""
    from variant_fakes import with_fakes

    from fa2tune.calling import choosing
    from fa2tune.compiling import fingerprint, registry
    from fa2tune.spec.problem import KERNELS

    found = with_fakes(*KERNELS)
    caches = (registry.implementations, fingerprint.backward_hash, fingerprint.kernel_hashes, choosing.toolchain)
    monkeypatch.setattr(registry, "variants", lambda: found)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Defaults serve every call: neither shipped rows nor a user's."""
    from fa2tune.calling import dispatch
    from fa2tune.rows import reader

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reader, "shipped_paths", list)
    dispatch.reload()
    yield
    dispatch.reload()
