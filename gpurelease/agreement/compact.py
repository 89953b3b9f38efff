"""Verdicts as short as they can be: thousands of ranks read each, and with one complaint they need one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpurelease.agreement.ballot import Verdict
from gpurelease.errors import runs_of

TEXTS_BY_RANK = ("failures", "because", "contexts failed")
RANKS_BY_KEY = ("kept", "gone")


def packed(verdict: Verdict) -> Verdict:
    """Return a verdict with every text said once, and ranks as runs of ranks."""
    short = dict(verdict)
    for field in TEXTS_BY_RANK:
        if field in verdict:
            ranks: dict[str, list[int]] = {}
            for rank, text in sorted(verdict[field].items()):
                ranks.setdefault(text, []).append(rank)
            short[field] = [[text, runs_of(those)] for text, those in ranks.items()]
    for field in RANKS_BY_KEY:
        if field in verdict:
            short[field] = {key: runs_of(those) for key, those in verdict[field].items()}
    return short


def unpacked(verdict: Verdict) -> Verdict:
    """Return what :func:`packed` was given."""
    whole = dict(verdict)
    for field in TEXTS_BY_RANK:
        if field in verdict:
            whole[field] = {rank: text for text, runs in verdict[field] for rank in _ranks_in(runs)}
    for field in RANKS_BY_KEY:
        if field in verdict:
            whole[field] = {key: _ranks_in(runs) for key, runs in verdict[field].items()}
    return whole


def _ranks_in(runs: Iterable[Sequence[int]]) -> list[int]:
    return [rank for first, last in runs for rank in range(first, last + 1)]
