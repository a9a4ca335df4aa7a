"""explain, diff and bisect as a user sees them: what they print, their exit codes, and bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from llmc import compiler
from llmc.frontends import capture as graph_capture
from llmc.frontends.captured import Captured
from llmc.options import BuildOptions, parse_options
from llmc.settings import settings
from tests.cli.command import MODEL, assert_user_error, llmc
from tests.tiny_models import tiny_checkpoint

FAULTS = Path(__file__).parent.parent / "debug" / "planted_faults.py"
WRONG = f"{FAULTS}:wrong_epsilon"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", autouse=True)
def captured_once() -> Iterator[None]:
    """Every command captures its model anew; here all take the first capture, which no pass changes."""
    capture_anew = graph_capture.capture

    @cache
    def remembered(model: Path, dtype: str) -> Captured:
        return capture_anew(model, parse_options({"dtype": dtype}))

    def captured(model: Path, options: BuildOptions, *, may_lack_weights: bool = False) -> Captured:
        return remembered(model, options.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_capture, "capture", captured)
        patch.setattr(compiler, "capture", captured)
        yield


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "engine.llmc"
    assert llmc("build", model, "-o", path, "--target", "reference", "--max-model-len", "64", "--strict").code == 0
    return path


def test_explain_begins_with_the_coverage(model: Path, engine: Path) -> None:
    outcome = llmc("explain", model, "--strict")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == f"coverage of {model}"
    assert "  ✓ 2 of 2 attentions paged" in lines and "  ✓ 5 of 5 RMSNorms fused" in lines
    assert "near-misses: 1" in lines
    # The engine says the same of itself.
    assert llmc("explain", engine).out.splitlines()[1:] == lines[1:]


def test_explain_one_pass_one_node_and_json(model: Path) -> None:
    text = llmc("explain", model, "--pass", "fuse_rms_norm").out
    assert text.startswith("fuse_rms_norm (reorder): 5 rewrites, 0 refused") and "self.weight * hidden_states" in text
    node = llmc("explain", model, "--node", "rms_norm_1").out
    assert "made by fuse_rms_norm #" in node
    data = json.loads(llmc("explain", model, "--json").out)
    assert data["error"] is None
    assert {"attentions", "RMSNorms"} <= {entry["what"] for entry in data["coverage"]}


def test_a_shortfall_is_an_error_if_strict(model: Path, tmp_path: Path) -> None:
    plain = llmc("explain", model, "--disable-pass", "merge_qkv")
    assert plain.code == 0 and "✗ 0 of 2 groups of products of one input merged; 2 left over" in plain.out
    strict = ("--disable-pass", "merge_qkv", "--strict")
    assert_user_error(llmc("explain", model, *strict), "not everything is covered", "did not run: merge_qkv")
    built = llmc("build", model, "-o", tmp_path / "e.llmc", "--target", "reference", *strict)
    assert_user_error(built, "0 of 2 groups of products of one input merged")
    assert not any(tmp_path.iterdir())


def test_diff_marks_the_first_pass_over_its_budget(model: Path) -> None:
    outcome = llmc("diff", model, "--passes-from", WRONG, "--passes", "simplify_layout..merge_qkv", "--nodes")
    assert outcome.code == 1, outcome.err
    assert "✗ wrong_epsilon is the first pass over its budget" in outcome.out
    assert "rms_norm_2 → wrong_epsilon_rms_norm: max" in outcome.out
    assert "fuse_rms_norm" not in outcome.out
    data = json.loads(llmc("diff", model, "--passes-from", WRONG, "--json").out)
    assert data["first_over"] == "wrong_epsilon" and len(data["tokens"]) == 32


def test_diff_of_a_clean_model_and_of_two_engines(model: Path, engine: Path) -> None:
    clean = llmc("diff", model, "--tokens", "1,2,3,4,5,6,7,8")
    assert clean.code == 0 and "every pass stays within its numerics class" in clean.out
    same = llmc("diff", engine, engine)
    assert "the same model, target, options, passes" in same.out and "max |Δ| 0," in same.out
    assert json.loads(llmc("diff", engine, engine, "--json").out)["changes"] == []


def test_diff_shows_what_dropped_rows_cost(model: Path) -> None:
    text = "stride:step=2,recent=16,rows=16"
    given = (model, "--length", "100", "--kv-compression", text)
    assert_user_error(
        llmc("diff", *given), "moves rows of the cache", "--passes ..compress_kv_cache; or read at most 48"
    )
    data = json.loads(llmc("diff", *given, "--passes", "..compress_kv_cache", "--json").out)
    assert data["passes"][-1]["name"] == "compress_kv_cache" and data["notes"] == []
    assert data["passes"][-1]["difference"]["relative"] > 0
    assert llmc("diff", *given[:-3], "48", *given[-2:]).code == 0
    unused = llmc("diff", *given[:-1], "snapkv:budget=32,window=16", "--passes", "compress_kv_cache")
    assert unused.code == 0 and "drops no row while a prompt of 100 tokens is read" in unused.out


def test_diff_shows_what_quantization_does(model: Path) -> None:
    outcome = llmc("diff", model, "--quantize", "int8,*.o_proj=none", "--kv-cache", "int8", "--json")
    assert outcome.code == 0, outcome.err
    passes = {entry["name"]: entry for entry in json.loads(outcome.out)["passes"]}
    assert passes["quantize_weights"]["rewrites"] == 13 and passes["quantize_weights"]["budget"] == 2.0
    assert 1e-4 < passes["quantize_weights"]["difference"]["relative"] < 0.5
    assert passes["quantize_kv_cache"]["difference"]["relative"] > 0
    explained = llmc("explain", model, "--quantize", "int8,*.o_proj=none", "--kv-cache", "int8", "--strict")
    assert explained.code == 0, explained.err
    for part in (
        "✓ 13 of 15 products quantized; 2 left alone as requested",
        "*.o_proj=none leaves",
        "✓ 2 of 2 KV caches",
    ):
        assert part in explained.out


@pytest.mark.slow
def test_bisect_names_the_rewrite_and_writes_a_reproduction(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "found"
    outcome = llmc("bisect", model, "--passes-from", WRONG, "-o", directory)
    assert outcome.code == 0, outcome.err
    assert "of pass wrong_epsilon: rms_norm_2" in outcome.out
    assert (directory / "repro.py").exists()
    again = (directory / "check.sh").read_text().splitlines()[-1]
    number = again.rpartition("--at ")[2]
    assert f"llmc bisect {model} --passes-from {WRONG} --at {number}" in again
    assert llmc("bisect", model, "--passes-from", WRONG, "--at", number).code == 0
    wrong = llmc("bisect", model, "--passes-from", WRONG, "--at", str(int(number) + 1), "--json")
    assert_user_error(wrong, f"rewrite #{int(number) + 1} does not turn the check from good to bad")


@pytest.mark.slow
def test_bisect_against_the_model_and_with_a_command(model: Path, tmp_path: Path) -> None:
    against = llmc("bisect", model, "--passes-from", WRONG, "--against", model, "-o", tmp_path / "a", "--json")
    assert json.loads(against.out)["pass_name"] == "wrong_epsilon", against.err
    clean = llmc("bisect", model, "--against", model, "-o", tmp_path / "none")
    assert_user_error(clean, "the check holds for the whole pipeline")
    assert not (tmp_path / "none").exists()
    command = 'test "$LLMC_BISECT_NUMBER" -lt 100'
    byhand = llmc("bisect", model, "--check", command, "-o", tmp_path / "b", "--json")
    assert json.loads(byhand.out)["bad"] == 100, byhand.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("explain", "MODEL", "--pass", "fuse_ropes"), ("no pass 'fuse_ropes' ran",)),
        (("explain", "MODEL", "--node", "nothing"), ("about a node 'nothing'",)),
        (("explain", "/no/such/model"), ("/no/such/model",)),
        (("explain", "MODEL", "--disable-pass", "nix"), ("there is no pass 'nix' to disable",)),
        (("explain", "ENGINE", "--disable-pass", "fuse_rope"), ("passes have run already",)),
        (("explain", "MODEL", "--passes-from", "nix"), ("does not name passes", "module:attribute")),
        (
            ("explain", "MODEL", "--target", "onnxruntime", "--kv-cache", "int8"),
            ("have no int8 codes in their caches",),
        ),
        (
            ("explain", "MODEL", "--target", "a100", "--quantize", "fp8-w8a8"),
            ("a100 cannot run the scheme fp8-w8a8", "it runs int8"),
        ),
        (("diff", "MODEL", "--passes", "fuse_rope..nix"), ("there is no pass 'nix'",)),
        (("diff", "MODEL", "--tokens", "1,b"), ("is not a list of token ids",)),
        (("diff", "MODEL", "--text", "/no/such/text"), ("no tokenizer.json",)),
        (("diff", "ENGINE"), ("a single engine cannot be compared",)),
        (("diff", "MODEL", "ENGINE"), ("not an engine",)),
        (("diff", "ENGINE", "ENGINE", "--nodes"), ("cannot be run again",)),
        (("diff", "ENGINE", "ENGINE", "--quantize", "int8"), ("cannot be run again",)),
        (("diff", "MODEL", "--quantize", "int7"), ("unknown quantization scheme 'int7'",)),
        (("explain", "ENGINE", "--kv-cache", "int8"), ("passes have run already", "--kv-cache")),
        (
            ("bisect", "MODEL", "--quantize", "*.q_proj=int4-gptq:g32"),
            ("no calibration text is given", "--calibration FILE"),
        ),
        (("bisect", "ENGINE"), ("cannot be run again",)),
        (("bisect", "MODEL", "--check", "true", "--slower-than", "2"), ("cannot be combined",)),
        (("bisect", "MODEL", "--check", " "), ("the command is empty",)),
        (("bisect", "MODEL", "--check", "/no/such/program"), ("the command cannot be run",)),
        (("bisect", "MODEL", "--tolerance", "-1"), ("--tolerance cannot be -1.0",)),
        (("bisect", "MODEL", "--against", MODEL), ("tokens in its vocabulary",)),
        (("bisect", "MODEL", "-o", "MODEL"), ("the directory is not empty",)),
        (("bisect", "MODEL", "--good", "100000"), ("--good 100000",)),
    ],
    ids=lambda value: " ".join(map(str, value)) if value and value[0] in ("explain", "diff", "bisect") else "",
)
def test_bad_input(model: Path, engine: Path, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    places = {"MODEL": model, "ENGINE": engine}
    assert_user_error(llmc(*(places.get(a, a) if isinstance(a, str) else a for a in arguments)), *parts)


def test_passes_of_a_file_are_built_into_an_engine(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "engine.llmc"
    outcome = llmc("build", model, "-o", path, "--target", "reference", "--passes-from", WRONG)
    assert outcome.code == 0 and "wrong_epsilon" in outcome.out, outcome.err
    assert "wrong_epsilon_rms_norm" in llmc("explain", path, "--pass", "wrong_epsilon").out
    assert "wrong_epsilon" in llmc("passes", "--passes-from", WRONG).out


def test_a_dump_is_asked_for_by_the_environment(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_DUMP", str(tmp_path / "dump"))
    settings.cache_clear()
    try:
        outcome = llmc("explain", model)
    finally:
        settings.cache_clear()
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "dump" / "00-captured.txt").read_text().startswith("stage captured\n")
    assert len(list((tmp_path / "dump").iterdir())) > 40


def test_passes_and_viz_round_tokens_as_their_target_does(model: Path) -> None:
    """With codes of GGUF's formats, CPUs round tokens and GPUs do not."""
    schemes = ("--quantize", "*.q_proj=q4_k", "--dtype", "bfloat16")
    graphs = {target: llmc("passes", model, *schemes, "--graph", "--target", target) for target in ("cpu", "h100")}
    assert all(outcome.code == 0 for outcome in graphs.values()), graphs
    assert graphs["cpu"].out != graphs["h100"].out
    drawn = llmc("viz", model, *schemes, "--format", "json", "--target", "h100")
    assert drawn.code == 0, drawn.err
    assert drawn.out != llmc("viz", model, *schemes, "--format", "json").out


def test_an_unknown_target_names_those_that_there_are(model: Path) -> None:
    for verb in ("passes", "explain", "viz", "diff"):
        assert_user_error(llmc(verb, model, "--target", "h1000"), "h1000", "h100")


def test_an_engine_has_a_target_already(engine: Path) -> None:
    for verb in ("explain", "viz"):
        assert_user_error(llmc(verb, engine, "--target", "h100"), "passes have run already", "--target h100")
