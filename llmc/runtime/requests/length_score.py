"""The score of finished beams: the sum of log-probabilities over a power of the length."""

import math
from decimal import Decimal

# The magnitude of a power's natural logarithm up to which a float holds the power and what is divided by it.
_LARGEST_EXPONENT = 300.0
# Decimals have a wider range of exponents, and compare with floats exactly.
Score = float | Decimal


def length_score(total: float, length: int, penalty: float) -> Score:
    """total / length**penalty, for any penalty. length: at least 1."""
    if abs(penalty * math.log(length)) < _LARGEST_EXPONENT:
        return float(total / length**penalty)
    return Decimal(total) / Decimal(length) ** Decimal(penalty)
