"""A short soak on the real ProcessGroupNCCL."""

from tests.soak.__main__ import Soak


def test_a_short_soak(nccl_ranks):
    soak = Soak(7, "nccl", events_each=8)
    assert soak.run(12, nccl_ranks), soak.failure
    assert soak.events >= 8, soak
