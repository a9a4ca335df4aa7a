"""One step loop for any number of threads: one thread at a time runs steps for all, and the others wait for their
results.

A thread that waits for its requests becomes the leader if there is none. It runs steps until its own requests are done,
wakes other threads whose requests are done after each step, and then hands leadership to a waiting thread. The requests
of all threads therefore share steps. There are no threads other than the callers', and a single caller never waits and
wakes no other thread.

Only the leader touches the loop. Other threads put orders into a queue that the leader empties between steps. Neither
queueing nor trying to lead waits for a lock, so that a finalizer may do both at any moment.

Ctrl-C may come at any moment too, in the leader's Python code as in its step. Then the loop goes on if it is whole, and
otherwise another takes its place and all that is in flight ends with an error: no thread hangs or gets a wrong answer.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import RLock, get_ident

from llmc.errors import LlmcError, RequestError, UnavailableError
from llmc.runtime.loop.step_loop import StepLoop, step_failure
from llmc.runtime.requests.boundary import attempt
from llmc.runtime.requests.request import Origin, Request

Ready = Callable[[], bool]
Until = Callable[[Ready], None]
# A thread that was interrupted while leading may have woken no other thread. Waiting threads therefore check
# periodically.
_LOOK_SECONDS = 0.5


class SharedLoop:
    """Runs the requests of every thread in one StepLoop, `loop`. obstacle: the error that all callers get if it cannot
    run."""

    def __init__(self, loop: StepLoop, obstacle: LlmcError | None = None) -> None:
        self.loop = loop
        # Held by the leader. It knows its holder, so that a thread that an exception interrupted can release it at any
        # point.
        self._turn = RLock()
        self._leader: int | None = None
        # Threads that wait or lead. A finalizer that runs in one of them must not touch the loop.
        self._inside: set[int] = set()
        self._wishes: deque[Callable[[], None]] = deque()
        self._waiters: list[_Waiter] = []
        self._refusal: Callable[[], LlmcError] | None = None if obstacle is None else lambda: obstacle
        # The refusal of all callers but the one that has claimed the loop.
        self._claim: Callable[[], RequestError] | None = None
        self._is_closed = False

    @contextmanager
    def serving(self, requests: Sequence[Request]) -> Iterator[Until]:
        """Queue the requests, and drop all sequences of these clients' requests in the end.

        Gives a function that steps, or waits while another thread does, until the given function returns True; any
        thread may call it, between steps. Raises RequestError when the loop is closed or claimed, also meanwhile, or if
        that function raises; UnavailableError if another thread's step was broken off at a bad moment, and
        EngineFailureError if a step of this thread has failed.
        """
        loop = self.loop
        self._check(loop)
        self._wishes.append(partial(self._add, loop, requests))
        try:
            yield partial(self._until, loop)
        finally:
            self._wishes.append(partial(self._drop, loop, [request.origin for request in requests]))
            self._tend()

    def close(self, refusal: Callable[[], LlmcError]) -> bool:
        """Refuse all waiting and later calls with this error. When this returns, no step runs any more.

        Returns whether it was open. Raises RequestError while the loop is claimed.
        """
        self._check_outside()
        if self._claim is not None:
            raise self._claim()
        if self._is_closed:
            return False
        self._is_closed = True
        self._refusal = refusal  # The leader sees it after its step.
        with self._turn:
            self._wake_all()
        return True

    def claim(self, refusal: Callable[[], RequestError] | None = None) -> StepLoop:
        """Take the loop, to step it alone until `unclaim`. Raises RequestError if it is in use, or closed.

        refusal: The error that others get meanwhile; the default says that the loop belongs to an AsyncEngine.
        """
        self._check_outside()
        with self._turn:
            self._check(self.loop)
            self._grant()
            if not self.loop.scheduler.idle:
                raise RequestError("the engine has requests in flight", fix="wait until they finish, and close streams")
            self._refusal = self._claim = refusal or _claimed
            self._wake_all()
            return self.loop

    def renew(self, loop: StepLoop | None = None) -> StepLoop:
        """Replace the loop, in the thread that has claimed it, by default with one of the same executor, whose cache is
        lost."""
        self.loop = self.loop.renewed() if loop is None else loop
        return self.loop

    def unclaim(self) -> None:
        """The loop may be shared again. If it is not claimed, nothing happens."""
        if self._claim is not None:
            self._refusal = self._claim = None

    def _until(self, loop: StepLoop, ready: Ready) -> None:
        self._check_outside()
        try:
            self._take_part(loop, ready)
        finally:
            self._let_go()

    def _take_part(self, loop: StepLoop, ready: Ready) -> None:
        waiter: _Waiter | None = None
        try:
            self._inside.add(get_ident())
            while waiter is None or not waiter.is_done:
                if self._turn.acquire(blocking=False):
                    self._lead(loop, ready, waiter)
                    return
                if waiter is None:
                    waiter = _Waiter(ready)
                    # Then try once more: the leader may have left before it could see this.
                    self._wishes.append(partial(self._waiters.append, waiter))
                else:
                    self._check(loop)
                    with suppress(Empty):
                        waiter.woken.get(timeout=_LOOK_SECONDS)
            waiter.check()
        finally:
            if waiter is not None and not waiter.is_done:
                self._wishes.append(partial(self._forget, waiter))
            if self._leader == get_ident():
                self._hand_over()
            self._inside.discard(get_ident())

    def _lead(self, loop: StepLoop, ready: Ready, waiter: "_Waiter | None") -> None:
        self._leader = get_ident()
        self._check(loop)
        self._grant()
        if waiter is not None:
            self._forget(waiter)
            if waiter.is_done:
                return waiter.check()
        while not (outcome := attempt(ready)):
            self._step()
            if self._waiters:
                self._tell()
            if self._wishes:
                self._grant()
            self._check(loop)
        if isinstance(outcome, RequestError):
            raise outcome

    def _step(self) -> None:
        try:
            self.loop.step()
        except BaseException as error:
            if not self.loop.recover():
                self.loop = self.loop.renewed()
            if isinstance(error, LlmcError) or not isinstance(error, Exception):
                raise
            raise step_failure(error) from error

    def _tell(self) -> None:
        """Wake those who have what they wait for."""
        try:
            for waiter in self._waiters.copy():
                if outcome := attempt(waiter.ready):
                    waiter.error = outcome if isinstance(outcome, RequestError) else None
                    waiter.is_done = True
                    self._waiters.remove(waiter)
                    waiter.woken.put(None)
        except BaseException:
            self.loop = self.loop.renewed()
            raise

    def _grant(self) -> None:
        try:
            while self._wishes:
                self._wishes.popleft()()
        except BaseException:
            self.loop = self.loop.renewed()
            raise

    def _hand_over(self) -> None:
        """End the turn; one of those that wait leads on."""
        while True:
            self._leader = None
            heir = self._waiters[0] if self._waiters else None
            self._turn.release()
            # A thread that queued an order since the last check and could not lead relies on this.
            if not self._wishes or self._refusal is not None or not self._turn.acquire(blocking=False):
                break
            self._leader = get_ident()
            self._grant()
        if heir is not None:
            heir.woken.put(None)

    def _let_go(self) -> None:
        """Give up the turn, whatever happened before."""
        with suppress(RuntimeError):
            while True:
                self._turn.release()
        if self._leader == get_ident():
            self._leader = None
        self._inside.discard(get_ident())

    def _tend(self) -> None:
        """Execute queued orders, unless there is a leader, which will do so, or the loop is closed."""
        if get_ident() in self._inside or self._refusal is not None:
            return
        try:
            self._inside.add(get_ident())
            if self._turn.acquire(blocking=False):
                self._leader = get_ident()
                self._grant()
                self._hand_over()
            self._inside.discard(get_ident())
        finally:
            self._let_go()

    def _wake_all(self) -> None:
        """Wake waiting threads, which then raise the refusal. Needs the turn; later callers see the refusal before they
        wait."""
        self._grant()
        for waiter in self._waiters:
            waiter.woken.put(None)

    def _add(self, loop: StepLoop, requests: Sequence[Request]) -> None:
        if loop is self.loop and self._refusal is None:
            for request in requests:
                loop.add(request)

    def _drop(self, loop: StepLoop, leaving: Sequence[Origin]) -> None:
        if loop is self.loop:
            for origin in leaving:
                loop.drop(origin)

    def _forget(self, waiter: "_Waiter") -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _check(self, loop: StepLoop) -> None:
        """Raise why requests of that loop cannot go on."""
        if self._refusal is not None:
            raise self._refusal()
        if loop is not self.loop:
            raise UnavailableError(
                "a step was interrupted in another thread, which ended this request", fix="ask again"
            )

    def _check_outside(self) -> None:
        if get_ident() in self._inside:
            raise RequestError(
                "the engine was called from inside one of its own steps", fix="call it when the step is over"
            )


@dataclass(eq=False)
class _Waiter:
    """A thread that waits until `ready`. woken: gets an entry when that is so, and when it may have to lead. error:
    what `ready` has raised instead."""

    ready: Ready
    woken: SimpleQueue[None] = field(default_factory=SimpleQueue)
    is_done: bool = False
    error: RequestError | None = None

    def check(self) -> None:
        """Raise the error."""
        if self.error is not None:
            raise self.error


def _claimed() -> RequestError:
    return RequestError("the engine belongs to an AsyncEngine", fix="use that one, or load the engine a second time")
