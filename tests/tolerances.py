"""How far a result may be from its reference, by the dtype in which it is computed and for what is compared."""

from __future__ import annotations

import torch

# Of elements of order one, against a reference that rounds at the same places: a few units in the last place.
ELEMENTS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
