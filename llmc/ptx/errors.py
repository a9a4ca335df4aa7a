"""Errors in PTX given to the machine."""

from llmc.errors import LlmcError


class PtxError(LlmcError):
    """PTX that cannot be read, is for another machine, or does not end; or a launch that does not fit its kernel."""
