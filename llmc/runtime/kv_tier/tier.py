"""The second tier itself: a bounded number of blocks by key, least recently used first to go.

The thread of the engine's loop puts blocks in and asks for them. It never waits for the store: one thread writes and
removes there, in the order of the calls, and another reads. Until a block is written it is found where it was staged. A
block that is being read, or that a request relies on, stays.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from llmc.runtime.engine_stats import OffloadStats
from llmc.runtime.kv_tier.block_store import BlockKey, BlockStore, DamagedBlockError
from llmc.runtime.memory import Bytes

# Bytes of blocks that wait to be written, which take memory in addition to the tier's size.
STAGED_BYTES = 64 << 20
Content = Callable[[], Bytes]
_log = logging.getLogger("llmc.engine")


@dataclass(eq=False, slots=True)
class _Entry:
    """A block in the tier. pins: how many rely on it. content: gives its bytes until the store has them."""

    nbytes: int
    pins: int = 0
    content: Content | None = None


class Fetch:
    """Blocks on their way out of the tier. found: those that came, by key; complete once `is_done`."""

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self.keys = tuple(keys)
        self.found: dict[BlockKey, Bytes] = {}
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the read is done, or for `seconds`; return whether it is."""
        return self._done.wait(seconds)

    def end(self) -> None:
        """Note that nothing more will come."""
        self._done.set()


class Tier:
    """Blocks in `store`, of at most `max_bytes` including the store's overhead.

    Args:
        block_bytes: size of a block of each group of caches.
        staged_bytes: how much may wait to be written; one block may in any case.
        writer, reader: each runs what it is given in order; by default a thread.
    """

    def __init__(
        self,
        store: BlockStore,
        max_bytes: int,
        block_bytes: Sequence[int],
        *,
        staged_bytes: int = STAGED_BYTES,
        writer: Executor | None = None,
        reader: Executor | None = None,
    ) -> None:
        self._store, self._max_bytes = store, max_bytes
        self.block_bytes = tuple(block_bytes)
        self._staged_limit = staged_bytes
        self._lock = threading.RLock()
        self._entries: dict[BlockKey, _Entry] = {}
        # Entries without pins, least recently used first.
        self._loose: OrderedDict[BlockKey, None] = OrderedDict()
        self._bytes = self._staged = 0
        self._stored = self._loaded = self._dropped = self._damaged = 0
        self._stored_bytes = self._loaded_bytes = 0
        self._told: set[str] = set()
        self._is_open = True
        self._writer = writer or ThreadPoolExecutor(1, "llmc-kv-write")
        self._reader = reader or ThreadPoolExecutor(1, "llmc-kv-read")
        self._find_again()

    @property
    def outlives(self) -> bool:
        """Whether another process may find the blocks."""
        return self._store.outlives

    @property
    def place_blocks(self) -> int:
        """Return the number of places of sequences for which there is room, each with a block of every group."""
        return self._max_bytes // sum(map(self._taken, self.block_bytes))

    def holds(self, key: BlockKey) -> bool:
        """Whether the block is in the tier now. It may be removed before it is read."""
        return key in self._entries

    def wants(self, key: BlockKey) -> bool:
        """Whether `put` would take the block in, as far as is known. A block that is there counts as used now."""
        with self._lock:
            if key in self._loose:
                self._loose.move_to_end(key)
            is_new = key not in self._entries and self._is_open
            if is_new and not self._has_staging_room(key):
                self._dropped += 1
                return False
            return is_new

    def put(self, key: BlockKey, content: Content, *, pinned: bool = False) -> bool:
        """Store a block, evicting the least recently used ones for it. Returns False if it does not fit.

        Args:
            content: gives the block's bytes, to another thread.
            pinned: a request relies on it: it stays until `drop`, and in memory if the store fails.
        """
        with self._lock:
            if not self._is_open or key in self._entries:
                return False
            nbytes = self.block_bytes[key.group]
            if not (pinned or self._has_staging_room(key)) or not self._make_room(nbytes):
                self._dropped += 1
                return False
            entry = self._entries[key] = _Entry(nbytes, int(pinned), content)
            if not pinned:
                self._loose[key] = None
            self._bytes += self._taken(nbytes)
            self._staged += nbytes
            self._submit(self._writer, self._write, key, entry)
            return True

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Remove these blocks; an unknown key is not an error."""
        with self._lock:
            for key in keys:
                if key in self._entries:
                    self._remove(key)

    def fetch(self, keys: Sequence[BlockKey]) -> Fetch:
        """Begin to read these blocks, which stay meanwhile. Absent and damaged blocks do not come."""
        fetch = Fetch(keys)
        with self._lock:
            # The end of a prefix is of less use than its beginning.
            entries = [(key, self._entries[key]) for key in reversed(keys) if key in self._entries]
            for key, entry in entries:
                entry.pins += 1
                self._loose.pop(key, None)
            if not (self._is_open and self._submit(self._reader, self._read_all, fetch, entries[::-1])):
                fetch.end()
        return fetch

    def settle(self) -> None:
        """Wait until all that was put in is written, or was refused by the store."""
        with suppress(RuntimeError):  # It is closed.
            self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what is staged, and end the threads. From then on nothing is kept or found."""
        with self._lock:
            self._is_open = False
        for threads in (self._writer, self._reader):
            threads.shutdown(wait=True)
        self._store.close()

    def stats(self, swapped: int, hits: int) -> OffloadStats:
        """Return the numbers of blocks at this moment. swapped, hits: requests and tokens, counted elsewhere."""
        return OffloadStats(
            max_bytes=self._max_bytes,
            bytes=self._bytes,
            blocks=len(self._entries),
            swapped=swapped,
            hits=hits,
            stored_blocks=self._stored,
            stored_bytes=self._stored_bytes,
            loaded_blocks=self._loaded,
            loaded_bytes=self._loaded_bytes,
            dropped_blocks=self._dropped,
            damaged_blocks=self._damaged,
        )

    def _find_again(self) -> None:
        """Take over the newest blocks that an earlier process has left, as far as there is room."""
        for key, nbytes in self._store.found():
            if key.group >= len(self.block_bytes) or nbytes != self.block_bytes[key.group]:
                self._damaged += 1
                self._tell(f"a block that was left in {self._store.place} is cut off or of another size: it is removed")
                self._submit(self._writer, self._in_store, self._store.remove, key)
            elif self._make_room(nbytes):
                self._entries[key] = _Entry(nbytes)
                self._loose[key] = None
                self._bytes += self._taken(nbytes)

    def _taken(self, nbytes: int) -> int:
        return nbytes + self._store.overhead

    def _has_staging_room(self, key: BlockKey) -> bool:
        return not self._staged or self._staged + self.block_bytes[key.group] <= self._staged_limit

    def _make_room(self, nbytes: int) -> bool:
        """Evict blocks until another one fits. Returns False if too many cannot be evicted."""
        while self._bytes + self._taken(nbytes) > self._max_bytes:
            if not self._loose:
                return False
            self._remove(next(iter(self._loose)))
        return True

    def _remove(self, key: BlockKey) -> None:
        entry = self._entries.pop(key)
        self._loose.pop(key, None)
        self._bytes -= self._taken(entry.nbytes)
        self._unstage(entry)
        self._submit(self._writer, self._in_store, self._store.remove, key)

    def _unstage(self, entry: _Entry) -> None:
        if entry.content is not None:
            entry.content = None
            self._staged -= entry.nbytes

    def _write(self, key: BlockKey, entry: _Entry) -> None:
        """Write one block, in the writing thread, unless it was dropped meanwhile."""
        content = entry.content
        if content is None:
            return
        error: Exception | None = None
        try:
            self._store.write(key, content())
        except Exception as caught:
            error = caught
            self._tell(f"the second tier in {self._store.place} cannot keep blocks: {_words(caught)}")
        with self._lock:
            if self._entries.get(key) is not entry:
                return
            if error is None:
                self._stored += 1
                self._stored_bytes += entry.nbytes
                self._unstage(entry)
            else:
                self._dropped += 1
                if not entry.pins:
                    self._remove(key)

    def _read_all(self, fetch: Fetch, entries: Sequence[tuple[BlockKey, _Entry]]) -> None:
        """Read the blocks of a fetch. Runs in the reading thread."""
        try:
            for key, entry in entries:
                content = self._read(key, entry)
                if content is not None:
                    fetch.found[key] = content
        finally:
            self._let_go(entries)
            fetch.end()
            self._submit(self._writer, self._touch, fetch.found)

    def _let_go(self, entries: Sequence[tuple[BlockKey, _Entry]]) -> None:
        with self._lock:
            for key, entry in reversed(entries):
                entry.pins -= 1
                if not entry.pins and self._entries.get(key) is entry:
                    self._loose[key] = None

    def _read(self, key: BlockKey, entry: _Entry) -> Bytes | None:
        staged = entry.content
        try:
            content = self._store.read(key, entry.nbytes) if staged is None else staged()
        except Exception as error:
            self._note_damage(key, entry, error)
            return None
        with self._lock:
            self._loaded += 1
            self._loaded_bytes += entry.nbytes
        return content

    def _note_damage(self, key: BlockKey, entry: _Entry, error: Exception) -> None:
        with self._lock:
            if self._entries.get(key) is not entry:
                return  # It was evicted while it was read.
            self._damaged += 1
            self._remove(key)
        self._tell(f"a block of the second tier in {self._store.place} is not used: {_words(error)}")

    def _touch(self, keys: Iterable[BlockKey]) -> None:
        """Mark keys as used, in the writing thread: the end of a prefix first, so that it is evicted first."""
        for key in reversed([*keys]):
            self._in_store(self._store.touch, key)

    def _in_store(self, work: Callable[[BlockKey], None], key: BlockKey) -> None:
        """Run work of the store in the writing thread; an error costs at most one block."""
        with suppress(OSError):
            work(key)

    def _submit(self, threads: Executor, work: Callable[..., None], *arguments: object) -> bool:
        """False if the thread has ended."""
        try:
            threads.submit(work, *arguments)
        except RuntimeError:
            return False
        return True

    def _tell(self, what: str) -> None:
        """Log each kind of fault once, because a full disk fails every block."""
        if what not in self._told:
            self._told.add(what)
            _log.warning("%s", what)


def _words(error: Exception) -> str:
    """The same for every block: messages of the system name its file."""
    if isinstance(error, DamagedBlockError):
        return str(error)
    return f"{type(error).__name__}: {error.strerror if isinstance(error, OSError) and error.strerror else error}"
