"""What is read of the kernels' sources, and that nobody lays a struct out otherwise than the compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from llmc.codegen.cpp import kernel_api as read
from llmc.codegen.cpp.cache_kernels import CODED_HEAD
from llmc.codegen.cpp.kernel import SCALES
from llmc.codegen.cpp.kernel_api import enumerator, field_names, kernel_api, layout_assertion, layout_source
from llmc.codegen.cpp.kernel_library import kernel_archive
from llmc.codegen.cpp.panel import PANEL
from llmc.codegen.cpp.toolchain import find_toolchain, run_tool
from llmc.errors import ToolchainError
from llmc.formats.code_format import CODE_FORMATS
from llmc.ops.activation import ACTIVATIONS
from llmc.program.engine_structs import ENGINE_STRUCTS
from llmc.runtime.executors.cpp import ENGINE_ABI
from llmc.targets import host_target


def test_structs_functions_and_enumerators_are_read() -> None:
    api = kernel_api()
    assert api.fields("llmc_embedding_f32") == ("tokens", "channels", "ids", "weight", "y")
    assert api.kernels["llmc_rms_norm_bf16"] == api.kernels["llmc_layer_norm_f32"] == "LlmcNorm"
    assert api.functions["llmc_pool_create"] == (ctypes.c_void_p, (ctypes.c_int32, ctypes.c_int64))
    assert api.functions["llmc_engine_interface"] == (ctypes.c_char_p, ())
    values = {"tokens": 3, "in": 64, "x": (64, 7), "activation": "silu", "scale": 0.5}
    arguments = api.arguments("llmc_linear_f32", values)
    assert getattr(arguments, "in") == 64 and (arguments.x.data, arguments.x.stride) == (64, 7)
    assert (arguments.activation, arguments.scale, arguments.residual.data) == (1, 0.5, None)
    with pytest.raises(AssertionError, match="llmc_linear_f32 has no group"):
        api.arguments("llmc_linear_f32", {"group": 1})


def test_python_and_the_header_number_alike() -> None:
    numbers = kernel_api().enumerators
    assert (numbers["LLMC_PANEL"], numbers["LLMC_CODED_HEAD"]) == (PANEL, CODED_HEAD)
    assert numbers["LLMC_ENGINE_ABI"] == ENGINE_ABI
    assert [numbers[enumerator("activation", name)] for name in ACTIVATIONS] == list(range(len(ACTIVATIONS)))
    assert {enumerator("format", name) for name in CODE_FORMATS} <= numbers.keys()
    rounded = {name for format in CODE_FORMATS.values() for name in format.activations}
    assert {enumerator("x_format", name) for name in rounded} <= numbers.keys()
    assert {enumerator("scale_type", name) for name in SCALES.values()} <= numbers.keys()


def test_the_runtime_fills_the_structs_of_the_header() -> None:
    for struct in ENGINE_STRUCTS:
        ours = kernel_api().structs[struct.__name__]
        assert field_names(struct) == field_names(ours)
        assert layout_assertion(struct) == layout_assertion(ours)


def test_another_layout_does_not_compile(tmp_path: Path) -> None:
    class LlmcStep(ctypes.Structure):
        _fields_ = (("tokens", ctypes.c_int64),)

    source = tmp_path / "layout.cpp"
    source.write_text(layout_source() + layout_assertion(LlmcStep))
    command: list[str | Path] = [*find_toolchain().compiler, "-I", read.kernel_include_dir(), "-fsyntax-only", source]
    with pytest.raises(ToolchainError, match=r"static assertion|static_assert"):
        run_tool(command, source=source, scratch=tmp_path)


def test_a_library_that_lays_structs_out_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = kernel_archive(host_target()).with_suffix(".so")
    read.open_kernels(path)
    layouts = read._layouts()
    monkeypatch.setattr(read, "_layouts", lambda: [*layouts[:-1], ("offsetof(LlmcBindings, threads)", 4)])
    with pytest.raises(ToolchainError, match=r"differently: offsetof\(LlmcBindings, threads\)"):
        read.open_kernels(path)
