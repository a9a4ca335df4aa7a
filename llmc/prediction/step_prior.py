"""The time of a step by its tokens, up to a factor, for a machine that has not been measured.

How the time of a step grows with its tokens depends on how many operations a machine does while it reads a byte. A
GPU's data sheet gives that number. CPUs are assumed to be alike, by the formats that products multiply: on two cores
with AVX-512 a step of a model in four bits is bound by arithmetic from about ten tokens on, one in bf16 later.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache

from llmc.prediction.launch_cost import PLAIN, launch_costs
from llmc.prediction.launch_time import predict_launch
from llmc.prediction.rates import KindRates, Rates
from llmc.prediction.step_shape import StepShape
from llmc.program import Program
from llmc.targets import GPU_TARGETS

# Operations per byte read, by the formats that a product multiplies.
_CODES, _BF16, _FP32 = 32.0, 16.0, 8.0
# Cached positions of a request.
_CONTEXT = 256


def step_prior(program: Program, target: str) -> Callable[[int], float] | None:
    """A function from the tokens of a step, each of which needs its logits, to seconds; None for torch."""
    if not program.launches:
        return None
    context = min(_CONTEXT, program.limits.max_model_len)
    gpu = next((candidate for candidate in GPU_TARGETS if candidate.name == target.split(",")[0]), None)
    if gpu is not None:
        from llmc.prediction.device_step import predict_decode  # imports torch

        return cache(lambda tokens: predict_decode(program, gpu, tokens, context).seconds)
    # Layers are alike: most launches cost the same as others.
    costs = Counter(zip(launch_costs(program), (launch.only for launch in program.launches), strict=True))
    rates = _typical_rates({cost.kind for cost, _ in costs})

    def seconds(tokens: int) -> float:
        shape = StepShape.decode(requests=tokens, context=context)
        return sum(
            count * predict_launch(cost, shape, rates)
            for (cost, only), count in costs.items()
            if only is None or only.holds(tokens=tokens, logit_rows=tokens)
        )

    return cache(seconds)


def _typical_rates(kinds: set[str]) -> Rates:
    """Rates relative to a bandwidth of one byte per second, because only ratios matter."""
    rates = {PLAIN: KindRates(_FP32)} | {kind: KindRates(_operations(kind)) for kind in kinds}
    return Rates(bandwidth=1.0, kinds=rates, launch=0.0, measured=False)


def _operations(kind: str) -> float:
    """The operations of a kind as `kind_of` names it: FORMAT·X, a dtype, attention."""
    x = kind.rpartition("·")[2]
    return _CODES if x.startswith("int8") else _BF16 if "bf16" in x.lower() else _FP32
