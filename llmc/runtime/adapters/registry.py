"""The adapters that an engine knows, by name: for requests of any thread to choose from."""

from collections.abc import Collection, Sequence
from os import PathLike
from threading import Lock

from llmc.adapters.adapter import read_adapter
from llmc.errors import AdapterError, RequestError, did_you_mean
from llmc.plural import counted
from llmc.program import AdapterPools
from llmc.runtime.adapters.placed_adapter import PlacedAdapter, place_adapter

# The name of one adapter for all prompts of a call, or one for each; None uses the plain model.
AdapterChoice = str | Sequence[str | None] | None


class AdapterRegistry:
    """The loaded adapters. pools: the engine's pools for adapters; None for an engine that takes none. Names come and
    go while requests run: a request keeps the adapter that it was given."""

    def __init__(self, pools: AdapterPools | None) -> None:
        self.pools = pools
        self._adapters: dict[str, PlacedAdapter] = {}
        self._lock = Lock()

    def names(self) -> tuple[str, ...]:
        """The adapters' names, in the order of loading."""
        return tuple(self._adapters)

    def find(self, name: str) -> PlacedAdapter | None:
        return self._adapters.get(name)

    def get(self, name: str) -> PlacedAdapter:
        """The adapter of that name. Raises RequestError."""
        if not isinstance(name, str):
            raise RequestError(
                f"{name!r:.100} ({type(name).__name__}) is not the name of an adapter",
                at="adapter",
                fix="give one name as a text. generate and chat also accept a list with a name or None for each prompt",
            )
        placed = self._adapters.get(name)
        if placed is None:
            near = did_you_mean(name, self._adapters)
            raise RequestError(
                f"there is no adapter {name!r:.100}",
                at="adapter",
                fix=f"{near}loaded are: {', '.join(self._adapters) or 'none'}",
            )
        return placed

    def of_each(self, count: int, names: AdapterChoice) -> list[PlacedAdapter | None]:
        """The adapter of each of `count` prompts; None for the plain model. Raises RequestError."""
        if names is None or isinstance(names, str) or not isinstance(names, Sequence):
            return [None if names is None else self.get(names)] * count
        if len(names) != count:
            raise RequestError(
                f"{counted(count, 'prompt')} came with {counted(len(names), 'adapter')}",
                at="adapter",
                fix="give one name for all prompts, or a list with a name or None for each",
            )
        return [None if name is None else self.get(name) for name in names]

    def load(
        self, name: str, directory: str | PathLike[str], taken: Collection[str] = (), *, in_place: bool = False
    ) -> PlacedAdapter:
        """Read a PEFT directory under a name that neither an adapter nor one of `taken` has. in_place: an adapter may
        have it, which this one replaces. Raises AdapterError."""
        if self.pools is None:
            raise AdapterError(
                "the engine does not accept adapters", at=name, fix="build it with enable_lora=True, and max_lora_rank"
            )
        self._check_free(name, taken, in_place)
        placed = place_adapter(name, read_adapter(directory), self.pools)
        with self._lock:
            self._check_free(name, taken, in_place)
            self._adapters[name] = placed
        return placed

    def unload(self, name: str) -> None:
        """Forget a name; requests that have the adapter keep it. Raises AdapterError."""
        with self._lock:
            if self._adapters.pop(name, None) is None:
                known = ", ".join(self._adapters) or "none"
                raise AdapterError(f"there is no adapter {name!r:.100}", at=name, fix=f"loaded are: {known}")

    def _check_free(self, name: str, taken: Collection[str], in_place: bool) -> None:
        if not isinstance(name, str) or not name.strip():
            raise AdapterError(f"an adapter's name cannot be {name!r:.100}", fix="give it a name")
        if name in taken:
            raise AdapterError(f"{name!r:.100} is the name of the model itself", at=name, fix="choose another name")
        if name in self._adapters and not in_place:
            raise AdapterError(
                f"an adapter is called {name!r:.100} already: that of {self._adapters[name].source}",
                at=name,
                fix="unload it first, or choose another name",
            )
