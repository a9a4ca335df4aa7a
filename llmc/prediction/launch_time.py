"""Predict the time of a launch from its cost and from the measured rates of the machine.

    transfer   = bytes / bandwidth
    arithmetic = flops / (multiply · the share of it that this number of rows reaches)
    seconds    = launch + packed / pack + max(transfer, arithmetic) + serial · min(transfer, arithmetic)

The roofline (Williams, Waterman and Patterson 2009) is flops / multiply alone, and serial = 0: transfer and arithmetic
hide each other fully. On a CPU they do not, because loads of operands in cache and from memory share the same units
(the ECM model: Treibig and Hager 2010), so `serial` is measured. And what is multiplied must first be brought into
registers and made numbers (bf16 widened, codes decoded), once for a tile of rows: with one row that costs more than
multiplying, and a tile that is not full as much as one that is. So what a kernel reaches of its best rate is measured
for several numbers of rows. `packed`: elements of x that a CPU's matrix product brings into its own order before it
multiplies. No number here is fitted to a model's measured steps.
"""

import math

from llmc.prediction.collectives import collective_seconds, is_collective
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.launch_cost import LaunchCost, launch_costs
from llmc.prediction.rates import Rates
from llmc.prediction.step_shape import StepShape
from llmc.program import Program
from llmc.targets.links import SHARED_MEMORY


def predict_launch(cost: LaunchCost, step: StepShape, rates: Rates) -> float:
    """Seconds of a launch in a step of that shape."""
    values, kind = step.values(), rates.of(cost.kind)
    parts = evaluate_expression(cost.parts, values)
    transfer = evaluate_expression(cost.bytes_moved, values) / (kind.bandwidth or rates.bandwidth)
    flops = evaluate_expression(cost.flops, values)
    rows, depth = (evaluate_expression(text, values) / parts for text in (cost.rows, cost.depth))
    whole_tiles = math.ceil(depth / cost.depth_tile) * cost.depth_tile / depth
    arithmetic = flops * whole_tiles / (kind.multiply * kind.share(rows)) if flops > 0 else 0.0
    packing = 0.0 if kind.pack is None else evaluate_expression(cost.packed, values) / kind.pack
    launch = rates.launch if cost.is_shared or step.tokens > 1 else 0.0
    shorter, longer = sorted((transfer, arithmetic))
    return launch + packing + longer + kind.serial * shorter


def predict_step(program: Program, step: StepShape, rates: Rates) -> float:
    """Seconds of the step's launches together, on one machine. rates: the rates of one rank, if there are several."""
    return sum(
        collective_seconds(launch, step, program.ranks, SHARED_MEMORY)
        if is_collective(launch)
        else predict_launch(cost, step, rates)
        for launch, cost in zip(program.launches, launch_costs(program), strict=True)
        if launch.runs(tokens=step.tokens, logit_rows=step.logit_rows)
    )
