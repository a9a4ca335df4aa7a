"""The shape of a benchmark's prompts, as options."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from llmc.bench.prompts import PromptShape


@dataclass(frozen=True, kw_only=True)
class ShapeOptions(PromptShape):
    """The options as given on the command line."""

    input_len: Annotated[int, Option(help="tokens per prompt, without its shared prefix")] = 256
    output_len: Annotated[int, Option(help="tokens to generate per prompt")] = 128
    range_ratio: Annotated[float, Option(help="share by which lengths vary, up and down")] = 0.0
    prefix_len: Annotated[int, Option(help="tokens that the prompts of a group share")] = 0
    prefix_groups: Annotated[int, Option(help="number of groups with a shared prefix")] = 1
