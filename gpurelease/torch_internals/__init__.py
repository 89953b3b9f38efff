"""The one place that touches what torch.distributed keeps to itself.

Every private name is in this folder, with the torch versions for which it was seen to hold; the rest of the package
speaks of groups, tables and books only. ``books`` is c10d's Python side, ``tables`` a group's C++ side, ``backends``
what a backend can be asked and told and how one is made, ``nccl`` what is special about torch's three kinds of
ProcessGroupNCCL, ``stores`` where ranks meet, ``devices`` the accelerator, and ``extension`` loads the C++.
"""
