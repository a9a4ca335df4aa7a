"""Check what build options name, before a model is read: passes, calibration data and adapters.

A large model takes minutes to reach the pass that would miss them.
"""

from collections.abc import Sequence
from pathlib import Path

from llmc.adapters.adapter import read_adapter
from llmc.options import BuildOptions
from llmc.passes.attention.compress_kv_cache import asked_policy
from llmc.passes.quantization.calibration import check_text_is_given, needs_text, read_calibration
from llmc.passes.rewrite import Pass
from llmc.passes.runner import check_passes


def check_named_inputs(passes: Sequence[Pass], options: BuildOptions) -> None:
    """Check that the passes and files that the options name exist and can be read.

    Args:
        passes: The pipeline; options.disable_passes names some of them.
        options: The options of a build, or of a command that runs the passes.

    Raises:
        OptionError: For an unknown pass, for a KV compression that does not exist, and for calibration data that is
            missing or cannot be read.
        AdapterError: For an adapter that is missing or cannot be read.
    """
    check_passes(passes, options)
    asked_policy(options)
    if options.calibration is not None:
        read_calibration(Path(options.calibration))
    for directory in options.adapters.values():
        read_adapter(directory)


def check_build_inputs(passes: Sequence[Pass], options: BuildOptions) -> None:
    """Check the named passes and files of a build, and that it has the calibration text that its schemes need.

    Raises:
        OptionError: Also if a scheme needs activations and no text is given.
        AdapterError: As for `check_named_inputs`.
    """
    check_named_inputs(passes, options)
    running = {pass_.name for pass_ in passes} - set(options.disable_passes)
    if "check_quantizable" in running and needs_text(options):
        check_text_is_given(options)
