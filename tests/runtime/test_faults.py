"""One request never ends another: an exception in any work for a request ends that request, and no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from llmc import SamplingParams
from llmc.compiler import build
from llmc.errors import RequestError, RequestFaultError
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine import Engine
from llmc.runtime.grammar.grammar import Grammar
from llmc.runtime.loading import load
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests import boundary
from llmc.runtime.requests.generation import Generation, Scoring
from llmc.runtime.sampling.sampler import Sampler, choose
from tests.medusa_heads import medusa_1
from tests.runtime.async_clients import listen, request, serving
from tests.runtime.held_executor import hold
from tests.runtime.injected_faults import Injected, Injector, Panic, injecting, sites
from tests.runtime.tiny_engine import tiny_model, write_tiny_engine

MODELS = Path(__file__).parents[2] / "examples/models"
PREFIX = tuple(range(40, 76))
VICTIM = (*PREFIX, 5, 6)
NEIGHBOURS: Mapping[tuple[int, ...], SamplingParams] = {
    (*PREFIX, 5, 7): SamplingParams(max_tokens=10, logprobs=1),
    (*PREFIX, 9): SamplingParams(max_tokens=10, temperature=0.9, seed=3, n=2, stop=("e ",)),
    (3, 1, 4, 1, 5): SamplingParams(max_tokens=8, beam_width=2),
    (*PREFIX, 8, 8): SamplingParams(max_tokens=10, temperature=0.8, seed=4, grammar=Grammar("regex", "[a-z ]{20,40}")),
}


def unchanged(ids: list[int], logits: Any) -> Any:
    """A logits processor."""
    return logits


VICTIMS: Mapping[str, SamplingParams] = {
    "plain": SamplingParams(max_tokens=8),
    "choices": SamplingParams(
        max_tokens=8,
        temperature=0.9,
        seed=5,
        n=2,
        stop=("zz", "qq"),
        logprobs=2,
        min_tokens=2,
        repetition_penalty=1.1,
        logit_bias={40: 1.0},
        bad_words=("lord",),
        dry_multiplier=0.5,
        logits_processors=[unchanged],
    ),
    "grammar": SamplingParams(
        max_tokens=8, temperature=0.9, typical_p=0.9, seed=6, grammar=Grammar("regex", "[a-z ]{30,60}")
    ),
    "beams": SamplingParams(max_tokens=6, beam_width=3, n=2, stop=("zz",), logits_processors=[unchanged]),
    "best of": SamplingParams(max_tokens=6, temperature=0.9, seed=7, best_of=3, prompt_logprobs=1),
}
DRAFTING: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
    "lookahead": {"method": "lookahead", "num_speculative_tokens": 6},
    "draft model": {"method": "draft_model", "num_speculative_tokens": 3},
    "judged": {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "rejection"},
    "typical": {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "typical"},
    "judged draft model": {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "rejection",
    },
}
# Of engines that have what drafts inside.
BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "medusa": {"method": "medusa", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "eagle3 judged": {"method": "eagle3", "num_speculative_tokens": 4, "rejection_sample_method": "rejection"},
}
Answers = dict[tuple[int, ...], object]


class Clients:
    """Asks an asyncio engine, as the server does."""

    def __init__(self, engine: Engine) -> None:
        self._runner = asyncio.Runner()
        self._engine = self._runner.run(self._opened(engine))

    async def _opened(self, engine: Engine) -> AsyncEngine:
        return AsyncEngine(engine)

    def ask(self, asked: Mapping[tuple[int, ...], SamplingParams]) -> Answers:
        """All at once: what each is told, or its error."""
        return self._runner.run(self._all(asked))

    async def _all(self, asked: Mapping[tuple[int, ...], SamplingParams]) -> Answers:
        heard = await asyncio.gather(*(self._one(*question) for question in asked.items()), return_exceptions=True)
        assert self._engine.is_healthy() and not self._engine.requests()
        return dict(zip(asked, heard, strict=True))

    async def _one(self, prompt: tuple[int, ...], params: SamplingParams) -> object:
        heard = await listen(self._engine, request(prompt, prompt, params))
        indices = range(params.n)
        return [(heard.tokens(i), heard.text(i), heard.reason(i), heard.logprobs(i)) for i in indices]

    def close(self) -> None:
        self._engine.close()
        self._runner.close()


class Threads:
    """Asks an engine from a thread each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(len(NEIGHBOURS) + 1)

    def ask(self, asked: Mapping[tuple[int, ...], SamplingParams]) -> Answers:
        """All at once: what each is told, or its error."""
        start = threading.Barrier(len(asked))

        def one(prompt: tuple[int, ...], params: SamplingParams) -> object:
            start.wait()
            try:
                (completion,) = self._engine.generate([prompt], params)
            except BaseException as error:
                return error
            return [(c.token_ids, c.text, c.finish_reason, c.logprobs or ()) for c in completion.choices]

        answers = list(self._pool.map(lambda each: one(*each), asked.items()))
        return dict(zip(asked, answers, strict=True))

    def close(self) -> None:
        self._pool.shutdown()
        self._engine.close()


def opened(path: Path, drafting: str) -> Engine:
    """With blocks for few, so that requests wait and are preempted."""
    config = {**DRAFTING, **BUILT_IN}[drafting]
    if config is not None and config["method"] == "draft_model":
        config = {**config, "model": str(path)}
    return load(path, threads=1, kv_cache_bytes=1 << 20, speculation=config)


def inject(
    driver: Clients | Threads, engine: Engine, injector: Injector, kinds: Sequence[str], *, thoroughly: bool
) -> set[str]:
    """Let everything that is done for the victims fail. Returns the sites where it was done."""
    alone = {prompt: driver.ask({prompt: params})[prompt] for prompt, params in NEIGHBOURS.items()}
    errors = [outcome for outcome in alone.values() if isinstance(outcome, BaseException)]
    assert not errors, errors
    speculation = engine.loop.speculation
    # What is drawn at random depends on drafts, and so on load, where these are judged.
    is_judged = speculation is not None and speculation.stats.acceptance != "invariant"

    def are_unharmed(answers: Answers) -> bool:
        if is_judged:
            return not any(isinstance(answer, BaseException) for answer in answers.values())
        return answers == alone

    tried: dict[str, None] = {}
    for kind in kinds:
        asked = {**NEIGHBOURS, VICTIM: VICTIMS[kind]}
        injector.aim(None)
        answers = driver.ask(asked)
        wanted = answers.pop(VICTIM)
        assert are_unharmed(answers) and not isinstance(wanted, BaseException)
        for crossing, count in list(injector.crossings.items()):
            if not thoroughly and crossing.site in tried:
                continue
            tried[crossing.site] = None
            for nth in sorted({1, 1 + count // 2}) if thoroughly else [1 + count // 3]:
                for is_late in (False, True) if thoroughly else (nth > 1,):
                    injector.aim(crossing, nth, is_late=is_late)
                    answers = driver.ask(asked)
                    failed = answers.pop(VICTIM)
                    shown = f"{kind}: {crossing} {nth} {is_late}"
                    assert are_unharmed(answers), shown
                    if injector.crossings.get(crossing, 0) >= nth:
                        assert isinstance(failed, RequestFaultError), f"{shown}: {failed}"
                        assert str(failed.__cause__) == "injected", shown
                    else:
                        assert is_judged or failed == wanted, f"{shown} was not reached"
                    assert engine.loop.scheduler.idle and engine.loop.pool.used == 0, shown
    return set(tried)


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Injector]:
    with injecting(Injector(VICTIM), monkeypatch) as active:
        yield active


@pytest.mark.usefixtures("open_gate")
@pytest.mark.parametrize(
    ("drafting", "driver"), [("none", Clients), ("none", Threads), ("ngram", Clients), ("draft model", Threads)]
)
def test_a_fault_ends_its_request_alone(
    drafting: str, driver: Callable[[Engine], Clients | Threads], draft_engine: Path, injector: Injector
) -> None:
    tried_by(drafting, driver, draft_engine, injector, thoroughly=False)


@pytest.mark.slow
@pytest.mark.usefixtures("open_gate")
@pytest.mark.parametrize("driver", [Clients, Threads])
@pytest.mark.parametrize("error", [Injected, Panic, SystemExit, MemoryError, asyncio.CancelledError])
@pytest.mark.parametrize("drafting", DRAFTING)
def test_a_fault_anywhere_ends_its_request_alone(
    drafting: str,
    error: type[BaseException],
    driver: Callable[[Engine], Clients | Threads],
    draft_engine: Path,
    injector: Injector,
) -> None:
    injector.error = error
    tried_by(drafting, driver, draft_engine, injector, thoroughly=True)


def tried_by(
    drafting: str,
    driver: Callable[[Engine], Clients | Threads],
    path: Path,
    injector: Injector,
    *,
    thoroughly: bool,
) -> set[str]:
    engine = opened(path, drafting)
    asking = driver(engine)
    try:
        tried = inject(asking, engine, injector, list(VICTIMS), thoroughly=thoroughly)
    finally:
        asking.close()
    assert {site.partition(":")[0] for site in tried} >= {"runtime/loop/publish.py", "runtime/sampling/sampler.py"}
    assert tried <= sites()
    return tried


@pytest.mark.slow
@pytest.mark.usefixtures("open_gate")
def test_every_crossing_in_the_source_is_tried(draft_engine: Path, injector: Injector, tmp_path: Path) -> None:
    """But those that need a deadline, an abort, an adapter, or a device; tests below and of adapters make these."""
    medusa_1(tmp_path / "heads.safetensors", 128, heads=3)
    build(
        MODELS / "bard-draft", tmp_path / "medusa.llmc", max_model_len=256, speculative=tmp_path / "heads.safetensors"
    )
    build(MODELS / "bard-6m", tmp_path / "eagle3.llmc", max_model_len=256, speculative=MODELS / "bard-eagle3")
    tried: set[str] = set()
    for drafting in (*DRAFTING, *BUILT_IN):
        path = tmp_path / f"{drafting.split()[0]}.llmc" if drafting not in DRAFTING else draft_engine
        for driver in (Clients, Threads):
            tried |= tried_by(drafting, driver, path, injector, thoroughly=False)
    left = sites() - tried
    assert {site.partition(":")[0] for site in left} <= {
        "runtime/clients_in_flight.py",
        "runtime/loop/publish.py",
        "runtime/loop/step_loop.py",
        "runtime/sampling/sampler.py",
    }, left
    assert len(left) <= 5, left


@pytest.mark.usefixtures("open_gate")
@pytest.mark.parametrize(
    ("drafting", "driver", "kinds"),
    [
        ("ngram", Clients, ("choices",)),
        *(
            pytest.param(drafting, driver, tuple(VICTIMS), marks=pytest.mark.slow)
            for drafting in DRAFTING
            for driver in (Clients, Threads)
        ),
    ],
)
def test_nothing_is_done_for_a_request_outside_of_the_boundary(
    drafting: str, driver: Callable[[Engine], Clients | Threads], kinds: Sequence[str], draft_engine: Path
) -> None:
    """Of what the loop calls in the rooms of requests all is behind the boundary, but what is done for all together."""
    outside: set[str] = set()
    watched: dict[CodeType, bool] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not watched.setdefault(code, _is_of_requests(code)):
            return
        caller, is_in_step = frame.f_back, False
        while caller is not None and caller.f_code is not boundary.attempt.__code__:
            is_in_step = is_in_step or caller.f_code in LOOPS
            caller = caller.f_back
        if caller is None and is_in_step:
            outside.add(f"{Path(code.co_filename).name}: {code.co_qualname}")

    threading.setprofile(note)
    try:
        asking = driver(opened(draft_engine, drafting))
        for kind in kinds:
            asking.ask({**NEIGHBOURS, VICTIM: VICTIMS[kind]})
    finally:
        threading.setprofile(None)
    asking.close()
    assert watched[Sampler.accept.__code__] and watched[Generation.accept.__code__]
    names = {site.partition(": ")[2].partition(".<locals>")[0] for site in outside}
    assert names <= {"choose", "choose_largest", "_checked"}, sorted(outside)


# What a request is made of; files in them whose functions the loop calls for all requests, or to keep its accounts.
ROOMS = ("sampling", "grammar", "text", "requests")
FOR_ALL = ("boundary.py", "request.py", "request_state.py", "row_choice.py", "gumbel_noise.py")
LOOPS = (StepLoop.step.__code__, AsyncEngine._turn.__code__)


def _is_of_requests(code: CodeType) -> bool:
    path = Path(code.co_filename)
    return path.parent.name in ROOMS and path.parent.parent.name == "runtime" and path.name not in FOR_ALL


def boom(*given: object, **named: object) -> Any:
    raise Injected("injected")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an executor that can be held."""
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny.llmc", model=tiny_model())


def test_a_fault_while_a_request_is_aborted_or_expires_is_its_own(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generation, "stop", boom)
    prompt, params = (3, 1, 4, 1, 5), SamplingParams(max_tokens=30)

    async def run() -> None:
        engine = load(tiny)
        executor = hold(engine)
        async with serving(engine) as running:
            kept = asyncio.create_task(listen(running, request("kept", prompt, SamplingParams(max_tokens=4))))
            aborted = asyncio.create_task(listen(running, request("aborted", prompt, params)))
            late = asyncio.create_task(listen(running, request("late", prompt, params, deadline_seconds=1e-6)))
            await asyncio.to_thread(executor.reached.acquire)
            running.abort("aborted")
            executor.free()
            for failing in (aborted, late):
                with pytest.raises(RequestFaultError, match="Injected was raised while the request was served"):
                    await failing
            assert (await kept).reason() == "length"

    asyncio.run(run())


def test_a_sampler_that_raises_leaves_the_others_their_tokens() -> None:
    """Also where no kernel draws."""
    params = SamplingParams(temperature=1.0, seed=1, logits_processors=[unchanged])
    prompt, rows = np.array([1, 2]), np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)

    def samplers() -> list[Sampler]:
        return [Sampler(params, prompt, 50, np.zeros(0, np.int64)) for _ in rows]

    wanted, broken = choose(samplers(), rows), samplers()
    broken[1].accept = boom  # type: ignore[method-assign]
    for draw in (None, lambda scores, choices: scores.argmax(1).astype(np.int32)):
        outcomes = choose(broken, rows, draw)
        assert (
            isinstance(outcomes[1], RequestFaultError) and isinstance(outcomes[0], int) and isinstance(outcomes[2], int)
        )
        if draw is None:
            assert [outcomes[0], outcomes[2]] == [wanted[0], wanted[2]]
        broken = samplers()
        broken[1].scores = boom  # type: ignore[method-assign]


def test_callers_never_get_the_exception_of_a_library(draft_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = (3, 1, 4, 1, 5)
    with load(draft_engine, threads=1) as engine:
        (wanted,) = engine.generate([prompt], max_tokens=4)
        calls: tuple[Callable[[], object], ...] = (
            lambda: engine.generate([prompt], max_tokens=4, progress=boom),
            lambda: engine.generate([prompt], max_tokens=4, logits_processors=[boom2]),
            lambda: list(engine.stream(prompt, max_tokens=4, logits_processors=[boom2])),
        )
        for call in calls:
            with pytest.raises(RequestError, match="injected") as caught:
                call()
            assert isinstance(caught.value.__cause__, Injected)
        with monkeypatch.context() as patched:
            patched.setattr(type(engine.tokenizer), "decode", boom)
            for call in (
                lambda: engine.generate([prompt], max_tokens=4),
                lambda: engine.generate([prompt], max_tokens=4, stop="zz"),
                lambda: list(engine.stream(prompt, max_tokens=4)),
                lambda: engine.generate([prompt], max_tokens=4, beam_width=2, stop="zz"),
            ):
                with pytest.raises(RequestFaultError, match="injected"):
                    call()
        assert engine.generate([prompt], max_tokens=4) == [wanted]
        assert engine.loop.scheduler.idle and engine.loop.pool.used == 0


def boom2(ids: list[int], logits: Any) -> Any:
    raise Injected("injected")


class Speechless(BaseException):
    """As an exception whose words cannot be had, either."""

    def __str__(self) -> str:
        raise self


class Unlike(RequestError):
    """Lacks what its class has."""

    def __init__(self) -> None:
        Exception.__init__(self, "half \ud800 a character")


@pytest.mark.parametrize("error", [Speechless, Unlike])
def test_an_exception_that_cannot_speak_is_its_requests_too(
    error: type[BaseException], draft_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*given: object) -> Any:
        raise error

    prompt = (3, 1, 4, 1, 5)
    with load(draft_engine, threads=1) as engine:
        monkeypatch.setattr(Sampler, "adjusted", raising)
        with pytest.raises(RequestFaultError, match=f"{error.__name__} was raised") as caught:
            engine.generate([prompt], max_tokens=4, logits_processors=[unchanged])
        assert str(caught.value).encode() and isinstance(caught.value.__cause__, error)
        assert len(engine.generate([prompt], max_tokens=4)[0].token_ids) == 4


def test_what_one_thread_waits_for_does_not_end_the_others(tiny: Path) -> None:
    """The leader looks for all threads whether they have what they wait for."""
    engine = load(tiny)
    executor = hold(engine)
    try:
        with ThreadPoolExecutor(2) as pool:
            leader = pool.submit(engine.generate, [(3, 1, 4, 1, 5)], SamplingParams(max_tokens=6))
            executor.reached.acquire()

            def follow() -> None:
                with engine.shared_loop.serving([Scoring([1, 2], engine.info.vocab_size)]) as until:
                    until(boom)

            follower = pool.submit(follow)
            while len(engine.shared_loop._wishes) < 2:
                threading.Event().wait(0.001)
            executor.free()
            with pytest.raises(RequestFaultError, match="injected"):
                follower.result()
            assert leader.result()[0].finish_reason == "length"
    finally:
        executor.free()
        engine.close()
