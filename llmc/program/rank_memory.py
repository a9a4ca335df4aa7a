"""What lies where in the memory that each of several GPUs has for the others: kernels and executors agree on it here.

    words   the number of the last exchange; programs that have ended; whether a rank was lost: int32
    flags   [MOST_PROGRAMS, ranks], int32: to which exchange each rank has come with each program's values
    places  two, of PLACE_BYTES each: the values themselves, in turn, so that a rank that is an exchange ahead
            overwrites nothing that another still reads

A step's operand `engine:ranks` is on a GPU [1 + ranks], int64: this rank's number, then the address of each one's.
"""

FLAGS = 128
MOST_PROGRAMS = 512
# More than this the library moves faster: every rank reads all that the others have.
PLACE_BYTES = 512 << 10
LOST_WORD = 2


def places_at(ranks: int) -> int:
    """Where the places begin, in bytes."""
    return FLAGS + -(-MOST_PROGRAMS * ranks * 4 // 128) * 128


def memory_bytes(ranks: int) -> int:
    """Of one rank."""
    return places_at(ranks) + 2 * PLACE_BYTES
