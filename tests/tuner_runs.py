"""Runs of the tuner with fake functions in real child processes: no GPU, no compiler."""

from pathlib import Path

from tuner_fakes import logged

from fa2tune import gpus
from fa2tune.rows import reader
from fa2tune.rows.row import MEASURED
from fa2tune.spec.problem import Specialization
from fa2tune.tuning.request import plan
from fa2tune.tuning.request.plan import Target, TuneRequest
from fa2tune.tuning.request.watcher import Watcher, WorkerFunctions
from fa2tune.tuning.run import tuner
from fa2tune.tuning.search.candidates import point

FAKES = WorkerFunctions(
    "tuner_fakes:compile_check", "tuner_fakes:race", "tuner_fakes:check", "tuner_fakes:check_backward"
)

SPEC = Specialization("bf16", 128, 128, "causal")


class Listener(Watcher):
    def __init__(self):
        self.lines = []

    def line(self, text):
        self.lines.append(text)


class Bench:
    """Runs the tuner with fake functions and tells what they did."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.log = folder / "log.jsonl"
        self.lines = []
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        monkeypatch.setenv("FA2TUNE_FAKE_LOG", str(self.log))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "unused"))
        monkeypatch.setattr(reader, "shipped_paths", list)

    def tune(self, target, **request):
        values = {
            "trials": 12,
            "buckets": (512, 4096),
            "dtypes": ("bf16",),
            "masks": ("causal",),
            "pass_": "fwd",
            "workers": 2,
        }
        self.monkeypatch.setattr(plan, "resolve_target", lambda name: target)
        self.monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
        listener = Listener()
        self.lines = listener.lines
        return tuner.tune(TuneRequest(cache=self.folder / "cache.sqlite", **{**values, **request}), listener, FAKES)

    def did(self, kind):
        return [entry[1:] for entry in logged(self.log, kind)]

    def tried(self):
        """Configs compiled or raced: a good binary's other launches race without a compile."""
        raced = [config for *_, contenders in self.did("screen") for config in contenders]
        return list({point(c): c for c in [*(config for *_, config in self.did("compile")), *raced]}.values())

    def tried_of(self, mask):
        """Configs raced for one mask."""
        return [config for *_, its, contenders in self.did("on") if its == mask for config in contenders]

    def forget(self):
        self.log.unlink(missing_ok=True)


H200, H100, A100 = gpus.named("h200"), gpus.named("h100"), gpus.named("a100")
HERE = Target(H200, MEASURED, H200)


def asked(monkeypatch, folder, devices, target=HERE):
    """The plan of a run on some devices."""
    monkeypatch.setattr(plan, "resolve_target", lambda name: target)
    return plan.make_plan(TuneRequest(cache=folder / "c.sqlite", devices=devices))
