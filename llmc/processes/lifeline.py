"""A pipe that ends a worker together with the process that started it, however that one ended.

The kernel tells the worker, so it also ends in the middle of a computation. A parent-death signal (PR_SET_PDEATHSIG)
would come already when the *thread* that started it ends, and workers outlive those of their callers.
"""

import fcntl
import os
import select
import signal


class Lifeline:
    """The starter's side: pass `worker_end` on (pass_fds, and its number as an argument), then call `started`.

    As long as this object lives and is not closed, and its process lives, so may the worker.
    """

    def __init__(self) -> None:
        self.worker_end, held = os.pipe()
        self._held = os.fdopen(held, "wb", buffering=0)

    def started(self) -> None:
        """Close this process's copy of the worker's end, after the worker was started or could not be."""
        os.close(self.worker_end)

    def close(self) -> None:
        """End the worker, if it has not ended."""
        self._held.close()


def end_with(worker_end: int) -> None:
    """The worker's side: from now on this process ends when the lifeline does, with its group if it leads one."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)  # Which ends a process.
    leads = os.getpgrp() == os.getpid()
    fcntl.fcntl(worker_end, fcntl.F_SETOWN, -os.getpid() if leads else os.getpid())
    fcntl.fcntl(worker_end, fcntl.F_SETFL, fcntl.fcntl(worker_end, fcntl.F_GETFL) | os.O_ASYNC)
    # It may have ended before.
    if select.select([worker_end], [], [], 0)[0]:
        os.kill(os.getpid(), signal.SIGIO)
