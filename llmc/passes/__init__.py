"""The passes: pipeline.py lists them in order; each other file is one pass, or a part of how passes are run."""

import llmc.ops  # noqa: F401  (registers the ops that passes name when they are defined)
from llmc.graph.refusal import Refusal, Refused
from llmc.passes.match import Match
from llmc.passes.pattern import Weight, either
from llmc.passes.pipeline import default, extended
from llmc.passes.rewrite import GraphPass, Numerics, Pass, Rewrite
from llmc.passes.rewrite_log import RewriteLog

__all__ = [
    "GraphPass",
    "Match",
    "Numerics",
    "Pass",
    "Refusal",
    "Refused",
    "Rewrite",
    "RewriteLog",
    "Weight",
    "default",
    "either",
    "extended",
]
