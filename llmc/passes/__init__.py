"""The passes: pipeline.py lists them in order; each other file is one pass, or a part of how passes are run."""

import llmc.ops  # noqa: F401  (registers the ops that passes name when they are defined)
