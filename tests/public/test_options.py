"""Options: what each may be, and in what form it is kept."""

from __future__ import annotations

import threading
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest

from gpurelease import InvalidOption, release_depth, released_world, sleep_world, wake_world
from gpurelease.options import LONGEST, SHORTEST, ScopeOptions, disabled


@pytest.mark.parametrize(
    "options, words",
    [
        ({"strategy": "renew"}, "strategy='renew' is not known; there is 'rebuild'"),
        (
            {"keep": [3]},
            "keep= takes process groups, device meshes, names or descriptions, or one predicate, and got 3",
        ),
        ({"keep": 3}, "or one predicate, and got 3"),
        ({"backends": ("ncl",)}, "'ncl' is not a backend of this torch"),
        ({"backends": ()}, "would release nothing"),
        ({"timeout": 0}, "timeout=0 must be a positive number of seconds"),
        ({"timeout": timedelta(0)}, "must be a positive number of seconds"),
        ({"timeout": "10"}, "must be a positive number of seconds"),
        ({"timeout": True}, "must be a positive number of seconds"),
        ({"timeout": float("nan")}, "must be a positive number of seconds"),
        ({"timeout": -float("inf")}, "must be a positive number of seconds"),
        ({"timeout": Decimal(3)}, "must be a positive number of seconds"),
        ({"timeout": 3j}, "must be a positive number of seconds"),
    ],
)
def test_an_option_that_can_never_work_is_refused_where_it_is_given(options, words):
    with pytest.raises(InvalidOption) as refused:
        released_world(**options)
    assert words in str(refused.value)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    "given, seconds",
    [
        (5, 5.0),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(7), 7.0),
        (Fraction(1, 4), 0.25),
        (timedelta(milliseconds=1500), 1.5),
        (1e-300, SHORTEST),
        (timedelta(microseconds=1), SHORTEST),
        (float("inf"), LONGEST),
        (10**400, LONGEST),
        (1e300, LONGEST),
        (timedelta.max, LONGEST),
    ],
)
def test_any_number_is_a_time_out_that_every_clock_can_count(given, seconds):
    timeout = ScopeOptions.check("rebuild", (), None, given).timeout
    assert timeout == seconds and type(timeout) is float
    threading.Event().wait(min(timeout, 0.001))
    assert timedelta(seconds=timeout) <= timedelta(days=366)


def test_options_have_one_form():
    from torch.distributed import GroupMember

    options = ScopeOptions.check("rebuild", "tp", "NCCL", timedelta(minutes=2))
    assert options == ScopeOptions("rebuild", ("tp",), ("nccl",), 120.0)
    assert ScopeOptions.check("rebuild", [None, GroupMember.NON_GROUP_MEMBER], None, None).keep == ()
    assert ScopeOptions.check("rebuild", None, None, None).keep == ()
    assert ScopeOptions.check("rebuild", GroupMember.NON_GROUP_MEMBER, None, None).keep == ()
    assert ScopeOptions.check("rebuild", str.isalpha, None, None).keep is str.isalpha


@pytest.mark.parametrize(
    "words, is_off",
    [
        (("1", "true", "True", "YES", "y", "on", " On "), True),
        (("", " ", "0", "false", "No", "n", "OFF"), False),
    ],
)
def test_words_that_disable_and_words_that_do_not(monkeypatch, words, is_off):
    for word in words:
        monkeypatch.setenv("GPURELEASE_DISABLE", word)
        assert disabled() is is_off, word
    monkeypatch.delenv("GPURELEASE_DISABLE")
    assert not disabled()


@pytest.mark.parametrize("word", ["2", "maybe", "ture"])
def test_any_other_word_is_an_error_at_the_first_scope(monkeypatch, no_world, word):
    monkeypatch.setenv("GPURELEASE_DISABLE", word)
    scope = released_world()
    for begin in (scope.__enter__, sleep_world, wake_world):
        with pytest.raises(InvalidOption, match=f"GPURELEASE_DISABLE='{word}' is neither yes nor no"):
            begin()
    assert release_depth() == 0
