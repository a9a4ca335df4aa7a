"""Targets of engines: the hardware table, its names, and the target of this machine."""

from llmc.targets.here import (
    cpu_target_here,
    device_target,
    host_features,
    host_target,
    lacking_here,
    match_device,
    missing_features,
)
from llmc.targets.names import gpu_target, is_cpu_target, is_gpu_target, known_targets, resolve_target
from llmc.targets.table import (
    CPU_TARGETS,
    GPU_TARGETS,
    ONNXRUNTIME,
    REFERENCE,
    CpuTarget,
    GpuTarget,
    OnnxTarget,
    ReferenceTarget,
    Target,
)

__all__ = [
    "CPU_TARGETS",
    "GPU_TARGETS",
    "ONNXRUNTIME",
    "REFERENCE",
    "CpuTarget",
    "GpuTarget",
    "OnnxTarget",
    "ReferenceTarget",
    "Target",
    "cpu_target_here",
    "device_target",
    "gpu_target",
    "host_features",
    "host_target",
    "is_cpu_target",
    "is_gpu_target",
    "known_targets",
    "lacking_here",
    "match_device",
    "missing_features",
    "resolve_target",
]
