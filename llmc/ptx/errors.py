"""What is wrong with PTX that the machine is given."""

from llmc.errors import LlmcError


class PtxError(LlmcError):
    """PTX that cannot be read, is for another machine, or does not end; or a launch that does not fit its kernel."""
