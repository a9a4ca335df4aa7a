"""The socket that a server listens on: a port, or a Unix socket that replaces one whose server has ended."""

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.errors import OptionError
from llmc.runtime.server.options import ServeOptions

_PROBE_SECONDS = 5.0


@contextmanager
def listen(options: ServeOptions) -> Iterator[socket.socket]:
    """A bound socket until the block ends. Raises OptionError for an address that cannot be listened on.

    To be entered before anything is loaded: a port that is taken is known at once.
    """
    if options.uds is None:
        with _port(options.host, options.port) as listener:
            yield listener
        return
    listener = _unix_socket(options.uds)
    ours = options.uds.stat()
    with listener:
        try:
            yield listener
        finally:
            _remove(options.uds, ours)


def address_of(listener: socket.socket, options: ServeOptions) -> str:
    """The URL of a listening socket."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _port(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OptionError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            at=f"--host {host} --port {port}",
            fix="choose another port (--port 0 takes a free one), or an address of this machine",
        ) from None
    return listener


def _unix_socket(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        # Two servers that start at once must not both replace what a third has left.
        with _locked(path.parent):
            if path.exists() or path.is_symlink():
                _check_stale(path)
                path.unlink()
            listener.bind(str(path))
            # Immediately, so that later checks find the server alive even while the engine is being loaded.
            listener.listen()
    except OSError as error:
        listener.close()
        raise _refused(path, str(error.strerror or error), "name a path in a directory that you may write") from None
    except OptionError:
        listener.close()
        raise
    return listener


def _check_stale(path: Path) -> None:
    """Raise OptionError unless the path is a stale socket, on which no process listens."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise _refused(path, "the path is a file that is not a socket", "remove the file, or name another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except TimeoutError:
            pass  # A process listens but does not answer.
    raise _refused(path, "another server listens on it", "end that server, or name another path")


def _refused(path: Path, reason: str, fix: str) -> OptionError:
    return OptionError(f"cannot listen on {path}: {reason}", at=f"--uds {path}", fix=fix)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove(path: Path, ours: os.stat_result) -> None:
    """Remove the socket, unless another process has replaced it."""
    try:
        current = path.lstat()
        if (current.st_dev, current.st_ino) == (ours.st_dev, ours.st_ino):
            path.unlink()
    except OSError:
        return
