"""What --speculative-config takes and refuses."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest

from llmc.errors import OptionError
from llmc.runtime.speculation.acceptance_config import AcceptanceConfig, AcceptanceMethod
from llmc.runtime.speculation.config import (
    METHODS,
    HiddenConfig,
    NgramConfig,
    SpeculativeConfig,
    SuffixConfig,
    new_drafter,
    parse_speculative_config,
)
from llmc.runtime.speculation.config_values import SHARED_KEYS
from llmc.runtime.speculation.ngram import NgramDrafter
from llmc.runtime.speculation.suffix import SuffixDrafter

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (NGRAM, NgramConfig(num_speculative_tokens=4, prompt_lookup_min=5, prompt_lookup_max=5)),
        (
            {**NGRAM, "prompt_lookup_max": 3},
            NgramConfig(num_speculative_tokens=4, prompt_lookup_min=3, prompt_lookup_max=3),
        ),
        (
            {**NGRAM, "prompt_lookup_min": 2},
            NgramConfig(num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=2),
        ),
        (
            {**NGRAM, "prompt_lookup_min": 2, "prompt_lookup_max": 4, "draft_sample_method": "probabilistic"},
            NgramConfig(num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4),
        ),
        (
            {"method": "suffix"},
            SuffixConfig(
                num_speculative_tokens=24,
                suffix_decoding_max_tree_depth=24,
                suffix_decoding_max_cached_requests=10_000,
                suffix_decoding_max_spec_factor=1.0,
                suffix_decoding_min_token_prob=0.1,
            ),
        ),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 8, "suffix_decoding_max_cached_requests": 0},
            SuffixConfig(
                num_speculative_tokens=8,
                suffix_decoding_max_tree_depth=8,
                suffix_decoding_max_cached_requests=0,
                suffix_decoding_max_spec_factor=1.0,
                suffix_decoding_min_token_prob=0.1,
            ),
        ),
    ],
)
def test_defaults_are_those_of_vllm(given: dict[str, Any], expected: SpeculativeConfig) -> None:
    assert parse_speculative_config(given) == parse_speculative_config(json.dumps(given)) == expected


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_only_the_acceptance_that_trees_have_makes_them(method: str) -> None:
    for acceptance, trees in (("invariant", True), ("rejection", False), ("typical", False)):
        given = {"method": method, "num_speculative_tokens": 4, "rejection_sample_method": acceptance}
        config = parse_speculative_config(given)
        assert isinstance(config, HiddenConfig) and (config.tree_width > 1) == trees


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_chains_are_longer_than_trees_are_large(method: str) -> None:
    given = {"method": method, "num_speculative_tokens": 200, "tree_width": 1}
    assert parse_speculative_config(given).num_speculative_tokens == 200


def test_each_key_of_the_acceptance_is_of_every_method() -> None:
    given: dict[str, Any] = {"rejection_sample_method": "typical", "draft_sample_method": "probabilistic"}
    given |= {field.name: field.default for field in fields(AcceptanceConfig) if field.metadata}
    assert {"method", *given} == set(SHARED_KEYS)
    for method in ("ngram", "suffix", "draft_model", "eagle3", "mtp"):
        own = {"model": "d.llmc"} if method == "draft_model" else {}
        config = parse_speculative_config({"method": method, "num_speculative_tokens": 4, **own, **given})
        assert config.acceptance == AcceptanceConfig(method=AcceptanceMethod.TYPICAL)


def test_each_method_has_its_drafter() -> None:
    for config, kind in ((NGRAM, NgramDrafter), ({"method": "suffix"}, SuffixDrafter)):
        parsed = parse_speculative_config(config)
        assert isinstance(parsed, NgramConfig | SuffixConfig)
        assert isinstance(new_drafter(parsed), kind)


@pytest.mark.parametrize(
    ("given", "problem", "fix"),
    [
        ("{", "'{' is not JSON: Expecting property name", 'give \'{"method"'),
        ("[" * 100_000, "is not JSON", "give"),
        ("ngram", "'ngram' is not JSON", "give"),
        ("[4]", r"\[4\] is not a JSON object", "give"),
        ("4", "4 is not a JSON object", "give"),
        ({}, "no method is given", f"give one of {', '.join(METHODS)}"),
        ({"method": None}, "no method is given", f"give one of {', '.join(METHODS)}"),
        ({"method": "ngrams"}, "unknown method 'ngrams'", "did you mean 'ngram'?"),
        ({"method": ["ngram"]}, r"unknown method \['ngram'\]", ""),
        (
            {"method": "oracle"},
            "unknown method 'oracle'",
            f"give one of {', '.join(METHODS)}",
        ),
        ({"method": "ngram"}, "'ngram' needs num_speculative_tokens", 'add "num_speculative_tokens"'),
        ({**NGRAM, "prompt_lookup_mx": 3}, "no key 'prompt_lookup_mx'", "did you mean 'prompt_lookup_max'?"),
        ({**NGRAM, "zzz": 3}, "no key 'zzz'", "its keys are num_speculative_tokens, prompt_lookup_min"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 3}, "'ngram' has no key", ""),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens cannot be 0", "from 1 to 1024"),
        ({**NGRAM, "num_speculative_tokens": "4"}, "num_speculative_tokens cannot be '4'", "a whole number"),
        ({**NGRAM, "num_speculative_tokens": 4.0}, "num_speculative_tokens cannot be 4.0", "a whole number"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens cannot be True", "a whole number"),
        ({**NGRAM, "num_speculative_tokens": 10**6}, "cannot be 1000000", "to 1024"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min 4 is more than", "at least"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "cannot be 1.5", "a number from 0 to 1"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": NaN}', "cannot be nan", "a number from 0 to 1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -1}, "cannot be -1", "a number from 0 to 1000"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "'suffix' has no key 'prompt_lookup_max'", ""),
        ({"method": "draft_model", "num_speculative_tokens": 4}, "needs model", 'add "model": "draft.llmc"'),
        ({"method": "draft_model", "model": 4, "num_speculative_tokens": 4}, "model cannot be 4", "give a path"),
        ({**NGRAM, "rejection_sample_method": "standard"}, "cannot be 'standard'", "invariant, rejection, typical"),
        (
            {**NGRAM, "posterior_alpha": 0.3},
            "applies to the rejection_sample_method 'typical', not to 'invariant'",
            "add",
        ),
        (
            {**NGRAM, "rejection_sample_method": "typical", "posterior_threshold": 2},
            "posterior_threshold cannot be 2",
            "a number from 0 to 1",
        ),
        ({**NGRAM, "draft_sample_method": "greedy"}, "draft_sample_method cannot be 'greedy'", "set 'probabilistic'"),
        (
            {"method": "medusa", "rejection_sample_method": "typical"},
            "'medusa' drafts trees; .*'typical' needs chains",
            "leave",
        ),
        ({"method": "lookahead", "rejection_sample_method": "rejection"}, "'lookahead' drafts trees", "leave"),
        (
            {
                "method": "eagle3",
                "num_speculative_tokens": 4,
                "tree_width": 2,
                "rejection_sample_method": "rejection",
            },
            "'eagle3' drafts trees",
            "tree_width 1",
        ),
        ({"method": "medusa", "num_speculative_tokens": 64}, "64 is more than the 63 drafts", "give at most 63"),
        ({"method": "lookahead", "num_speculative_tokens": 200}, "200 is more than the 63 drafts", "give at most 63"),
        ({"method": "eagle3", "num_speculative_tokens": 200}, "200 is more than the 63 drafts", "tree_width 1"),
        ({"method": "mtp", "num_speculative_tokens": 200, "tree_width": 2}, "a tree, which 'mtp' makes", "at most"),
        ({"method": "mtp", "num_speculative_tokens": 2000, "tree_width": 1}, "cannot be 2000", "from 1 to 1024"),
        ({**NGRAM, "rejection_sample_methd": "typical"}, "no key", "did you mean 'rejection_sample_method'?"),
        ({**NGRAM, "zzz": 3}, "no key 'zzz'", ", ".join(SHARED_KEYS)),
        ({"method": "eagle3", "model": "d"}, "'eagle3' is in the engine", "--speculative d"),
        ({"method": "mtp", "model": "d"}, "'mtp' is in the engine", "llmc build MODEL --speculative d"),
        ({"method": "mtp", "num_speculative_tokens": 4, "tree_width": 0}, "tree_width cannot be 0", "from 1 to 63"),
    ],
)
def test_what_cannot_be_is_refused_with_what_was_seen(given: Any, problem: str, fix: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_speculative_config(given)
    assert re.search(problem, caught.value.problem)
    assert fix in str(caught.value.fix)
    assert caught.value.at == "--speculative-config"
