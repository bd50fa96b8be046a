"""`python child.py PARENT MODULE ARG...` becomes `python -m MODULE ARG...` that dies with PARENT.

The kernel's death signal survives exec but has to be asked for by the child itself. Asking between fork and exec would
run Python in a forked copy of a process with gRPC's threads, so the child is spawned as this program first. Every
restart waits for it: run as a file, without site, it takes 10 ms, and as a module of our package it took 40.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def command(module: str, *args: str) -> list[str]:
    """The command line of `python -m MODULE ARG...` as a child of this process that dies with it."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), module, *args]


def main() -> None:
    """Ask for SIGKILL at the parent's death, then exec."""
    parent, module, *args = sys.argv[1:]
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        sys.exit("pagekeeper: the kernel refuses PR_SET_PDEATHSIG")
    if os.getppid() != int(parent):  # it died before we asked
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", module, *args])  # noqa: S606 - no shell is the point


if __name__ == "__main__":
    main()
