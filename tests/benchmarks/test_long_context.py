"""The table of compressed contexts divides gains by what the bytes of rows predict."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

import llmc
from benchmarks.contestants.llmc_engine import LlmcEngine
from benchmarks.long_context import PEER, Engine, Times, gains_table, prefill_share, step_bytes, table
from llmc.engine_format import read_engine
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.step_shape import StepShape
from tests.tiny_models import tiny_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long-context")
    model, path = tiny_checkpoint("llama", folder / "model"), folder / "engine.llmc"
    llmc.build(model, path, target="cpu", dtype="float32", max_model_len=256)
    return path


def test_each_row_adds_its_keys_and_values(engine: Path) -> None:
    program = read_engine(engine, check_weights=False).program
    of_rows = [step_bytes(program, rows) for rows in (64, 128, 192)]
    row = sum(cache.kv_heads * sum(cache.widths()) * 4 for cache in program.caches)
    assert of_rows[2] - of_rows[1] == of_rows[1] - of_rows[0] == 64 * row


def test_a_gain_as_predicted_is_all_of_it(engine: Path) -> None:
    program = read_engine(engine, check_weights=False).program
    gain = step_bytes(program, 192) / step_bytes(program, 48)
    engines = [
        Engine("whole", "auto", None, engine),
        Engine("quarter", "auto", "snapkv:share=25,window=16", engine),
        Engine("none", "auto", "snapkv:budget=96,window=16", engine),
    ]
    results = {
        name: {192: Times([1.0], [seconds])} for name, seconds in (("whole", gain), ("quarter", 1.0), ("none", gain))
    }
    console = Console(record=True, width=200)
    console.print(gains_table(engines, results, 192))
    lines = [line.split("│") for line in console.export_text().splitlines() if "snapkv" in line]
    assert [(line[2].strip(), line[5].strip()) for line in lines] == [("48", "100%"), ("96", "0%")]


def test_longer_prompts_have_more_pairs(engine: Path) -> None:
    """With a model that has no products of integers, the ratio of the operations per token."""
    program = read_engine(engine, check_weights=False).program

    def operations(tokens: int) -> float:
        values = StepShape.prefill(tokens).values()
        return sum(evaluate_expression(launch.flops, values) for launch in program.launches) / tokens

    share = prefill_share(program, 200, 100)
    assert share == pytest.approx(operations(100) / operations(200)) and share < 1


def test_steps_alone_need_no_prompt(engine: Path) -> None:
    """All rows that the engine has room for, but those of the steps."""
    rows = 256 - 5
    assert len(LlmcEngine(engine, 1).decode_behind(rows, 4)) == 4
    assert Engine("quarter", "auto", "snapkv:share=25,window=16", engine).rows(192) == 48
    results = {"llmc": {64: Times(decode=[0.5]), rows: Times(decode=[1.0])}, PEER: {rows: Times(decode=[3.0])}}
    results[PEER][64] = results[PEER][rows]
    console = Console(record=True, width=200)
    console.print(table(results, rows, 64))
    text = console.export_text()
    assert "prefill" not in text and [each in text for each in ("0.50x", "3.00x")] == [True, True]
