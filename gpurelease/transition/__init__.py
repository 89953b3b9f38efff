"""One WORLD's way from ARMED to RELEASED and back: all ranks go, or none does.

``world`` is where a WORLD stands on one rank; ``engine`` goes from one roll call to the next and does what each verdict
says, ``steps`` is what it can do; ``passage`` has a thread do all that while the caller waits, and can be interrupted.
"""
