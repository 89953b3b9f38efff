"""A sample of torch's own ``DistributedTest``, with a cycle after each group that is made."""

from __future__ import annotations

from tests.torch_own import assert_cycles_change_nothing, outcomes


def test_a_sample_passes_with_cycles_as_it_does_without():
    sample = outcomes("--cycles", "--sample", "20", ranks=3, timeout=240)
    were_run = {name: each for name, each in sample.items() if each.outcome != "skipped"}
    assert len(were_run) == 20
    assert_cycles_change_nothing(were_run, ranks=3, timeout=240)
