"""Verdicts and answers are short where there is nothing new, or nothing different, to say."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gpurelease.agreement.answers import USUAL, without_usual
from gpurelease.agreement.compact import packed, unpacked

RANKS = st.sets(st.integers(0, 50)).map(sorted)
TEXTS = st.dictionaries(st.integers(0, 50), st.sampled_from(["no", "too late", ""]))


@given(failures=TEXTS, because=TEXTS, kept=st.dictionaries(st.text(max_size=3), RANKS))
def test_what_is_packed_comes_out_as_it_was(failures, because, kept):
    verdict = {"do": "fail", "failures": failures, "because": because, "kept": kept, "last": True}
    assert unpacked(json.loads(json.dumps(packed(verdict)))) == verdict


def test_one_complaint_of_4096_ranks_is_said_once():
    verdict = {"do": "fail", "failures": dict.fromkeys(range(4096), "no more room " * 10)}
    assert len(json.dumps(packed(verdict))) < 200


def test_what_goes_without_saying_is_not_said():
    assert without_usual({"phase": "armed", **USUAL}) == {"phase": "armed"}
    assert without_usual({**USUAL, "problem": "no", "groups": {}}) == {"problem": "no", "groups": {}}
