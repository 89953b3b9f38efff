"""The open scopes of this process, and what one of them does from its entry to its end.

``book`` has all that are open, and says what state of the world they want; ``life`` is what one scope does, in one
function for plain and ``async`` scopes; ``contexts`` are those of its ``also=``; ``driver`` waits where a life waits,
and sees to it that a scope is closed whatever comes. ``scope`` is what users hold, and ``decorator`` puts one around
each call of a function.
"""
