"""The tests on the real ProcessGroupNCCL, over the double in ``tests/simgpu``."""
