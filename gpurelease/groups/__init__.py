"""Which groups are released, and what becomes of one.

``plan`` sorts this rank's groups into those that it would release and those that it leaves alone; ``releasable`` is one
of the former: its backends go off its table and a shell goes on, later new backends; ``blueprint`` says how a backend
is built again, and ``standin`` what serves WORLD meanwhile.
"""
