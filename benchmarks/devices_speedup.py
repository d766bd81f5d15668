"""How much faster several GPUs of a host tune than one GPU, on the same small grid.

    python benchmarks/devices_speedup.py [--seconds 250] [--head-dim 64 --head-dim 128] [--trials 8]

Both runs start with a cold compile cache and empty studies: first ``--devices all``, then one GPU. Prints the ratio of the
times and, for each run, the share of the time in which each GPU, the compiling processes and the bookkeeping process were
busy. A run on one GPU that exceeds ``--seconds`` is stopped, and the ratio is a lower bound. If the run on several GPUs
exceeds it, there is no ratio.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from fa2tune.tuning.request.plan import TuneRequest, make_plan
from fa2tune.tuning.request.watcher import Watcher
from fa2tune.tuning.run.tuner import tune

KILL_AFTER_S = 5.0  #: a run that was interrupted files what it has


class Clock(Watcher):
    """When the first candidate was timed, and the first row was filed, in seconds."""

    def __init__(self, begun: float) -> None:
        self.begun, self.first, self.rows = begun, 0.0, 0.0

    def progress(self, done: int, total: int, now: str, statuses: Any) -> None:
        if done and not self.first:
            self.first = time.monotonic() - self.begun
        if now and not self.rows:
            self.rows = time.monotonic() - self.begun
        print(f"  {time.monotonic() - self.begun:6.1f} s: {done} of {total}", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)


def run(request: TuneRequest) -> None:
    """One run, in a process of its own; its figures as JSON on the last line."""
    begun = time.monotonic()
    clock = Clock(begun)
    plan = make_plan(request)
    report = tune(request, clock)
    figures = {
        "gpus": len(plan.devices), "gpu": plan.target.gpu.name, "seconds": report.seconds, "rows": len(report.rows),
        "compiled": report.compiled, "interrupted": report.interrupted, "launching": report.launching,
        "compiling": report.compiling, "compilers": plan.workers, "bookkeeping": report.bookkeeping,
        "compile_seconds": report.compile_seconds, "first_time_after": clock.first, "first_row_after": clock.rows,
        "fates": dict(report.statuses),
    }  # fmt: skip
    print(json.dumps(figures), flush=True)


def measured(arguments: list[str], seconds: float) -> dict[str, Any]:
    """The figures of a run; interrupted when its time is over."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "XDG_CACHE_HOME": folder,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, *arguments, "--run-in", folder]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                said, _ = process.communicate(timeout=KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
                return {"seconds": seconds, "interrupted": True}
    if not said.strip():
        raise click.ClickException(f"the run with {arguments} printed no figures")
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    return figures


def shown(figures: dict[str, Any]) -> str:
    if "gpus" not in figures:
        return f"stopped after {figures['seconds']:.0f} s"
    busy = " ".join(f"{100 * share:.0f}" for share in figures["launching"])
    return (
        f"{figures['gpus']} x {figures['gpu']}: {figures['seconds']:.1f} s{', stopped' if figures['interrupted'] else ''}, "
        f"{figures['compiled']} compiled (the last after {figures['compile_seconds']:.0f} s), {figures['rows']} rows; first "
        f"time after {figures['first_time_after']:.1f} s, first row after {figures['first_row_after']:.1f} s; busy: GPUs "
        f"{busy} %, {figures['compilers']} compilers {100 * figures['compiling']:.0f} %, bookkeeping "
        f"{100 * figures['bookkeeping']:.0f} %; not timed: {figures['statuses']}"
    )


@click.command()
@click.option("--seconds", type=float, default=250.0, show_default=True, help="For both runs together.")
@click.option("--head-dim", type=int, multiple=True, default=(64, 128), show_default=True)
@click.option("--trials", type=int, default=8, show_default=True)
@click.option("--one", default=0, show_default=True, help="The GPU that tunes alone.")
@click.option("--devices", default="all", show_default=True, help="The GPUs that tune together.")
@click.option("--run-in", type=click.Path(path_type=Path), hidden=True)
def main(
    seconds: float, head_dim: tuple[int, ...], trials: int, one: int, devices: str, run_in: Path | None
) -> None:  # fmt: skip
    chosen: Any = devices if devices == "all" else tuple(int(part) for part in devices.split(","))
    if run_in is not None:
        run(
            TuneRequest(
                head_dims=head_dim, dtypes=("bf16",), buckets=(1024, 4096), trials=trials, devices=chosen,
                cache=run_in / "cache.sqlite",
            )
        )  # fmt: skip
        return
    if seconds <= 3 * KILL_AFTER_S:
        raise click.BadParameter(f"got {seconds:g}, allowed is more than {3 * KILL_AFTER_S:g}", param_hint="--seconds")
    begun = time.monotonic()
    grid = [f"--trials={trials}", *(f"--head-dim={dim}" for dim in head_dim)]
    together = measured([*grid, f"--devices={devices}"], seconds - 2 * KILL_AFTER_S)
    print(shown(together), flush=True)
    if together["interrupted"]:
        raise click.ClickException(f"no ratio: {devices} did not finish in time (--seconds, --trials)")
    left = seconds - KILL_AFTER_S - (time.monotonic() - begun)
    if left <= KILL_AFTER_S:
        raise click.ClickException("no ratio: no time is left for one GPU (--seconds, --trials)")
    alone = measured([*grid, f"--devices={one}"], left)
    print(shown(alone), flush=True)
    ratio = alone["seconds"] / together["seconds"]
    bound = "at least " if alone["interrupted"] else ""
    print(f"{bound}{ratio:.2f} x on {together['gpus']} GPUs")


if __name__ == "__main__":
    main()
