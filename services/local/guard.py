"""How does a child end when its parent is killed?

Run as a script between fork and exec: it asks the kernel for a SIGTERM at the parent's death, then becomes the command.

Why so, and not otherwise: code between fork and exec in the parent (preexec_fn) may deadlock once it has threads; a
pipe that the child watches needs the child's help, and the NATS server is not ours. The request survives exec, works
for any program, and costs the few milliseconds of an interpreter without site-packages. SIGTERM and not SIGKILL: an
orphan then drains, closes its files and removes its shared memory as it would have anyway.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it died before we asked
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - the whole purpose; the command is the launcher's own


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
