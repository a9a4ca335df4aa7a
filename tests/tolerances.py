"""How far a result may be from its reference, by the dtype in which it is computed and for what is compared."""

from __future__ import annotations

import torch

# Of elements of order one, against a reference that rounds at the same places: a few units in the last place.
ELEMENTS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
# Of ‖out - reference‖ / ‖reference‖ of one GPU kernel; the same of those that read keys and values as codes.
GPU_KERNELS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CODED_CACHES = GPU_KERNELS | {torch.bfloat16: 1.2e-2}
# The same of products of fp8 codes on a device: Hopper's matrix units add them with 14 bits.
FP8_SUMS = 5e-4
# The same of products that norm x on the way, where it is not rounded between the two; and where it becomes codes.
NORMED_PRODUCTS = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
NORMED_CODES = {torch.float32: 2e-3, torch.float16: 4e-3}
# Of the logits of a whole step: of a CPU engine, and of a GPU program, in which sums are taken in another order.
CPU_STEPS = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
GPU_STEPS = {torch.float32: 1e-4, torch.float16: 2e-2}
# Of the logits' spread: after passes, against the captured graph; of fp32 and bf16 engines, against the model.
PASSES = 1e-4
ENGINES = 1e-3
BF16_ENGINES = 0.04
