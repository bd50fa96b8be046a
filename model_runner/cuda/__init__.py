"""Steps on an NVIDIA GPU: one stream, decode steps as captured graphs, two pinned buffers for what goes up."""
