from typing import Any

built_for: str
"""The version of torch that the extension was compiled for."""

def read(backend: Any) -> tuple[bool, bool | None, bool, dict[int, Any]]:
    """Return whether collectives are timed, NaN is checked for, a coalescing block is open; and the abort hooks."""
