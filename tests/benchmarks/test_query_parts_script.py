"""benchmarks/query_parts.py: what it times."""

from __future__ import annotations

import json

from benchmark_scripts import BENCHMARKS, script
from click.testing import CliRunner

from fa2tune import gpus
from fa2tune.compiling import limits
from fa2tune.launching import group_parts

query_parts = script("query_parts")
H200 = gpus.named("h200")
RECORD = BENCHMARKS / "calls/query_parts.json"


def test_the_calls_are_those_of_the_record() -> None:
    names = [query_parts.workloads.described(query_parts.posed(one)) for one in query_parts.CALLS]
    assert names == list(json.loads(RECORD.read_text("utf-8"))["calls"])
    done = CliRunner().invoke(query_parts.main, ["--table", str(RECORD)], catch_exceptions=False)
    assert len(done.output.splitlines()) == len(names)
    listed = CliRunner().invoke(query_parts.main, ["--list", "--share", "1/4"], catch_exceptions=False)
    assert listed.output.count(": chosen ") == len(names) // 4


def test_every_candidate_can_run() -> None:
    for problem in map(query_parts.posed, query_parts.CALLS):
        found = query_parts.candidates(problem, H200)
        assert list(found)[:2] == ["without", "fused, alone"] and len(found) > 3
        for name, (candidate, order) in found.items():
            ((choice, parts),) = candidate.values()
            assert limits.before_compile(choice.variant, problem.specialization, choice.config, H200) is None
            counts = group_parts.query_counts(problem, 90) if group_parts.of_queries(choice.config) else (1,)
            assert order == "" and parts in counts and ("parts" in name) == (parts > 1)
