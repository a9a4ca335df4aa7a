"""One engine, many threads: each has its own answers, bit for bit; what is left, closed or broken harms nobody else."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from llmc.engines.llm import LLM
from llmc.errors import EngineFailureError, LlmcError, RankError, RequestError, UnavailableError
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine import Engine
from llmc.runtime.executors.executor import Logits
from llmc.runtime.loading import load
from llmc.runtime.loop import shared_loop
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.held_executor import HeldExecutor, hold
from tests.runtime.tiny_engine import tiny_model, write_tiny_engine

THREADS = 8
TEXTS = ("ROMEO:", "The king", "My lord, my lord, my lord, my lord, I", "KING RICHARD III:\nNow is", "a")
PARAMS = (
    SamplingParams(max_tokens=9, logprobs=2),
    SamplingParams(max_tokens=9, temperature=0.9, seed=5, top_p=0.9, logprobs=0, prompt_logprobs=1),
    SamplingParams(max_tokens=6, temperature=1.0, seed=7, n=3, logprobs=0),
    SamplingParams(max_tokens=6, temperature=1.0, seed=7, best_of=3, repetition_penalty=1.2),
    SamplingParams(max_tokens=5, beam_width=3, n=2),
    SamplingParams(max_tokens=12, stop=("e ", "\n")),
)
Ask = Callable[[Engine, str, SamplingParams], object]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny.llmc", model=tiny_model())


@pytest.fixture
def engine(draft_engine: Path) -> Iterator[Engine]:
    # Room for few, so that requests wait and are preempted.
    with load(draft_engine, threads=1, kv_cache_bytes=1 << 20) as opened:
        yield opened


def generated(engine: Engine, text: str, params: SamplingParams) -> object:
    return engine.generate(text, params)


def streamed(engine: Engine, text: str, params: SamplingParams) -> object:
    """All of a stream, in the form that does not depend on where its pieces end."""
    if params.sampled_choices() > 1:
        return engine.generate([text, text], params)
    pieces = list(engine.stream(text, params))
    return "".join(p.text for p in pieces), sum((p.token_ids for p in pieces), ()), pieces[-1].finish_reason


def abandoned(engine: Engine, text: str, params: SamplingParams) -> object:
    """The first token of a stream that is left after it."""
    if params.sampled_choices() > 1:
        return None
    stream = engine.stream(text, params)
    ids = next(stream).token_ids
    stream.close()
    return ids[0]


def scored(engine: Engine, text: str, params: SamplingParams) -> object:
    return engine.logits(engine.tokenize(text)).tobytes()


def ask_from_threads(path: Path, shared: Engine, each: int) -> None:
    """Ask `each` times from every thread, and compare with an engine that does one thing at a time."""
    kinds: tuple[Ask, ...] = (generated, generated, streamed, abandoned, scored)
    asked = [(kind, text, params) for kind in kinds for text in TEXTS for params in PARAMS]
    with load(path, threads=1, prefix_cache=False) as alone:
        wanted = [kind(alone, text, params) for kind, text, params in asked]
    start = threading.Barrier(THREADS)

    def client(number: int) -> list[int]:
        chance = random.Random(number)
        start.wait()
        chosen = [chance.randrange(len(asked)) for _ in range(each)]
        return [i for i in chosen if asked[i][0](shared, *asked[i][1:]) != wanted[i]]

    with ThreadPoolExecutor(THREADS) as pool:
        wrong = [index for indices in pool.map(client, range(THREADS)) for index in indices]
    assert [asked[index] for index in wrong] == []
    assert shared.loop.scheduler.idle and shared.loop.pool.used == 0


def test_eight_threads_get_what_one_gets(draft_engine: Path, engine: Engine) -> None:
    ask_from_threads(draft_engine, engine, each=25)


@pytest.mark.slow
def test_eight_threads_get_what_one_gets_many_times(draft_engine: Path, engine: Engine) -> None:
    ask_from_threads(draft_engine, engine, each=200)


@pytest.fixture
def held(tiny: Path) -> Iterator[tuple[Engine, HeldExecutor]]:
    engine = load(tiny)
    executor = hold(engine)
    try:
        yield engine, executor
    finally:
        executor.free()
        engine.close()


def in_thread(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *arguments)
    pool.shutdown(wait=False)
    return future


def wait_for_wish(engine: Engine) -> None:
    """Until another thread has asked the leader to add its request and to tell it of its end."""
    while len(engine.shared_loop._wishes) < 2:
        threading.Event().wait(0.001)


MODEL = tiny_model()
LONG = SamplingParams(max_tokens=12)


def test_threads_share_steps(held: tuple[Engine, HeldExecutor]) -> None:
    engine, executor = held
    first = in_thread(engine.generate, [5, 9, 2], LONG)
    executor.reached.acquire()
    second = in_thread(engine.generate, [8, 8], LONG)
    wait_for_wish(engine)
    executor.free()
    assert list(first.result()[0].token_ids) == MODEL.greedy([5, 9, 2], 12)
    assert list(second.result()[0].token_ids) == MODEL.greedy([8, 8], 12)
    assert executor.tokens == [1] + [2] * 11 + [1], "the second came in the second step and left a step later"


def test_closing_ends_what_others_have_in_flight(held: tuple[Engine, HeldExecutor]) -> None:
    engine, executor = held
    stream = engine.stream([1, 2], LONG)
    leader = in_thread(engine.generate, [5, 9, 2], LONG)
    executor.reached.acquire()
    follower = in_thread(engine.logits, [8, 8])
    wait_for_wish(engine)
    closing = in_thread(engine.close)
    while engine.shared_loop._refusal is None:
        threading.Event().wait(0.001)
    executor.free()
    closing.result()
    for future in (leader, follower):
        with pytest.raises(UnavailableError, match="the engine is closed"):
            future.result()
    with pytest.raises(UnavailableError, match="the engine is closed"):
        next(stream)
    assert executor.tokens == [1], "no step after the one that was running"


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RuntimeError("the device fell off the bus"), EngineFailureError),
        (RankError("rank 1 is lost"), RankError),
    ],
)
def test_a_step_that_breaks_off_harms_only_the_thread_that_took_it(
    held: tuple[Engine, HeldExecutor], error: BaseException, seen: type[BaseException]
) -> None:
    engine, executor = held
    leader = in_thread(engine.generate, [5, 9, 2], LONG)
    executor.reached.acquire()
    follower = in_thread(engine.generate, [8, 8] * 5, SamplingParams(max_tokens=12))
    wait_for_wish(engine)
    executor.may_go.release(3)
    for _ in range(3):
        executor.reached.acquire()
    executor.error = error
    executor.free()
    with pytest.raises(seen) as caught:
        leader.result()
    assert error in (caught.value, caught.value.__cause__)
    assert list(follower.result()[0].token_ids) == MODEL.greedy([8, 8] * 5, 12)
    assert list(engine.generate([5, 9, 2], LONG)[0].token_ids) == MODEL.greedy([5, 9, 2], 12)
    assert engine.loop.scheduler.idle and engine.loop.pool.used == 0


def test_a_step_that_breaks_off_between_its_tokens_ends_the_others_requests(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny) as engine:
        streams = [engine.stream([5, 9, 2], LONG), engine.stream([8, 8], LONG)]
        for stream in streams:
            next(stream)
        monkeypatch.setattr(engine.loop.scheduler, "settle", broken)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([11], LONG)
        for stream in streams:
            with pytest.raises(UnavailableError, match="interrupted in another thread"):
                next(stream)
        assert list(engine.generate([5, 9, 2], LONG)[0].token_ids) == MODEL.greedy([5, 9, 2], 12)


def broken(request: object) -> None:
    raise KeyboardInterrupt


class Interrupt(KeyboardInterrupt):
    """One that no other is mistaken for."""


def interrupted_at(line: int, work: Callable[[], object]) -> bool:
    """Whether an interrupt came, before the given line of those that `work` goes through in the shared loop."""
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != shared_loop.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_anywhere_leaves_the_engine_to_others(tiny: Path) -> None:
    two = SamplingParams(max_tokens=2)
    wanted = MODEL.greedy([5, 9, 2], 2)
    line = 1
    with load(tiny) as engine:
        while interrupted_at(line, lambda: engine.generate([8, 8], two)):
            other = in_thread(engine.generate, [5, 9, 2], two)
            assert list(other.result(timeout=300)[0].token_ids) == wanted
            assert list(engine.generate([5, 9, 2], two)[0].token_ids) == wanted
            line += 1
        assert line > 40, "it came in every line"


def test_a_stream_of_another_thread_may_be_left_and_collected(tiny: Path) -> None:
    with load(tiny) as engine:
        streams = [engine.stream([5, 9, 2], LONG) for _ in range(3)]
        for stream in streams:
            next(stream)
        in_thread(streams[0].close).result()
        del stream, streams[1:]
        assert list(engine.generate([8, 8], LONG)[0].token_ids) == MODEL.greedy([8, 8], 12)
        assert engine.loop.scheduler.idle and engine.loop.pool.used == 0


def test_an_engine_cannot_be_called_from_inside_its_own_step(held: tuple[Engine, HeldExecutor]) -> None:
    engine, executor = held
    executor.free()
    inner = executor.inner

    class Calling:
        def step(self, step: Step) -> Logits:
            with pytest.raises(RequestError, match="from inside one of its own steps"):
                engine.generate([1], LONG)
            with pytest.raises(RequestError, match="from inside one of its own steps"):
                engine.close()
            return inner.step(step)

    executor.inner = Calling()  # type: ignore[assignment]
    assert list(engine.generate([8, 8], LONG)[0].token_ids) == MODEL.greedy([8, 8], 12)


def test_an_asyncio_engine_has_its_engine_alone(tiny: Path) -> None:
    engine = load(tiny)
    stream = engine.stream([1, 2], LONG)
    next(stream)
    with pytest.raises(RequestError, match="requests in flight"):
        AsyncEngine(engine)
    stream.close()
    serving = AsyncEngine(engine)
    for call in (lambda: engine.generate([1], LONG), lambda: engine.logits([1]), engine.close):
        with pytest.raises(RequestError, match="belongs to an AsyncEngine"):
            call()
    serving.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        AsyncEngine(engine)


def test_progress_is_told_outside_of_steps(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, int]] = []
    with load(tiny) as engine:

        def note(done: int, total: int) -> None:
            told.append((done, total))
            assert np.array_equal(engine.logits([1]), engine.logits([1])), "the engine is free meanwhile"

        engine.generate([[i + 1] for i in range(9)], LONG, progress=note)
        engine.generate([[i + 1] for i in range(9)], LONG, progress=True)
        with pytest.raises(LlmcError):
            engine.generate([[1], []], LONG, progress=True)
    assert told[-1] == (9, 9) and told == sorted(told)
    assert "9/9" in capsys.readouterr().err


def test_a_language_model_is_for_any_thread_too(draft_engine: Path) -> None:
    with LLM(draft_engine, chat_template="plain") as llm, ThreadPoolExecutor(4) as pool:
        talks = [[{"role": "user", "content": text}] for text in TEXTS]
        wanted = [llm.chat(talk, SamplingParams(max_tokens=6)) for talk in talks]
        assert list(pool.map(lambda talk: llm.chat(talk, SamplingParams(max_tokens=6)), talks * 3)) == wanted * 3
