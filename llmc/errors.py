"""The errors that llmc raises for broken input: the problem, where it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike


class LlmcError(Exception):
    """Input that llmc cannot work with.

    The command line prints a line for each argument and exits with `exit_code`.

    Args:
        problem: The problem, with the actual values.
        at: The file, option, node or source line where it is.
        fix: How the user can fix it.
    """

    exit_code = 2

    def __init__(self, problem: str, *, at: str | PathLike[str] | None = None, fix: str | None = None) -> None:
        self.problem = problem
        self.at = None if at is None else str(at)
        self.fix = fix
        lines = [problem]
        if self.at is not None:
            lines.append(f"  at:  {self.at}")
        if fix is not None:
            lines.append(f"  fix: {fix}")
        super().__init__("\n".join(lines))


class BuildWarning(UserWarning):
    """A warning about an unexpected decision of a build, or about the model. The engine is still built."""


class LoadWarning(UserWarning):
    """A warning that an engine satisfies a requested option only in part. It is still loaded."""


class RequestWarning(UserWarning):
    """A warning that an answer is not guaranteed to satisfy a part of its request."""


class OptionError(LlmcError):
    """A build or run option that does not exist, or whose value is out of range."""


class TargetError(LlmcError):
    """A target that is unknown, or that this machine cannot build for or run."""


class CheckpointError(LlmcError):
    """A model directory or weight file that is missing, truncated, corrupt or of an unknown kind."""


class AdapterError(LlmcError):
    """A LoRA adapter that is missing, corrupt, of an unsupported kind, or made for another model."""


class CaptureError(LlmcError):
    """A model that torch.export could not trace, or whose inputs and outputs are not a language model's."""


class PassError(LlmcError):
    """A pass that broke the graph's rules, or a contract that the pipeline could not reach."""


class LoweringError(LlmcError):
    """An operation for which the target has no kernel."""


class ToolchainError(LlmcError):
    """A compiler that is missing or that failed."""


class EngineFormatError(LlmcError):
    """An engine directory that is incomplete, corrupt, or of another format version."""


class RankError(LlmcError):
    """A process of an engine of several ranks that did not start, or was lost.

    Args:
        problem: As in LlmcError.
        at: As in LlmcError.
        fix: As in LlmcError.
        rank: The rank's number; None if it is not known.
    """

    def __init__(
        self, problem: str, *, at: str | PathLike[str] | None = None, fix: str | None = None, rank: int | None = None
    ) -> None:
        super().__init__(problem, at=at, fix=fix)
        self.rank = rank


class EngineFailureError(LlmcError):
    """A step of an engine that failed for all requests in it: its executor, or the loop itself."""

    exit_code = 3


class RequestError(LlmcError):
    """A request that the engine cannot serve: prompt too long, token id out of range, bad sampling parameter."""


class ContextLengthError(RequestError):
    """A prompt that is too long for the engine, alone or together with the requested output."""


class UnavailableError(RequestError):
    """The engine accepts no requests now: it is draining, closed, or its loop has died."""


class RequestFaultError(RequestError):
    """An unexpected exception during the work for this request alone; the exception is the cause."""


class ModelFailureError(RequestError):
    """The model computed logits that are not finite for this request."""


def words_of(error: BaseException, most: int = 200) -> str:
    """Return the message of an exception, on one line.

    Args:
        error: The exception.
        most: Maximum number of characters.

    Returns:
        The message; empty if formatting it fails.
    """
    try:
        text = error.problem if isinstance(error, LlmcError) else str(error)
        # Half of a surrogate pair could not be printed.
        printable = text[: 4 * most].encode(errors="backslashreplace").decode()
        return " ".join(printable.split())[:most]
    except BaseException:  # Also __str__ may be a user's.
        return ""


def bad_value(name: str, value: object, fix: str) -> OptionError:
    """Return the error for a keyword argument with an invalid value.

    Args:
        name: The argument's name.
        value: Its value.
        fix: The advice for the user.

    Returns:
        The error, to be raised.
    """
    return OptionError(f"{name} cannot be {value!r}", at=f"{name}={value!r}", fix=fix)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the start of a fix for an unknown name.

    Args:
        name: The unknown name.
        known: The known names.

    Returns:
        A question with the most similar known name; empty if none is similar.
    """
    import difflib  # Here, because few processes come to need it.

    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
