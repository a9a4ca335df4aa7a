"""The bodies of POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter, as vLLM has them."""

from typing import Annotated

from pydantic import Field

from llmc.runtime.server.schemas.fields import Fields

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterRequest(Fields, extra="forbid"):
    """A PEFT directory on the server's machine. load_inplace: in the place of the adapter of that name."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(Fields, extra="forbid"):
    """A request to unload an adapter.

    lora_int_id: vLLM's number of the adapter; ignored, because the name identifies it.
    """

    lora_name: _Name
    lora_int_id: int | None = None
