"""All of torch's own ``DistributedTest``, with a cycle after each group that is made. It takes minutes."""

from __future__ import annotations

from tests.torch_own import assert_cycles_change_nothing, outcomes, that_want_more_ranks

LONG = 900  # seconds


def test_all_pass_with_cycles_as_they_do_without():
    on_three = outcomes("--cycles", ranks=3, timeout=LONG)
    assert sum(each.outcome == "passed" for each in on_three.values()) >= 80, on_three
    assert_cycles_change_nothing(on_three, ranks=3, timeout=LONG)
    # Some want a larger world, for groups that most ranks are not in.
    for ranks, why in [(4, "Test requires an exact world size of 4"), (8, "Skipped due to small world size")]:
        names = that_want_more_ranks(on_three, why)
        assert names
        on_more = outcomes("--cycles", *names, ranks=ranks, timeout=LONG)
        assert any(each.outcome == "passed" for each in on_more.values()), on_more
        assert_cycles_change_nothing(on_more, ranks=ranks, timeout=LONG)
