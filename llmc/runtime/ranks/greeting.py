"""The first message of a rank: its llmc version and its engine, which must be equal on all ranks."""

import hashlib
from dataclasses import asdict, dataclass

from llmc.api.version import VERSION
from llmc.engine_format import EngineDirectory
from llmc.engine_format.manifest import manifest_text
from llmc.errors import RankError


@dataclass(frozen=True)
class Greeting:
    """The first message of a rank, to check that ranks fit together. version: the version of llmc. engine: SHA-256 of
    the manifest, so of the program, the library and all weights. path: where the rank has it."""

    version: str
    engine: str
    path: str

    @staticmethod
    def of(engine: EngineDirectory) -> "Greeting":
        """Return the greeting of this process."""
        digest = hashlib.sha256(manifest_text(engine.manifest).encode()).hexdigest()
        return Greeting(VERSION, digest, str(engine.path))

    def check(self, theirs: object, rank: str) -> None:
        """Raise RankError if another rank runs another llmc or engine. theirs: its message; rank: its name in
        errors."""
        if not isinstance(theirs, dict) or not all(isinstance(theirs.get(key), str) for key in asdict(self)):
            raise RankError(f"{rank} does not answer as a rank of llmc {VERSION}: {theirs!r:.80}", at=rank, fix=_SAME)
        if theirs["version"] != self.version:
            raise RankError(f"{rank} runs llmc {theirs['version']}, the first rank {self.version}", at=rank, fix=_SAME)
        if theirs["engine"] != self.engine:
            raise RankError(
                f"{rank} has a different engine from the first rank: manifest {theirs['engine'][:12]} at "
                f"{theirs['path']}, here {self.engine[:12]} at {self.path}",
                at=rank,
                fix="give all ranks the same engine directory, or copies of it",
            )


_SAME = "install the same llmc for all ranks"
