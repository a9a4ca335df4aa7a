"""llmc::squared_linear: the kernels of all products, which square at the end."""

from __future__ import annotations

import torch

from llmc.codegen.triton.kernels.products.linear import OF_ALL, product_template
from llmc.codegen.triton.kernels.products.product import Epilogue

squared_linear = product_template(torch.ops.llmc.squared_linear.default, lambda call: Epilogue("relu2"), OF_ALL)
