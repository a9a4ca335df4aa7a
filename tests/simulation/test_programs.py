"""The programs of a model for layouts of ranks."""

from __future__ import annotations

import pytest

from llmc.errors import PassError
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.program import RankLayout
from llmc.simulation.programs import ModelPrograms
from llmc.targets import CPU_TARGETS, cpu_target_here
from tests.graph_builder import GraphBuilder


def test_stages_are_not_simulated_with_rates_that_are_measured_here() -> None:
    b = GraphBuilder()
    graph, source = b.finish(b.rms_norm(b.embedded(), "norm"))
    here = next(target for target in CPU_TARGETS if cpu_target_here(target.name) is not None)
    programs = ModelPrograms(graph, (), BuildOptions(), here, ModelData(source, None, lambda what, done, of: None))
    with pytest.raises(PassError, match="stages are not simulated"):
        programs.program(RankLayout(1, 2))
