"""How the verbs that run an engine in this process open it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from llmc.cli.completion import complete_executors

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine

SpeculativeConfig = Annotated[
    str | None,
    Option(
        metavar="JSON",
        help='drafter and its settings, such as {"method": "ngram", "num_speculative_tokens": 4}; answers stay the '
        "same, except with the rejection_sample_method typical (lossy) and rejection (keeps their distribution)",
    ),
]


KvOffloadingSize = Annotated[
    str | None,
    Option(
        metavar="SIZE",
        help=(
            "size of a second tier for KV blocks that leave the cache, such as 20GB: in memory for GPU engines, in "
            "files for others"
        ),
    ),
]
KvOffloadingDir = Annotated[
    Path | None, Option(help="directory for the files of the second tier, where later processes find prefixes")
]


@dataclass(frozen=True, kw_only=True)
class OpeningOptions:
    """The arguments of llmc.load from the command line."""

    threads: Annotated[int | None, Option(help="threads per step; default: all cores that this process may use")] = None
    executor: Annotated[
        str | None,
        Option(
            help=(
                "executor of the steps: reference runs a GPU engine's graph in torch, slowly; ptx executes and "
                "checks its compiled kernels; default: the engine's own"
            ),
            autocompletion=complete_executors,
        ),
    ] = None
    speculative_config: SpeculativeConfig = None
    kv_offloading_size: KvOffloadingSize = None
    kv_offloading_dir: KvOffloadingDir = None

    def check(self) -> None:
        """Check the options before anything is built. Raises OptionError."""
        from llmc.runtime.executors.opening import check_executor_name
        from llmc.runtime.kv_tier.wish import offloading_wish
        from llmc.runtime.speculation.config import parse_speculative_config
        from llmc.runtime.threads import thread_count

        offloading_wish(self.kv_offloading_size, self.kv_offloading_dir)
        if self.speculative_config is not None:
            parse_speculative_config(self.speculative_config)
        thread_count(self.threads)
        if self.executor is not None:
            check_executor_name(self.executor)

    def open(self, engine: Path, kv_compression: str | None = None) -> Engine:
        """Open the engine with these options. kv_compression: as in llmc.load. Raises LlmcError."""
        from llmc.runtime.executors.opening import check_executor_name
        from llmc.runtime.loading import load

        name = None if self.executor is None else check_executor_name(self.executor)
        return load(
            engine,
            threads=self.threads,
            executor=name,
            speculation=self.speculative_config,
            kv_compression=kv_compression,
            kv_offloading_size=self.kv_offloading_size,
            kv_offloading_dir=self.kv_offloading_dir,
        )
