"""The passes: pipeline.py lists them in order; each other file is one pass, or a part of how passes are run."""

import llmc.ops  # noqa: F401  (registers the ops that passes name when they are defined)
from llmc.graph.refusal import Refusal
from llmc.passes.pipeline import default
from llmc.passes.rewrite import GraphPass, Numerics, Pass, Rewrite

__all__ = ["GraphPass", "Numerics", "Pass", "Refusal", "Rewrite", "default"]
