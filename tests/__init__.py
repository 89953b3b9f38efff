"""The tests, in layers: units, four real processes over Gloo, and the real ProcessGroupNCCL without a GPU."""
