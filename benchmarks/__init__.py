"""What a scope costs, without a GPU: ``make bench``.

* ``cycle``: a cycle against torch's own destroy and init, and where the time goes;
* ``growth``: what it becomes with more groups, ranks and cycles;
* ``rollcall``: planning and deciding, with thousands of ranks;
* ``handles``: a collective through a handle, a nested scope, and the memory;
* ``scale``: what all that means at 8 to 4,096 ranks; ``draw``: the pictures.

All but ``rollcall`` run the real ProcessGroupNCCL on the double of ``tests/simgpu``, which says nothing of a GPU's own
times: making a communicator takes as long there as it is told to.
"""
