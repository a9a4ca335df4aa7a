"""The error for a row whose largest logit is not a number."""

import math

from llmc.errors import ModelFailureError

_ADVICE = {
    "float16": "fp16 ends at 65504, which activations may pass: build with dtype=bfloat16 or dtype=float32; if that is "
    "no better, look for NaN and infinity in the checkpoint's weights",
    "bfloat16": "bf16 reaches as far as fp32: look for NaN and infinity in the checkpoint's weights, and build with "
    "dtype=float32 to see whether rounding is to blame",
    "float32": "there is no wider dtype to build with: look for NaN and infinity in the checkpoint's weights, and try "
    "the model where it comes from with the same prompt",
}


def check_finite(token: int, logit: float, dtype: str) -> None:
    """Raise ModelFailureError if the largest logit is not a number. dtype: the engine's, as torch spells it."""
    if not math.isfinite(logit):
        raise unusable_logits(token, logit, dtype)


def unusable_logits(token: int, logit: float, dtype: str) -> ModelFailureError:
    """The error for a row whose largest logit, at that token id, is NaN or infinite."""
    if math.isnan(logit):
        seen = f"they hold NaN (not a number), the first at token id {token}"
    elif logit > 0:
        seen = f"they overflow, to +inf at token id {token}"
    else:
        seen = "all of them are -inf"
    return ModelFailureError(
        f"the model gave no usable logits in {dtype}: {seen}", fix=_ADVICE.get(dtype, _ADVICE["float32"])
    )
