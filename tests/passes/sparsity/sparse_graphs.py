"""Run the passes of sparsity over a tiny Llama and look at what they made."""

from __future__ import annotations

from typing import Any

from llmc.passes.pipeline import canonical, default
from llmc.passes.runner import PipelineResult
from tests.passes.quantization.quantizing import quantized


def sparse(sparsity: str, quantize: str = "", **options: Any) -> PipelineResult:
    """The graph after every pass that follows the canonical ones."""
    return quantized(quantize, passes=default()[len(canonical()) :], sparsity=sparsity, **options)


def sparse_canonical(sparsity: str, quantize: str = "", **options: Any) -> PipelineResult:
    """After the passes that make zeros and codes."""
    return quantized(quantize, sparsity=sparsity, **options)
