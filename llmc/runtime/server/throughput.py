"""A line of the log every ten seconds in which the engine has worked: how fast, for how many, and how full it is."""

import asyncio
import logging

from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine_stats import EngineStats

# A separate logger, which also prints where uvicorn's lines are turned off.
LOGGER = "llmc.throughput"
SECONDS = 10.0
_log = logging.getLogger(LOGGER)


async def log_throughput(engine: AsyncEngine, name: str = "", seconds: float = SECONDS) -> None:
    """Log until it is cancelled. name: whose lines they are. seconds: from one line to the next."""
    before, loop = engine.stats(), asyncio.get_running_loop()
    begin = loop.time()
    while True:
        await asyncio.sleep(seconds)
        after, now = engine.stats(), loop.time()
        if after.steps > before.steps or after.running or after.waiting:
            _log.info("%s%s", f"{name}: " * bool(name), throughput(before, after, now - begin))
        before, begin = after, now


def throughput(before: EngineStats, after: EngineStats, seconds: float) -> str:
    """A line with an engine's throughput over `seconds` seconds."""
    generated = (after.generation_tokens - before.generation_tokens) / seconds
    read = (after.prompt_tokens - before.prompt_tokens) / seconds
    line = (
        f"{generated:.1f} generated tok/s, {read:.1f} prompt tok/s; {after.running} running, {after.waiting} waiting; "
        f"{after.cache_usage:.0%} of the KV cache in use"
    )
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    return f"{line}; {hits / queries:.0%} of the prompts cached" if queries else line
