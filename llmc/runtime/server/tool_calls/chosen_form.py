"""The form of tool calls that a server reads: the requested one, else the one that the model's chat template
teaches."""

import re
from dataclasses import dataclass

from llmc.errors import OptionError, did_you_mean
from llmc.runtime.server.tool_calls.form import ToolForm
from llmc.runtime.server.tool_calls.known_forms import FORMS, NAMES, form_of_template

_USUAL = "hermes"


@dataclass(frozen=True)
class ChosenForm:
    """The form of tool calls, and how it was chosen. is_known: the option or the template names the form, or no
    template shows tools to the model. is_taught: the template teaches the form, and the option names no other."""

    form: ToolForm
    is_known: bool
    is_taught: bool = False


def chosen_form(parser: str | None, template: str) -> ChosenForm:
    """Choose the form in which the model writes tool calls.

    parser: the value of --tool-call-parser; None takes the template's form. Raises OptionError for an unknown
    name.
    """
    if parser is None:
        form = form_of_template(template)
        shows_tools = re.search(r"\btools\b", template) is not None
        return ChosenForm(form or FORMS[_USUAL], form is not None or not shows_tools, form is not None)
    if parser not in NAMES:
        raise OptionError(
            f"--tool-call-parser cannot be {parser!r}",
            at="--tool-call-parser",
            fix=f"{did_you_mean(parser, NAMES)}give one of {', '.join(FORMS)}",
        )
    return ChosenForm(NAMES[parser], is_known=True)
