"""The boundary between the engine's loop and the work for one request: no exception from inside passes it.

Behind it run samplers, grammars, edits, stop strings, drafts, beams, decoded texts, adapters and users' functions. The
loop calls all of them by `attempt`, so that whatever is raised there is the error of that request, and the loop goes
on. The scheduler and the executor run on this side. They belong to all requests, and their exceptions end the step.
"""

from asyncio import CancelledError
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import TypeVar, TypeVarTuple

from llmc.errors import LlmcError, RequestError, RequestFaultError, words_of

Given = TypeVarTuple("Given")
Found = TypeVar("Found")
Name = TypeVar("Name", bound=Hashable)
# Exceptions that end a task or a process are meant for the caller's thread and are not faults.
_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit, CancelledError)


def attempt(work: Callable[[*Given], Found], *given: *Given) -> Found | RequestError:
    """The result of the work, or the error that ends its request.

    Libraries written in Rust raise panics that are not an Exception, so everything is caught. Only Ctrl-C passes.
    """
    try:
        return work(*given)
    except BaseException as error:
        return fault(error)


def attempts(work: Callable[[*Given], Found], rows: Iterable[tuple[*Given]]) -> list[Found | RequestError]:
    """Call `attempt` for each row of arguments, one request per row. Errors of the iterable itself are raised."""
    return [attempt(work, *row) for row in rows]


def errors(names: Iterable[Name], outcomes: Iterable[object]) -> dict[Name, RequestError]:
    """The errors among the results of `attempts`, by the names at the same places."""
    return {name: outcome for name, outcome in zip(names, outcomes, strict=True) if isinstance(outcome, RequestError)}


@contextmanager
def as_llmc_error() -> Iterator[None]:
    """Turn every exception inside into an LlmcError, in a caller's own thread."""
    try:
        yield
    except (LlmcError, *_ENDS):
        raise
    except BaseException as error:
        raise fault(error) from error


def fault(error: BaseException) -> RequestError:
    """The error of a request for which something was raised. Raises Ctrl-C, which only the main thread gets, again."""
    if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
        raise error
    # A class that derives from ours may lack what ours have.
    is_ours = isinstance(error, LlmcError) and all(hasattr(error, name) for name in ("problem", "at", "fix"))
    if is_ours and isinstance(error, RequestError):
        return error
    if is_ours and isinstance(error, LlmcError):
        request_error = RequestFaultError(error.problem, at=error.at, fix=error.fix)
    else:
        reason = words_of(error)
        request_error = RequestFaultError(
            f"{type(error).__name__} was raised while the request was served{': ' * bool(reason)}{reason}",
            fix="see the exception that caused this error; other requests go on",
        )
    request_error.__cause__ = error
    return request_error
