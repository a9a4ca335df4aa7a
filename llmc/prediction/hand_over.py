"""The time of a transfer of rows from a stage on a GPU to the next stage, on another GPU of the machine."""

from llmc.targets.links import PCIE_4, SHARED_MEMORY


def hand_over_seconds(nbytes: float) -> float:
    """Return the predicted seconds: a copy to pinned memory, one into memory that both processes share, and a copy to
    the next device. nbytes: bytes of the rows."""
    return 2 * PCIE_4.send(nbytes) + SHARED_MEMORY.send(nbytes)
