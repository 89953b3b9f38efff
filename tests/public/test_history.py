"""What a process has done: the last report, sums, who is told, and reports as data and as tables."""

from __future__ import annotations

import io
import json
import logging

import pytest
import torch.distributed as dist
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from gpurelease import InvalidOption, RestoreFailed, history, last_report, on_transition, released_world, totals
from gpurelease.groups.releasable import Releasable
from tests.cycles import POSING, total
from tests.ranks import init_gloo, logged, run_ranks


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(history, "_history", history._History())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def a_scope(**options):
    with released_world(**{**POSING, **options}) as scope:
        pass
    return scope.report


def test_the_last_report_and_sums_are_kept_and_who_asks_is_told(caplog):
    assert last_report() is None
    told = []
    end = on_transition(lambda report, transition: told.append((report, transition.kind)))
    on_transition(lambda *_: 1 / 0)
    report = a_scope()
    assert last_report() is report
    assert told == [(report, "release"), (report, "restore")]
    assert sum("on_transition() raised" in record.getMessage() for record in caplog.records) == 2
    end()
    end()
    a_scope()
    assert len(told) == 2
    sums = totals()
    assert [sums.by_kind[kind]["transitions"] for kind in ("release", "restore")] == [2, 2]
    assert sums.to_dict()["release"]["working_seconds"] > 0
    lines = sums.to_prometheus().splitlines()
    assert 'gpurelease_transitions_total{kind="restore"} 2' in lines
    assert lines[:2] == [
        "# HELP gpurelease_transitions_total Ways through that went well.",
        "# TYPE gpurelease_transitions_total counter",
    ]
    with pytest.raises(InvalidOption):
        on_transition(None)


def test_who_is_told_cannot_open_scopes(caplog):
    on_transition(lambda *_: a_scope())
    a_scope()
    refusals = [record for record in caplog.records if "on_transition() raised" in record.getMessage()]
    assert len(refusals) == 2 and all("from inside a transition" in str(each.exc_info[1]) for each in refusals)


def test_a_report_is_plain_data():
    dist.new_group([0], group_desc="a <b>")
    report = a_scope()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["summary"] == str(report)
    assert [group["description"] for group in data["groups"]] == ["default_pg", "a <b>"]
    release = data["transitions"][0]
    assert release["kind"] == "release" and release["memory"] is release["freed_bytes"] is None
    assert release["total_seconds"] == pytest.approx(release["waiting_seconds"] + release["working_seconds"])
    assert release["started"] > 1.7e9


def test_a_report_is_a_table_in_a_notebook_and_in_a_terminal():
    dist.new_group([0], group_desc="a <b>")
    report = a_scope(keep="a <b>")
    assert " (a &lt;b&gt;)</td>" in report._repr_html_()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    assert "default_pg" in text and "kept: " in text and "what became of it" in text


def test_profilers_see_the_steps():
    from torch._C._profiler import _ExperimentalConfig

    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as seen:
        a_scope()
    names = {event.key for event in seen.key_averages()}
    assert {"gpurelease: release: tear down", "gpurelease: restore: build"} <= names


def fails_on_rank_1(rank, size):
    lines = logged(logging.INFO)
    init_gloo(rank, size)
    unused = dist.new_group([0, 1, 2], group_desc="left alone")
    with released_world(**POSING, keep=unused):
        pass
    real, Releasable.build = Releasable.build, Releasable.build
    if rank == 1:
        Releasable.build = lambda *_: 1 / 0
    with pytest.raises(RestoreFailed), released_world(**POSING):
        pass
    Releasable.build = real
    with released_world(**POSING):
        pass
    return lines, totals().by_kind["restore"]["failures"], total()


def test_rank_0_says_what_was_done_and_whom_a_failure_is_about_says_so_too():
    (first, *_), (second, *_), (third, *_) = results = run_ranks(fails_on_rank_1, 3)
    assert [result[1:] for result in results] == [(1, 3.0)] * 3
    done = [text for level, _, text in first if level == "INFO"]
    assert done[0].startswith("rank 0 released ") and "kept 1: process group '1' (left alone): keep=" in done[0]
    assert "without waiting" in done[0] and done[1].startswith("rank 0 restored ")
    assert [level for level, _, text in second] == ["ERROR"] and not third
    for lines in (first, second):
        [failed] = [text for level, _, text in lines if level == "ERROR"]
        assert " could not restore the world: " in failed and "rank 1: " in failed
