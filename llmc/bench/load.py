"""Load on a server: requests at random times of a given rate, or from users who each wait for their answer."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from llmc.bench.client import Server, complete
from llmc.bench.prompts import LoadRequest
from llmc.bench.request_record import RequestRecord
from llmc.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """When requests are sent: `concurrency` users at a time, or `rate` requests per second on average, or both.

    burstiness: 1 is a Poisson process; smaller is burstier, larger is more even (a gamma distribution, as in vLLM's
    benchmark). seed: the seed of the arrival times.
    """

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise OptionError(f"concurrency cannot be {self.concurrency}", at="--max-concurrency", fix="give 1 or more")
        if self.rate is not None and not self.rate > 0:
            raise OptionError(f"the rate cannot be {self.rate}", at="--request-rate", fix="give more than 0")
        if not self.burstiness > 0:
            raise OptionError(f"burstiness cannot be {self.burstiness}", at="--burstiness", fix="give more than 0")


async def run_load(
    server: Server,
    requests: Sequence[LoadRequest],
    arrival: Arrival,
    finished: Callable[[RequestRecord], None] = lambda record: None,
) -> tuple[list[RequestRecord], float]:
    """Send all requests; returns their records in order and the seconds from the first to the last answer."""
    generator = random.Random(arrival.seed)
    gate = asyncio.Semaphore(arrival.concurrency or len(requests) or 1)

    async def one(session: aiohttp.ClientSession, request: LoadRequest) -> RequestRecord:
        async with gate:
            record = await complete(session, server, request)
        finished(record)
        return record

    async with server.session() as session:
        start, due, tasks = time.perf_counter(), 0.0, []
        for request in requests:
            if arrival.rate is not None:
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                due += generator.gammavariate(arrival.burstiness, 1 / (arrival.rate * arrival.burstiness))
            tasks.append(asyncio.create_task(one(session, request)))
        records = await asyncio.gather(*tasks)
        return records, time.perf_counter() - start
