"""What is said when there is no GPU, an old driver, or a failing driver call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.errors import EngineFormatError, TargetError
from llmc.program import DeviceBinary
from llmc.runtime.device.device import no_device, open_device
from llmc.runtime.executors.cuda_driver import check, driver_error, load_kernel

ENGINE = Path("model.llmc")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_what_to_run_instead() -> None:
    with pytest.raises(TargetError, match="there is none to run it on") as error:
        open_device(ENGINE)
    assert "llmc build MODEL --target cpu" in str(error.value.fix)


def test_an_old_driver_is_named() -> None:
    reason = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver"
    error = no_device(ENGINE, reason)
    assert "needs a newer GPU driver" in error.problem
    assert "11040" in error.problem
    assert "update the NVIDIA driver" in str(error.fix)


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        ("CUDA_ERROR_NO_BINARY_FOR_GPU", "update the GPU's driver"),
        ("CUDA_ERROR_OUT_OF_MEMORY", "kv_cache_bytes"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_driver_errors_say_what_to_do(status: str, fix: str) -> None:
    error = driver_error(status, "load the kernel", Path("kernels/k.cubin"))
    assert f"could not load the kernel: {status}" in error.problem
    assert fix in str(error.fix)


def test_status_of_the_driver() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert check((driver.CUresult.CUDA_SUCCESS, 5), "load", ENGINE) == (5,)
    with pytest.raises(TargetError, match="CUDA_ERROR_INVALID_VALUE"):
        check((driver.CUresult.CUDA_ERROR_INVALID_VALUE, None), "load", ENGINE)


@pytest.mark.parametrize("blocks", [2, 16])
def test_kernels_of_clusters_are_refused(blocks: int) -> None:
    binary = DeviceBinary("kernels/h100/k.cubin", "k", 128, blocks, 0, 32, 0, 0, 0, 1)
    with pytest.raises(EngineFormatError, match=f"clusters of {blocks} blocks"):
        load_kernel(binary, ENGINE)
