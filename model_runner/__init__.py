"""The process that owns the weights and runs the model."""

import os

# OpenMP's threads spin at the end of a parallel region, for milliseconds by default, and so take the cores from
# whoever shares them: gateway, cache manager, clients. Median decode step of SmolLM2 on two cores with two busy
# neighbours: 638 ms by default, 93 ms with this; on a quiet machine there is no difference. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Weights in huge pages where the kernel gives them to who asks. A process's death shows when its memory has been taken
# apart: 75 to 90 ms after SIGKILL with this and 240 to 300 ms without (SmolLM2, two busy cores). Steps take the same.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
