"""Serve a load with replicas of a program on a virtual clock."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.bench.request_record import RequestRecord
from llmc.bench.summary import Summary, summarize
from llmc.errors import OptionError
from llmc.plural import counted
from llmc.prediction.step_shape import StepShape
from llmc.program import Program
from llmc.runtime.scheduling.group_pool import group_pools
from llmc.simulation.divisions import Division
from llmc.simulation.load import Arrival
from llmc.simulation.pricing import Machine, step_seconds
from llmc.simulation.programs import stages_of
from llmc.simulation.rank_memory import RankMemory, rank_memory
from llmc.simulation.replica import Replica


@dataclass(frozen=True)
class Served:
    """A load on replicas. memory: that of a rank of each stage. kv_tokens: KV capacity of each replica in tokens;
    kv_used: maximum number of tokens that a replica held. decode: seconds of a step with a single request of the load's
    mean length. preemptions: total over all replicas."""

    division: Division
    memory: tuple[RankMemory, ...]
    kv_tokens: int
    kv_used: int
    decode: float
    preemptions: int
    summary: Summary
    records: tuple[RequestRecord, ...]

    def percentile(self, name: str, share: float) -> float:
        """Milliseconds of ttft or tpot; 0 where no request has any."""
        values = [second for record in self.records for second in record.seconds(name)]
        return 1e3 * float(np.quantile(values, share)) if values else 0.0


@dataclass(frozen=True)
class Refused:
    """A division that cannot serve the load, and why."""

    division: Division
    reason: str


Outcome = Served | Refused


def serve(
    program: Program, division: Division, machine: Machine, load: Sequence[Arrival], goals: dict[str, float]
) -> Outcome:
    """Latencies that the load's clients see. goals: milliseconds by name (llmc.bench.summary)."""
    limits, stages = program.limits, stages_of(program)
    memory = rank_memory(program, stages, machine.memory)
    shortage = shortage_of(program, memory)
    if shortage is not None:
        return Refused(division, shortage)
    wanted = limits.max_sequences * limits.blocks_for(limits.max_model_len)
    blocks = min(rank.blocks(program, wanted) for rank in memory)
    ranks = division.replicas * division.layout.ranks
    seconds = step_seconds(program, division.layout, machine, ranks)
    replicas = [Replica(limits, blocks, seconds, group_pools(program, blocks)) for _ in range(division.replicas)]
    records = tuple(_send(replicas, load))
    duration = max(record.ended for record in records)
    mean = sum(arrival.tokens for arrival in load) // len(load)
    return Served(
        division=division,
        memory=memory,
        kv_tokens=blocks * limits.block_size,
        kv_used=max(replica.most_blocks for replica in replicas) * limits.block_size,
        decode=seconds(StepShape.decode(requests=1, context=mean)),
        preemptions=sum(replica.preemptions for replica in replicas),
        summary=summarize(records, duration, goals),
        records=records,
    )


def shortage_of(program: Program, memory: Sequence[RankMemory]) -> str | None:
    """Describe what does not fit of one sequence of max_model_len tokens; None if all ranks hold it."""
    one_sequence = program.limits.blocks_for(program.limits.max_model_len)
    shortages = (rank.shortage(program, one_sequence) for rank in memory)
    return next((shortage for shortage in shortages if shortage is not None), None)


def check_fits(program: Program, load: Sequence[Arrival]) -> None:
    """Raise OptionError for a request that no step of the program serves."""
    most = program.limits.max_model_len
    long = next((arrival for arrival in load if arrival.tokens > most), None)
    if long is not None:
        raise OptionError(
            f"a request has {counted(long.prompt_tokens, 'token')} and is to generate {long.output_tokens}: "
            f"more than {most}",
            at="the load",
            fix="give a larger max_model_len, or shorter requests",
        )


def _send(replicas: Sequence[Replica], load: Sequence[Arrival]) -> list[RequestRecord]:
    """Send each request to the replica with the fewest, as the router of `llmc serve` does."""
    records = []
    for arrival in load:
        for replica in replicas:
            replica.run_until(arrival.arrival)
        least = min(replicas, key=lambda replica: replica.in_flight)
        records.append(least.add(arrival))
    for replica in replicas:
        replica.run_until(float("inf"))
    return records
