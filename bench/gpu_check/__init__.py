"""`make gpu-check`: everything that only a GPU can show, in one command that ends within six minutes.

`__main__` runs the sections in order of value, each in a process of its own (`section`), and writes every result down
as it comes (`report`). A section is a list of tasks, a task makes checks (`task`). With `--dry-run` the same code runs
as far as a CPU can carry it.
"""
