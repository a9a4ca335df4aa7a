"""The ids of tool calls."""

import secrets
import string
import uuid
from collections.abc import Callable

from llmc.runtime.server.tool_calls.form import ToolForm

_CHARACTERS = string.ascii_letters + string.digits
_SHORT = 9


def new_identity(form: ToolForm) -> Callable[[], str]:
    """Return a function that makes ids for calls to which the model gave none, in the form of its chat templates."""
    return _short if form.short_ids else _usual


def _usual() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _short() -> str:
    return "".join(secrets.choice(_CHARACTERS) for _ in range(_SHORT))
