"""Models by their names on the Hugging Face hub: `org/name`, `org/name@revision`, and `org/name:Q4_0` of GGUF files.

huggingface_hub downloads them into its own cache and shows progress. Its usual settings apply (HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE, HF_ENDPOINT). Only data is downloaded, never code.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from os import PathLike
from pathlib import Path

from llmc.errors import CheckpointError, LlmcError
from llmc.files.hub_answers import COMMIT, HubAnswers
from llmc.files.storage_error import NO_ROOM, storage_error

_DESCRIPTION = ("*.json", "*.jinja")


@dataclass(frozen=True)
class HubFiles:
    """The files of a repository that hold weights of one kind: patterns of those to fetch, and of exceptions."""

    patterns: tuple[str, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class HubName:
    """The name of a model on the hub. repository: `org/name`. revision: a branch, tag or commit; None for the default
    branch. type: what the name of a GGUF file ends in, such as Q4_0; None for the model's own files."""

    repository: str
    revision: str | None = None
    type: str | None = None

    @property
    def command(self) -> str:
        """The command that downloads it manually."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repository}{revision}" + (f" --include '*{self.type}*.gguf'" if self.type else "")


def fetched_model(model: str | PathLike[str], weights: Sequence[HubFiles]) -> Path:
    """A path as it is, and a hub name's snapshot, or its GGUF file, which is fetched first.

    A string is a hub name if it has the form of one and no file exists at that path.

    Args:
        weights: The kinds of files with weights. The first kind that a repository has is fetched; with the first, also
            what describes the model. None: only what describes it.

    Raises:
        CheckpointError: For what the hub does not have or does not give.
    """
    name = hub_name(model) if isinstance(model, str) and not Path(model).exists() else None
    if name is None:
        return Path(model)
    if name.type is not None:
        return _gguf_file(name, name.type)
    if not weights:
        return _fetched(name, HubFiles(_DESCRIPTION, left_out=("*/*",)))
    first, *others = weights
    snapshot, fetched = _fetched(name, HubFiles((*_DESCRIPTION, *first.patterns), first.left_out)), first
    for kind in others:
        if any(any(snapshot.glob(pattern)) for pattern in fetched.patterns):
            break
        snapshot, fetched = _fetched(name, kind), kind
    return snapshot


def hub_name(text: str) -> HubName | None:
    """Return the hub name of a text; None if it is not one, such as a path without exactly one slash."""
    match = _NAME.fullmatch(text)
    return None if match is None else HubName(match["repository"], match["revision"], match["type"])


def repository_of(directory: Path) -> str | None:
    """`org/name` of a snapshot in the hub's cache, which is called after its commit; None for any other directory."""
    place = directory.resolve()
    match = _SNAPSHOTS.fullmatch("/".join(place.parts[-3:-1]))
    return None if match is None else match["repository"].replace("--", "/")


def model_name(directory: Path) -> str:
    """The name of a model: that of its directory, or of its repository without the owner."""
    repository = repository_of(directory)
    return directory.resolve().name if repository is None else repository.rpartition("/")[2]


_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w-][\w.-]*(/[\w-][\w.-]*)*))?(:(?P<type>\w[\w.-]*))?"
)
_SNAPSHOTS = re.compile(r"models--(?P<repository>.+)/snapshots")


# Exceptions of huggingface_hub for a malformed answer.
_OF_READING = (AssertionError, AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def _gguf_file(name: HubName, type: str) -> Path:
    """The file whose name ends in the type, whatever its case, or the first of those that it is split into."""
    spellings = dict.fromkeys((type, type.lower(), type.upper()))
    ends = [end for spelling in spellings for end in (f"{spelling}.gguf", f"{spelling}-?????-of-?????.gguf")]
    snapshot = _fetched(name, HubFiles(tuple(start + end for end in ends for start in ("", "*[-._/]"))))
    by_name: dict[str, Path] = {}
    for file in sorted(snapshot.rglob("*.gguf")):
        whole = _SHARD.sub("", file.stem)
        if re.fullmatch(rf"(.*[-._])?{re.escape(type)}", whole, re.IGNORECASE):
            by_name.setdefault(whole, file)
    if len(by_name) == 1:
        return next(iter(by_name.values()))
    raise CheckpointError(
        f"{name.repository} has {'no GGUF file' if not by_name else 'several GGUF files'} of the type {type}"
        + (f": {', '.join(by_name)}" if by_name else ""),
        at=name.repository,
        fix=f"see what there is: https://huggingface.co/{name.repository}/tree/{name.revision or 'main'}"
        + ("; a longer suffix of the name selects one" if by_name else ""),
    )


def _fetched(name: HubName, files: HubFiles) -> Path:
    # Takes a while to import, and a directory does without.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name

    from llmc.files.hub_client import checked_client

    place = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type="model")
    commit = name.revision if name.revision and COMMIT.fullmatch(name.revision) else None
    try:
        with checked_client(HubAnswers(name.repository, place, partial(_is_wanted, files), commit)):
            directory = snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=list(files.patterns),
                ignore_patterns=list(files.left_out),
                library_name="llmc",
            )
    except LlmcError:
        raise
    except Exception as error:  # Also of whichever HTTP library the hub's client has: httpx or httpx2.
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            content = f"what is fetched of {name.repository}"
            raise storage_error(error, place, content=content, elsewhere="set HF_HOME to a directory") from None
        problem, fix = _reason(error, name)
        raise CheckpointError(f"{name.repository} {problem}", at=name.repository, fix=fix) from None
    return Path(directory)


def _is_wanted(files: HubFiles, name: str) -> bool:
    is_named = any(fnmatch(name, pattern) for pattern in files.patterns)
    return is_named and not any(fnmatch(name, pattern) for pattern in files.left_out)


def _reason(error: Exception, name: HubName) -> tuple[str, str]:
    """The problem and what to do."""
    from huggingface_hub import errors as hub

    cause = error.__cause__ or error
    text = _printable(str(cause))
    try_it = f"see whether this works: {name.command}"
    if isinstance(error, hub.GatedRepoError):
        page = f"https://huggingface.co/{name.repository}"
        return "requires consent to its terms of use", f"agree at {page}, then `hf auth login` or set HF_TOKEN"
    if isinstance(error, hub.RepositoryNotFoundError):
        fix = "correct the path or the name; for a private model: `hf auth login`, or set HF_TOKEN"
        return "is neither a directory here nor a model on the hub", fix
    if isinstance(error, hub.RevisionNotFoundError):
        return f"has no revision {name.revision!r}", "name a branch, a tag or a commit that it has"
    if isinstance(cause, hub.FileMetadataError):
        return "cannot be fetched: the server is not a Hugging Face hub", "set HF_ENDPOINT to one, or leave it out"
    if isinstance(error, hub.LocalEntryNotFoundError):
        fix = f"on a machine with a network: {name.command}; HF_HOME says where the cache is"
        return f"is not a directory here, and the hub cannot be reached for it: {text:.200}", fix
    if type(error).__name__ == "TooManyRedirects":
        return "cannot be fetched: the hub leads from address to address without end", try_it
    if isinstance(error, _OF_READING) and not isinstance(error, hub.HFValidationError | OSError):
        return "cannot be fetched: the hub's answer does not describe a model", try_it
    return f"cannot be fetched: {text:.200}", try_it


def _printable(text: str) -> str:
    """The text on one line, without control characters that a terminal would execute."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
