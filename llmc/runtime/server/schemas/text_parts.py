"""A message's content: text, whole or in parts. Images, audio and files are refused in plain words."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from llmc.runtime.server.schemas.fields import Fields

# pydantic's type of the error, whose message is shown as it is.
TEXT_ONLY = "text_only"
_KINDS = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "image_embeds": "images",
    "image_pil": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "audio",
    "video_url": "videos",
    "video": "videos",
    "file": "files",
    "input_file": "files",
}


class TextPart(Fields, extra="ignore"):
    """A part of a message's content; only text is taken. The three types are chat's and those of /v1/responses."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Fields, extra="ignore"):
    """An assistant's refusal in place of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The refusal's words."""
        return self.refusal


def refuse_media(content: Any) -> Any:
    """Raise for a part that is not text, before the parts are parsed as text."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _KINDS:
            raise PydanticCustomError(
                TEXT_ONLY,
                "this engine reads text only, no {what}: the request has a part of type {type}",
                {"what": _KINDS[kind], "type": kind},
            )
    return content


def refuse_audio(modalities: Any) -> Any:
    """Raise for outputs other than text."""
    if isinstance(modalities, list) and any(isinstance(m, str) and m != "text" for m in modalities):
        raise PydanticCustomError(
            TEXT_ONLY, "this engine writes text only: modalities is {given}", {"given": f"{modalities!r:.80}"}
        )
    return modalities


Content = Annotated[str | list[TextPart | RefusalPart], BeforeValidator(refuse_media)]


def text_of(content: str | list[TextPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
