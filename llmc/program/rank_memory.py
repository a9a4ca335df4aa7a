"""The layout of the memory that each GPU shares with the other ranks, for kernels and executors.

    words   number of the last exchange; programs that have ended; whether a rank was lost: int32
    flags   [MOST_PROGRAMS, ranks], int32: the last exchange of each rank's values per program places  two, of
    PLACE_BYTES each: the values, in alternating places, so that a rank that is one exchange ahead does not overwrite
    values that another still reads

A step's operand `engine:ranks` is on a GPU [1 + ranks], int64: this rank's number, then the address of each one's.
"""

FLAGS = 128
MOST_PROGRAMS = 512
# More than this the library moves faster: every rank reads all that the others have.
PLACE_BYTES = 512 << 10
LOST_WORD = 2


def places_at(ranks: int) -> int:
    """Return the offset of the places, in bytes."""
    return FLAGS + -(-MOST_PROGRAMS * ranks * 4 // 128) * 128


def memory_bytes(ranks: int) -> int:
    """Bytes of one rank."""
    return places_at(ranks) + 2 * PLACE_BYTES
