"""The KV compression of each request: as the request, the load or the build says, in this order."""

from collections.abc import Sequence

from llmc.errors import OptionError, RequestError
from llmc.program import (
    EVERYTHING,
    CachePolicy,
    Program,
    check_cuts,
    check_newest,
    compression_problem,
    fitted_compression,
)


class RequestPolicies:
    """The policies that an engine can run.

    Args:
        program: what the engine runs.
        default: policy of requests that name none, as text; None for the one that the engine was built for.

    Attributes:
        groups: policies of all groups of caches that the engine was built for.
        built: the one of them that requests may replace; EVERYTHING if there is none.

    Raises:
        OptionError: for a default that the engine was not built for.
    """

    def __init__(self, program: Program, default: str | None = None) -> None:
        built = [policy for policy in program.policies if policy.per_request]
        self._built = built[0] if built else None
        self.groups = tuple(program.policies)
        self.built = EVERYTHING if self._built is None else self._built
        self._block_size, self._exact_rows = program.limits.block_size, program.exact_rows
        self._default = None if default is None else self._checked(default)

    def of(self, asked: str | None) -> CachePolicy | None:
        """The policy of a request, None for the one of the build. Raises RequestError for one that cannot be run."""
        if asked is None:
            return self._default
        try:
            return self._checked(asked)
        except OptionError as error:
            raise RequestError(error.problem, at=error.at, fix=error.fix) from None

    def check(self, asked: str) -> None:
        """Raise OptionError for a policy that cannot be run."""
        self._checked(asked)

    def in_use(self, asked: str | None) -> CachePolicy:
        """The same, with the one of the build in the place of None."""
        return self.of(asked) or self.built

    def check_drafts(self, programs: Sequence[Program]) -> None:
        """Raise OptionError for drafts whose caches are in the blocks of positions, if there is KV compression.

        Args:
            programs: what drafts for the engine, besides the engine itself.
        """
        if self._built is not None and programs:
            raise OptionError(
                f"the engine drops rows of its KV cache ({self._built.shown}), and its drafter keeps every position",
                at="speculation",
                fix="draft by ngram, suffix or lookahead, or load an engine that was built without kv_compression",
            )

    def _checked(self, text: str) -> CachePolicy:
        policy = fitted_compression(text, self._block_size)
        check_cuts(policy, self._block_size)
        found = compression_problem(self.built, policy)
        if found is not None:
            raise OptionError(found[0], at=f"kv_compression={text:.200}", fix=found[1])
        if self._exact_rows:
            check_newest(policy, self._exact_rows, self._block_size)
        return policy
