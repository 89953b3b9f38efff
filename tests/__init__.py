"""The tests, in layers: units, four real processes over Gloo, and the real ProcessGroupNCCL on a machine without a GPU."""
