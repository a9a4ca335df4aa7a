"""The cost of a launch, and the machine rates that apply to it."""

from dataclasses import dataclass, replace

from llmc.program import Launch, Program

PLAIN = "F32"
LOOKUP = "lookup"
# Keys that a CPU's attention multiplies together: kAttentionKeys of attention_products.h.
ATTENTION_KEYS = 64


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


def launch_costs(program: Program) -> tuple[LaunchCost, ...]:
    return tuple(map(launch_cost, program.launches))


def launch_cost(launch: Launch) -> LaunchCost:
    """The cost of one. Products of CPU engines are the launches that have an `in`."""
    plain = LaunchCost(launch.bytes_moved, launch.flops, "0", kind_of(launch))
    if launch.grid:
        return plain
    if launch.family == "paged_attention":
        rows = f"{launch.number('heads') // launch.number('kv_heads')}*T"
        return replace(plain, rows=rows, parts="R", depth="C", depth_tile=ATTENTION_KEYS, is_shared=True)
    if "in" not in launch.arguments:
        return plain
    rows = str(launch.arguments["tokens"])
    return replace(plain, packed=f"{launch.number('in')}*{rows}", rows=rows, is_shared=True)


def kind_of(launch: Launch) -> str:
    """The kind that decides a kernel's rates, in addition to its shape. For a C++ kernel: the operands of products and
    attention, or the lookup of scattered rows. For a GPU kernel: its widest float that is not fp32. Otherwise F32."""
    arguments = launch.arguments
    if launch.grid:
        return next((dtype for dtype in ("BF16", "F16") if dtype in launch.dtypes), PLAIN)
    if launch.family == "embedding_panels":
        return LOOKUP
    if launch.family == "paged_attention":
        # The dtype of newest rows that are apart is a third one: there are few of them.
        return f"attention {'·'.join(launch.dtypes[:2]).lower()}"
    if "in" not in arguments:
        return PLAIN
    (dtype,) = launch.dtypes
    if "format" not in arguments:
        return dtype
    x = dtype if arguments["x_format"] == "none" else arguments["x_format"]
    return f"{arguments['format']}{':asym' if arguments['has_zeros'] else ''}·{x}"
