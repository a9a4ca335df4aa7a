"""Models with states run on one rank: states are not divided yet."""

from llmc.errors import PassError
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import record_of
from llmc.passes.serving.keep_states import CONTRACT


def refuse_states(graph: ModelGraph, option: str, ranks: int) -> None:
    """Raise PassError for a graph with states. option: the option that requests `ranks` ranks."""
    nodes = [node for node in graph.graph.nodes if (record := record_of(node)) and record.fallback == CONTRACT]
    if nodes:
        raise PassError(
            f"the model has {len(nodes)} states, and states are not divided among ranks",
            at=f"{option}={ranks}",
            fix=f"build with {option}=1",
        )
