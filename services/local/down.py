"""How is a suite ended so that nothing of it is left, and nothing else is touched?"""

import signal

from services.local import starting, state
from services.local.home import Home
from services.local.plan import CLOSE_SECONDS, DRAIN_SECONDS, STOP_ORDER

TOLD_SECONDS = 2.0
# The supervisor gives every wave its drain; a healthy suite takes a second or two.
SUPERVISOR_SECONDS = len(STOP_ORDER) * (DRAIN_SECONDS + CLOSE_SECONDS) + 5.0

GIVE_UP = signal.SIGUSR1
"""Tells `fathom up` that it is ended by `fathom down`, and not by whoever sends it a SIGTERM."""
STOPPING = f"stopping: waiting up to {DRAIN_SECONDS:.0f} s for running answers"


def end_start(home: Home) -> None:
    """Tell a `fathom up` that is still starting here to give up, and return once it has: it cleans up by itself."""
    begun = starting.read(home)
    if begun is None:
        return
    begun.command.send(GIVE_UP)
    for stuck in state.wait_ended([begun.command], SUPERVISOR_SECONDS):
        stuck.send(signal.SIGKILL)


def end(home: Home, *, told_seconds: float = TOLD_SECONDS) -> int:
    """Return once every process of the recorded suite has ended: how many there were, beside the supervisor.

    Only processes whose pid and creation time are the recorded ones are touched, so a state file left by a machine that
    was switched off harms no one. told_seconds: wait for children that learn of their supervisor's death by themselves.
    """
    suite = state.read(home.state)
    if suite is None:
        return 0
    running = suite.left_running()
    if suite.supervisor.process() is not None:
        suite.supervisor.send(signal.SIGTERM)
        for stuck in state.wait_ended([suite.supervisor], SUPERVISOR_SECONDS):
            stuck.send(signal.SIGKILL)
        suite = state.read(home.state) or suite  # it may have restarted one in between
    # A supervisor's death has told its children to stop; telling a service twice would cut its stopping short.
    left = state.wait_ended(suite.left_running(), told_seconds)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for identity in left:
            identity.send(number)
        left = state.wait_ended(left, DRAIN_SECONDS + CLOSE_SECONDS)
    if running:
        # Imported late: it brings the messages and grpc along, which no other command waits for.
        from services.chassis.handoff import SHM_ROOT, remove_dead_folders

        remove_dead_folders(SHM_ROOT)  # of a decode replica that had to be killed
    return len([identity for identity in running if identity != suite.supervisor])
