"""The output forms of a server's model: the chat template, and the forms of tool calls and of thoughts."""

from dataclasses import dataclass, replace

from llmc.engine_format import engine_files
from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.thinking import CHANNELS, ThinkTags, think_tags
from llmc.runtime.server.tool_calls.chosen_form import ChosenForm, chosen_form
from llmc.runtime.text.chat_template import ChatTemplate, engine_template, named_template

UNKNOWN_FORM = (
    "the chat template has tools, but teaches no form of tool calls that is known: calls are read as those of hermes, "
    "and come as text if they are not; --tool-call-parser NAME sets the form"
)


@dataclass(frozen=True)
class ModelForms:
    """The template and the forms of calls and thoughts of a model. template: None if the model has none. think_tags:
    None for a model that does not think."""

    template: ChatTemplate | None
    tools: ChosenForm
    think_tags: ThinkTags | None

    def described(self) -> str:
        """A one-line description, printed at the start of the server."""
        thoughts = "none" if self.think_tags is None else f"{self.think_tags.opening} … {self.think_tags.closing}"
        return f"tool calls  {self.tools.form.name}    thoughts  {thoughts}"


def model_forms(options: ServeOptions) -> ModelForms:
    """Return the forms that the options name, or those of the model's template. Raises OptionError for unknown
    names."""
    files = engine_files(options.engine)
    template = engine_template(files)
    if options.chat_template is not None:
        template = named_template(options.chat_template, files)
    tools = chosen_form(options.tool_call_parser, "" if template is None else template.tool_source)
    source = "" if template is None else template.source
    if template is not None and not tools.is_taught:
        template = replace(template, call_example=tools.form.example)
    thinks = CHANNELS if tools.form.channels else think_tags(options.reasoning_parser, source)
    return ModelForms(template, tools, thinks)
