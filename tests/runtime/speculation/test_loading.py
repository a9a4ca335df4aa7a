"""`speculation=` of llmc.load, and `--speculative-config` of the verbs that open an engine."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from llmc import LLM, load
from llmc.cli.serve import config_values
from llmc.errors import LoadWarning, OptionError
from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.replicas.worker import read_options
from tests.cli.command import MODEL, assert_user_error, llmc
from tests.runtime.tiny_engine import LIMITS, tiny_model, write_tiny_engine

NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 3}
ROOM = min(LIMITS.max_batch_tokens, LIMITS.max_logit_rows) - 1


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny.llmc")


@pytest.mark.parametrize("config", [NGRAM, SUFFIX])
def test_what_is_drafted_changes_no_token(path: Path, config: dict[str, Any]) -> None:
    prompts = [[1, 2, 3], [4] * 8, [5, 6] * 5, [7]]
    with load(path, speculation=json.dumps(config)) as engine:
        assert engine.loop.speculation is not None
        completions = engine.generate(prompts, max_tokens=24)
    assert [list(c.token_ids) for c in completions] == [tiny_model().greedy(p, 24) for p in prompts]


def test_without_a_configuration_nothing_is_drafted(path: Path) -> None:
    with load(path) as engine:
        assert engine.loop.speculation is None


def test_more_drafts_than_a_step_has_room_for_are_refused(path: Path) -> None:
    load(path, speculation={**NGRAM, "num_speculative_tokens": ROOM}).close()
    with pytest.raises(OptionError, match=f"is {ROOM + 1}, and a step has room for {ROOM}") as caught:
        load(path, speculation={**NGRAM, "num_speculative_tokens": ROOM + 1})
    assert caught.value.fix is not None and f"give {ROOM} at most" in caught.value.fix
    with pytest.raises(OptionError, match="is 3, and a step has room for 0") as caught:
        load(path, speculation=NGRAM, max_step_tokens=1)
    assert caught.value.fix is not None and caught.value.fix.startswith("rebuild")


def test_too_few_rows_of_logits_for_all_drafts_are_told(path: Path) -> None:
    """Four sequences with three drafts want sixteen rows; one has room in the six that there are."""
    with pytest.warns(LoadWarning, match=r"has 6 rows .* 3 drafts each need 16") as told:
        load(path, speculation=NGRAM).close()
    assert "--max-logit-rows 16" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoadWarning)
        load(path, speculation=NGRAM, max_step_tokens=6).close()
        load(path, speculation=NGRAM, max_sequences=1).close()


def test_llm_takes_it_for_a_directory(path: Path) -> None:
    with LLM(path, speculation=SUFFIX) as llm:
        assert llm.engine.loop.speculation is not None


@pytest.mark.parametrize(
    "verb",
    [
        ("run", MODEL, "-p", "A"),
        ("chat", MODEL),
        ("serve", MODEL),
        ("bench", "throughput", MODEL),
        ("bench", "latency", MODEL),
    ],
)
def test_verbs_refuse_a_configuration_before_they_build_or_load(verb: tuple[str, ...]) -> None:
    outcome = llmc(*verb, "--speculative-config", '{"method": "ngran", "num_speculative_tokens": 4}')
    assert_user_error(outcome, "unknown method 'ngran'", "at: --speculative-config", "did you mean 'ngram'?")
    assert "compil" not in outcome.err


def test_bench_takes_it(path: Path) -> None:
    outcome = llmc(
        "bench",
        "latency",
        path,
        *("--output-len", "4", "--input-len", "4", "--iterations", "1"),
        *("--speculative-config", json.dumps(NGRAM)),
    )
    assert outcome.code == 0, outcome.err
    assert "drafts accepted" in outcome.out and "tokens per step with drafts" in outcome.out


def test_the_configuration_file_of_the_server_may_spell_it_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("speculative-config: {method: suffix, num_speculative_tokens: 3}\n")
    values = config_values(file, {"speculative_config"})
    assert json.loads(values["speculative_config"]) == SUFFIX


def test_replicas_get_it(tmp_path: Path) -> None:
    text = json.dumps(SUFFIX)
    given = ServeOptions(engine=tmp_path, speculative_config=text)
    line = json.dumps({**vars(given), "engine": str(given.engine)})
    assert read_options(line).speculative_config == text
