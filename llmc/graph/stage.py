"""The stages that a graph goes through; graph/verify.py says what is legal at each."""

from enum import Enum


class Stage(Enum):
    """The stages of a graph. captured: aten, as torch.export returns it. canonical: llmc:: ops and a short list of
    aten. serving: paged attention, metadata inputs, logits of requested rows. optimized: fused. lowered: chosen
    kernels."""

    CAPTURED = "captured"
    CANONICAL = "canonical"
    SERVING = "serving"
    OPTIMIZED = "optimized"
    LOWERED = "lowered"
