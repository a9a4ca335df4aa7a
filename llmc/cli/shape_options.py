"""The shape of a benchmark's prompts, as options."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from llmc.bench.prompts import PromptShape


@dataclass(frozen=True, kw_only=True)
class ShapeOptions(PromptShape):
    """A shape as it is given on the command line."""

    input_len: Annotated[int, Option(help="tokens of a prompt, without its shared prefix")] = 256
    output_len: Annotated[int, Option(help="tokens to generate for each")] = 128
    range_ratio: Annotated[float, Option(help="lengths vary by this share up and down")] = 0.0
    prefix_len: Annotated[int, Option(help="tokens that the prompts of a group share")] = 0
    prefix_groups: Annotated[int, Option(help="how many groups")] = 1
