"""A server that drafts: the same answers, and what came of the drafts in /metrics and on the live page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.server.conftest import serving

OPEN_GATE = Path(__file__).parent / "open_gate"
# What comes next stands in the prompt.
BODY = {"prompt": "my lord, my lord, my lord, my lord, my lord, my", "max_tokens": 24, "temperature": 0, "logprobs": 2}


@pytest.fixture(scope="module")
def drafting(engine_directory: Path) -> Iterator[httpx.Client]:
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    paths = os.pathsep.join(filter(None, (str(OPEN_GATE), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": paths}
    with (
        serving(engine_directory, "--speculative-config", config, environment=environment) as live,
        live.client() as client,
    ):
        yield client


def test_answers_are_those_of_a_server_that_does_not(drafting: httpx.Client, client: httpx.Client) -> None:
    answers = [server.post("/v1/completions", json=BODY).json()["choices"] for server in (drafting, client)]
    assert answers[0] == answers[1] and len(answers[0][0]["logprobs"]["tokens"]) == 24


def test_drafts_are_counted_by_vllms_names(drafting: httpx.Client) -> None:
    drafting.post("/v1/completions", json=BODY)
    families = {family.name: family for family in text_string_to_metric_families(drafting.get("/metrics").text)}
    stem = "llmc:spec_decode_num_"
    drafts, tokens, accepted = (
        families[stem + name].samples[0].value for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= tokens and accepted <= tokens
    places = [sample for sample in families[stem + "accepted_tokens_per_pos"].samples if sample.name.endswith("_total")]
    assert [place.labels["position"] for place in places] == ["0", "1", "2"]
    assert sum(place.value for place in places) == accepted
    assert drafting.get("/live").json()["drafts"] == {"tokens": tokens, "accepted": accepted}
    (acceptance,) = families["llmc:spec_decode_acceptance"].samples
    assert (acceptance.labels["method"], acceptance.labels["lossy"]) == ("invariant", "false")


def test_a_server_that_does_not_has_no_such_figures(client: httpx.Client) -> None:
    assert "spec_decode" not in client.get("/metrics").text
    assert client.get("/live").json()["drafts"] == {}
