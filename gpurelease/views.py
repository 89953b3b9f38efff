"""Reports as tables: for a terminal with ``rich``, and for a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpurelease.report import Report

HEADER = ("group", "ranks", "backend", "what became of it")


def rich_table(report: Report) -> Any:
    """Return a ``rich`` table. For ``rich`` itself to call, so that it is there."""
    from rich.table import Table

    table = Table(*HEADER, title=str(report), title_justify="left")
    for row in _rows(report):
        table.add_row(*row)
    return table


def html_table(report: Report) -> str:
    """Return a table in HTML."""

    def row(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = [row(HEADER, "th"), *(row(cells, "td") for cells in _rows(report))]
    return f"<table><caption>{html.escape(str(report))}</caption>{''.join(rows)}</table>"


def _rows(report: Report) -> Iterator[tuple[str, ...]]:
    for group in report.groups:
        what = f"kept: {group.reason}"
        if group.released:
            what = "released" if group.connected is not False else "released, and never used before"
        if group.suspended_bytes is not None:
            what = f"suspended {group.suspended_bytes:,} bytes, and {group.stayed_bytes or 0:,} stayed"
        yield str(group), ", ".join(map(str, group.ranks)), group.backend, what
