"""Rows that repeat for each layer, and how tables say what they do not show."""

from __future__ import annotations

from llmc.cli.repeated_rows import add_rows, fold
from llmc.cli.table import Column, FittingTable
from tests.cli.test_table import printed


def test_rows_of_one_kind_become_one_with_ranges() -> None:
    rows = [(f"model.layers.{i}.mlp.up_proj", "int4", "4.500", f"{3 + i / 10:.2f}%") for i in range(4)]
    assert fold(rows) == [("model.layers.0-3.mlp.up_proj (×4)", "int4", "4.500", "3.00-3.30%")]


def test_rows_that_differ_in_more_than_figures_stay_apart() -> None:
    rows = [("lm_head", "int8"), ("layers.0.o", "int4"), ("layers.1.o", "int8"), ("layers.2.o", "int4")]
    assert fold(rows) == [("lm_head", "int8"), ("layers.0,2.o (×2)", "int4"), ("layers.1.o", "int8")]


def test_experts_of_layers_show_both_numbers() -> None:
    rows = [(f"layers_{i}_experts_{j}_up", "[8, 4]") for i in (1, 3, 5, 7) for j in range(3)]
    assert fold(rows) == [("layers_1…7_experts_0-2_up (×12)", "[8, 4]")]


def test_shapes_that_differ_are_not_ranges() -> None:
    rows = [("layers.0.q", "8 × 4"), ("layers.1.q", "16 × 4")]
    assert fold(rows) == rows


def test_a_table_says_how_many_rows_it_leaves_out() -> None:
    rows = [(f"part{chr(97 + i)}", "x") for i in range(9)]

    def text(everything: bool) -> str:
        table = FittingTable("", (Column("name"), Column("what")))
        add_rows(table, rows, everything=everything, most=4)
        return printed(table, 80)

    assert "5 more rows" in text(False) and "--all" in text(False) and "partf" not in text(False)
    assert "--all" not in text(True) and "parti" in text(True)
