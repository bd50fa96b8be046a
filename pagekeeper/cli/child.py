"""`python -m pagekeeper.cli.child PARENT MODULE ARG...` becomes `python -m MODULE ARG...` that dies with PARENT.

The kernel's death signal survives exec but has to be asked for by the child itself. Asking between fork and exec would
run Python in a forked copy of a process with gRPC's threads, so the child is spawned as this program first.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
