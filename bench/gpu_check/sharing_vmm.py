"""The checks of `sharing` over CUDA VMM: a section of its own, since the backend that is the default comes first."""

from bench.gpu_check.sharing import tasks_over
from bench.gpu_check.task import Setting, Task


def tasks(setting: Setting) -> list[Task]:
    """The section; a dry run has shown all that it can over `memfd`."""
    del setting
    return tasks_over("cuda_vmm", num_deaths=4, needs_device=True)
