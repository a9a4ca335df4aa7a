"""Ways to store weights that are not read: what each error says, and the command that builds the same otherwise."""

from collections.abc import Mapping
from pathlib import Path

from llmc.errors import CheckpointError

# The scheme of `--quantize` that is nearest to what each method makes of an unquantized model.
NEAREST: Mapping[str, str] = {
    "aqlm": "int4-gptq",
    "bitnet": "int4",
    "bitnet_b1_58": "int4",
    "bitsandbytes": "nf4",
    "eetq": "int8",
    "exl2": "int4-gptq",
    "exl3": "int4-gptq",
    "fp_quant": "mxfp4",
    "gptq": "int4-gptq",
    "higgs": "int4-gptq",
    "hqq": "int4",
    "quanto": "int8",
    "quark": "int8",
    "quip": "int4-gptq",
    "sinq": "int4",
    "spqr": "int4-gptq",
    "torchao": "int8",
    "vptq": "int4-gptq",
}
_OTHERWISE = "int4-gptq"


def unread(seen: str, known: str, file: Path, method: str = "") -> CheckpointError:
    """Return the error for codes that are stored in a way that llmc does not read.

    Args:
        seen: the way in which they are stored.
        known: the way that llmc reads.
        file: the file that says how they are stored.
        method: the method that quantized them, for the advice to quantize again; empty if it is not known.

    Returns:
        The error, for the caller to raise.
    """
    scheme = NEAREST.get(method, _OTHERWISE)
    return CheckpointError(
        f"{seen} is not read",
        at=file,
        fix=f"llmc reads {known}; or build the unquantized model: llmc build MODEL --quantize {scheme}",
    )
