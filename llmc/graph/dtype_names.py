"""The names of each dtype in safetensors, engines, options and messages.

How many bytes an element takes is in llmc/program/program.py, for the parts that have no torch.
"""

import torch

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_name(dtype: torch.dtype) -> str:
    """The name in torch and in build options, such as float32."""
    return str(dtype).removeprefix("torch.")


# By what torch and build options call them.
NAMED_DTYPES = {torch_name(dtype): dtype for dtype in TORCH_DTYPES.values()}
