"""Predict how long a launch takes from its cost and from what the machine was measured to deliver.

    transfer   = bytes / bandwidth
    arithmetic = flops / (multiply · the share of it that so many rows reach)
    seconds    = launch + packed / pack + max(transfer, arithmetic) + serial · min(transfer, arithmetic)

The roofline (Williams, Waterman and Patterson 2009) is flops / multiply alone, and serial = 0: transfer and arithmetic
hide each other fully. On a CPU they do not, because loads of operands in cache and from memory share the same units
(the ECM model: Treibig and Hager 2010), so `serial` is measured. And what is multiplied must first be brought into
registers and made numbers (bf16 widened, codes decoded), once for a tile of rows: with one row that costs more than
multiplying, and a tile that is not full as much as one that is. So what a kernel reaches of its best rate is measured
for several numbers of rows. `packed`: elements of x that a CPU's matrix product brings into its own order before it
multiplies. No number here is fitted to a model's measured steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from llmc.graph.cost_expression import evaluate_expression
from llmc.graph.step_shape import StepShape
from llmc.program import DeviceKernel, Launch, Program
from llmc.targets import GpuTarget

PLAIN = "F32"
LOOKUP = "lookup"
# Keys that a CPU's attention multiplies together: kAttentionKeys of attention_products.h.
ATTENTION_KEYS = 64
_SUFFIX = re.compile(r"^llmc_.*?_(f32|bf16)")
_ATTENTION = re.compile(r"^llmc_paged_attention_(\w+?)_(\w+)$")


@dataclass(frozen=True)
class Reach:
    """The share of `multiply` that a kernel reaches with so many rows."""

    rows: int
    share: float


@dataclass(frozen=True)
class KindRates:
    """How fast one kind of kernel works.

    multiply: FLOP a second of its arithmetic on operands in cache, at best. reach: what it gets to with how many rows,
    fewest first; none: its best with any. pack: elements of x a second; None where nothing is packed. serial: the part
    of the shorter of transfer and arithmetic that the longer does not hide; above 1 where memory is read slower than
    in one long stream. bandwidth: bytes a second where memory is not read in a stream at all; None: the machine's.
    """

    multiply: float
    reach: tuple[Reach, ...] = ()
    pack: float | None = None
    serial: float = 0.0
    bandwidth: float | None = None

    def share(self, rows: float) -> float:
        """The share of `multiply` with so many rows. Between two that were measured, the time of all rows together
        grows evenly; beyond them, it is that of the nearest for fewer rows and in proportion for more."""
        if not self.reach:
            return 1.0
        first, last = self.reach[0], self.reach[-1]
        for few, many in pairwise(self.reach):
            if few.rows <= rows <= many.rows:
                part = (rows - few.rows) / (many.rows - few.rows)
                return rows / ((1 - part) * few.rows / few.share + part * many.rows / many.share)
        return last.share if rows > last.rows else first.share * rows / first.rows


@dataclass(frozen=True)
class Rates:
    """What a machine delivers.

    bandwidth: bytes a second. kinds: by a launch's kind (`kind_of`). launch: seconds to share a launch's work among
    threads. measured: on this machine, not from a data sheet.
    """

    bandwidth: float
    kinds: dict[str, KindRates]
    launch: float
    measured: bool

    def of(self, kind: str) -> KindRates:
        """The kind's; one that nobody measured is taken to multiply as fast as any."""
        known = self.kinds.get(kind)
        return KindRates(max(each.multiply for each in self.kinds.values())) if known is None else known


@dataclass(frozen=True)
class LaunchCost:
    """A launch's cost as expressions of a step's symbols (graph/cost.py). kind: whose rates apply.

    rows / parts: rows of one product, which share what is brought into registers. depth / parts: what each of them is
    multiplied with, in whole tiles of depth_tile. is_shared: among threads, whatever the step.
    """

    bytes_moved: str
    flops: str
    packed: str
    kind: str
    rows: str = "T"
    parts: str = "1"
    depth: str = "1"
    depth_tile: int = 1
    is_shared: bool = False


def gpu_rates(target: GpuTarget) -> Rates:
    """The data sheet's; a launch costs nothing, since decode steps run as graphs."""
    kinds = {dtype: KindRates(target.rate(dtype)) for dtype in ("F32", "F16", "BF16")}
    return Rates(target.bandwidth, kinds, 0.0, measured=False)


def launch_costs(program: Program) -> tuple[LaunchCost, ...]:
    """The cost of each of the program's launches."""
    kernels = {kernel.name: kernel for kernel in program.kernels}
    return tuple(_launch_cost(launch, kernels) for launch in program.launches)


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
    """Seconds of the step's launches together."""
    pairs: Iterable[tuple[Launch, LaunchCost]] = zip(program.launches, launch_costs(program), strict=True)
    return sum(
        predict_launch(cost, step, rates)
        for launch, cost in pairs
        if launch.runs(tokens=step.tokens, logit_rows=step.logit_rows)
    )


def kind_of(launch: Launch) -> str:
    """What decides a C++ kernel's rates beside its shape: the operands of products and of attention; that it looks up
    rows that do not lie together; else F32."""
    arguments = launch.arguments
    if launch.kernel.startswith("llmc_embedding_panels"):
        return LOOKUP
    attention = _ATTENTION.match(launch.kernel)
    if attention is not None:
        return f"attention {attention[1]}·{attention[2]}"
    suffix = _SUFFIX.search(launch.kernel)
    if "in" not in arguments or suffix is None:
        return PLAIN
    dtype = suffix[1].upper()
    if "format" not in arguments:
        return dtype
    x = dtype if arguments["x_format"] == "none" else arguments["x_format"]
    return f"{arguments['format']}{':asym' if arguments['has_zeros'] else ''}·{x}"


def _launch_cost(launch: Launch, kernels: Mapping[str, DeviceKernel]) -> LaunchCost:
    """Products of CPU engines are the launches that have an `in`."""
    arguments, device = launch.arguments, kernels.get(launch.kernel)
    if device is not None:
        return LaunchCost(launch.bytes_moved, launch.flops, "0", _device_kind(device))
    kind = kind_of(launch)
    if kind.startswith("attention"):
        group = int(str(arguments["heads"])) // int(str(arguments["kv_heads"]))
        tiles = ("C", ATTENTION_KEYS)
        return LaunchCost(launch.bytes_moved, launch.flops, "0", kind, f"{group}*T", "R", *tiles, is_shared=True)
    if "in" not in arguments:
        return LaunchCost(launch.bytes_moved, launch.flops, "0", kind)
    rows = str(arguments["tokens"])
    packed = f"{arguments['in']}*{rows}"
    return LaunchCost(launch.bytes_moved, launch.flops, packed, kind, rows, is_shared=True)


def _device_kind(kernel: DeviceKernel) -> str:
    """BF16 or F16 where a GPU kernel reads such elements, else F32."""
    types = {parameter.type for parameter in kernel.parameters}
    return next((dtype for text, dtype in (("*bf16", "BF16"), ("*fp16", "F16")) if text in types), PLAIN)
