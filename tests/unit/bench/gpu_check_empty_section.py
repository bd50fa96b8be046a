"""A section with nothing in it but a fact."""

from bench.gpu_check.task import Setting, Task, recorded


def tasks(setting: Setting) -> list[Task]:
    return [Task("fact", lambda _: iter([recorded("fact", f"seed {setting.seed}")]))]
