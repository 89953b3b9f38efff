"""Bodies and transitions that fail, and scopes that have nothing to do, as lists of what was asked of the world."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpurelease import (
    InvalidOption,
    ReleaseFailed,
    RestoreFailed,
    current_report,
    is_released,
    release_depth,
    released_world,
    restored_world,
    sleep_world,
    wake_world,
)

# ------------------------------------------------------------------------------------------------------------ errors


def test_a_failed_entry_leaves_no_scope_open(world):
    world.fail_next = True
    with pytest.raises(ReleaseFailed), released_world():
        pytest.fail("the body ran")
    assert release_depth() == 0
    with released_world():
        pass
    assert world.events == ["release fails", "release", "restore"]


def test_the_world_is_restored_before_the_body_s_error_is_seen(world):
    with pytest.raises(ZeroDivisionError), released_world():
        1 / 0  # noqa: B018
    assert world.events == ["release", "restore after an error"]


def test_the_body_s_error_wins_over_a_failed_restore_and_both_are_kept(world, caplog):
    with pytest.raises(ZeroDivisionError) as caught, released_world():
        world.fail_next = True
        1 / 0  # noqa: B018
    assert "RestoreFailed" in caplog.text
    notes = getattr(caught.value, "__notes__", ["RestoreFailed: before Python 3.11 there are no notes"])
    assert "RestoreFailed" in notes[0]


def test_a_failed_restore_can_be_tried_again(world):
    with pytest.raises(RestoreFailed), released_world():
        world.fail_next = True
    assert (is_released(), release_depth()) == (True, 0)
    wake_world()
    assert world.events == ["release", "restore fails", "restore"]


def test_after_a_failed_restore_a_new_scope_restores_as_well(world):
    with pytest.raises(RestoreFailed), released_world():
        world.fail_next = True
    with released_world() as scope:
        assert scope.report.reason == "the world was released still, since a transition had failed"
    assert str(scope.report).startswith("restored 0 process groups")
    assert world.events == ["release", "restore fails", "restore"]


def test_a_restore_that_is_tried_again_can_be_given_more_time(world):
    with pytest.raises(RestoreFailed), released_world(timeout=3):
        world.fail_next = True
    given = []
    world.before_it_acts = lambda: given.append(world.timeout_of_aim)
    wake_world(timeout=60)
    sleep_world(timeout=3)
    wake_world(timeout=timedelta(minutes=2))
    assert given == [60, 3, 120]
    with pytest.raises(InvalidOption):
        wake_world(timeout=-1)


def test_a_rank_that_may_be_apart_from_the_others_meets_them_where_they_are(world):
    """It was interrupted or late: it is ARMED, and does not know whether the others are."""
    world.settled = False
    wake_world()
    assert world.events == [] and world.settled
    assert wake_world().reason == "the world is awake"
    world.settled = False
    with released_world():
        pass
    assert world.events == ["release", "restore"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_rebuilds_nothing_and_tells_the_others(world, interrupt):
    with pytest.raises(interrupt), released_world(), released_world():
        raise interrupt
    assert world.events == ["release", f"leave: rank 0 left with {interrupt.__name__}, and rebuilds nothing"]
    assert (is_released(), release_depth()) == (True, 0)
    wake_world()


def test_an_interrupt_inside_restored_world_tells_the_others_once(world):
    with pytest.raises(KeyboardInterrupt), released_world(), restored_world():
        raise KeyboardInterrupt
    assert world.events == ["release", "restore", "leave: rank 0 left with KeyboardInterrupt, and rebuilds nothing"]


def test_a_destroyed_world_is_not_restored(world):
    with released_world() as scope:
        world.is_gone = True
    assert world.events == ["release", "forget"]
    assert "destroyed" in scope.report.reason


# ------------------------------------------------------------------------------------------------------------- no-ops


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_disabled_scopes_do_nothing_and_say_so(world, monkeypatch, value):
    monkeypatch.setenv("GPURELEASE_DISABLE", value)
    with released_world() as scope, restored_world():
        assert not is_released()
    sleep_world()
    wake_world()
    assert world.events == []
    assert scope.report.reason == "GPURELEASE_DISABLE is set"


def test_without_a_process_group_scopes_do_nothing_and_say_so(no_world):
    with released_world() as scope:
        assert (is_released(), release_depth()) == (False, 0)
    assert scope.report.reason == "there is no process group"
    assert str(scope.report) == "nothing done: there is no process group"
    sleep_world()
    assert wake_world().reason == "there is no process group"


def test_with_nothing_to_release_the_scope_is_a_no_op(world):
    world.nothing_to_release = True
    with released_world() as scope, restored_world():
        assert not is_released()
    assert world.events == []
    assert scope.report.reason == "no rank has a process group to release"


def test_current_report_is_that_of_the_scope_that_acted(world):
    assert current_report() is None
    with released_world() as outer, released_world():
        assert current_report() is outer.report
    assert current_report() is None
