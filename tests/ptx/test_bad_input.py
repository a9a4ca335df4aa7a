"""PTX that cannot be executed: an error says what is wrong, where, and what helps."""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path

import pytest

from llmc.engine_format.chunk_hash import ChunkHasher
from llmc.engine_format.engine_files import EngineFiles
from llmc.engine_format.kept_ptx import read_ptx
from llmc.errors import EngineFormatError
from llmc.ptx.code import load_code
from llmc.ptx.errors import PtxError
from llmc.ptx.statements import REBUILD
from llmc.ptx.survey import survey
from tests.ptx.ptx_text import kernel_text, run_text

BODY = "mov.b32 %r1, 5;\nadd.s32 %r2, %r1, %r1;"
ENDLESS = "LOOP:\nadd.s32 %r1, %r1, 1;\nbra LOOP;"


def load(text: str) -> PtxError:
    with pytest.raises(PtxError) as caught:
        load_code(text, "engine/k.ptx.gz", threads=32, shared_bytes=0)
    return caught.value


@pytest.mark.parametrize("target", ["sm_75", "sm_100a", "sm_120"])
def test_another_target(target: str) -> None:
    error = load(kernel_text(BODY, target=target))
    assert f"the PTX is for {target}; the machine executes sm_80" in error.problem
    assert "--target" in str(error.fix)


@pytest.mark.parametrize("version", ["6.5", "10.1"])
def test_another_version(version: str) -> None:
    error = load(kernel_text(BODY).replace(".version 8.0", f".version {version}"))
    assert f"of version {version}; the machine knows 7.0 to" in error.problem


def test_an_unknown_opcode_is_refused_by_name_and_line() -> None:
    text = kernel_text(BODY + "\ntcgen05.wait::ld.sync.aligned;")
    error = load(text)
    line = 1 + text.splitlines().index("tcgen05.wait::ld.sync.aligned;")
    assert "tcgen05.wait::ld.sync.aligned" in error.problem
    assert str(error.at) == f"engine/k.ptx.gz:{line}"
    assert "llmc ptx ENGINE" in str(error.fix)
    refused = [use for use in survey({"k": text}) if use.refused is not None]
    assert [use.opcode for use in refused] == ["tcgen05.wait::ld.sync.aligned"]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 0.99])
def test_text_that_ends_too_early(share: float) -> None:
    text = kernel_text(BODY)
    assert load(text[: int(len(text) * share)]).fix == REBUILD


def test_a_register_that_is_not_declared() -> None:
    error = load(kernel_text(BODY).replace("add.s32 %r2", "add.s32 %q2"))
    assert "%q2" in error.problem


# Lines of BODY's kernel as no compiler writes them, and what the error says of each.
DAMAGED = [
    ("mov.b32 %r1, 5;", "mov.b32 %r1, ;", "mov.b32 has 1 operands"),
    ("mov.b32 %r1, 5;", "cvta.to.global.u64 %d0;", "cvta.to.global.u64 has 1 operands"),
    ("mov.b32 %r1, 5;", "mov.b64 %d0, 0f3F800000;", "mov.b64 does not take 1065353216 there"),
    ("mov.b32 %r1, 5;", "mov.b32 %r1, [];", "'' is not a declared register"),
    ("mov.b32 %r1, 5;", "mov.b32 %r1, [%r2+x];", "'x' is not a whole number"),
    ("mov.b32 %r1, 5;", "mov.b32 %r1, k+x;", "'x' is not a whole number"),
    ("mov.b32 %r1, 5;", "mov.b64 %d0, {%r1, %r1, %r1};", "mov.b64 does not take {%r1, %r1, %r1} there"),
    ("mov.b32 %r1, 5;", "mov.u32 %r1, %cluster_ctarank;", "the machine does not know %cluster_ctarank"),
    ("mov.b32 %r1, 5;", ".reg .b32 %a<x>;", "'%a<x>' is not a register"),
    ("mov.b32 %r1, 5;", ".shared .align 4 .b8 much[99999999999];", "much has 99999999999 bytes"),
    ("mov.b32 %r1, 5;", ".shared .align 4 .b8 much[300000];", "300000 bytes of shared memory; a block has at most"),
    ("mov.b32 %r1, 5;", ".reg .b128 %q1;\nadd.s32 %r1, %q1, 5;", "add.s32 does not take %q1 there"),
    (
        "mov.b32 %r1, 5;",
        "tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%r_smem], 1;",
        "the machine supports only fill_mode 0",
    ),
    (".reqntid 32", ".reqntid 16, 2, 1", "for blocks of 16 x 2 x 1 threads and is launched with 32"),
    (".reqntid 32", ".reqntid 32\n.reqnctapercluster 2, 1, 1", "for clusters of 2 x 1 x 1 blocks"),
    ("{", "", "-1 of its scopes are still open"),
]


@pytest.mark.parametrize(("line", "damaged", "problem"), DAMAGED, ids=[case[1] or case[0] for case in DAMAGED])
def test_damaged_text(line: str, damaged: str, problem: str) -> None:
    text = kernel_text(BODY)
    assert line in text
    assert problem in load(text.replace(line, damaged, 1)).problem


def test_registers_of_128_bits_that_nothing_reads() -> None:
    assert not run_text(kernel_text(".reg .b128 %q1;\n" + BODY), {}).findings


def test_text_damaged_anywhere_is_told_without_a_traceback() -> None:
    """A character lost, or another one in its place."""
    text = kernel_text("""
    mad.lo.s32 %r2, %r_tid, 4, %r_smem;
    setp.lt.u32 %p1, %r_tid, 16;
    @%p1 st.shared.v2.b32 [%r2+128], {%r_tid, 0xA};
    L: bar.sync 0, 32;
    shfl.sync.bfly.b32 %r3|%p2, %r2, 1, 31, -1;
    @!%p1 bra.uni L;
    """)
    for place in range(text.index("mad.lo.s32 %r2"), len(text)):
        for put in ("", "["):
            with contextlib.suppress(PtxError):
                load_code(text[:place] + put + text[place + 1 :], "k.ptx", threads=32, shared_bytes=0)


def test_a_loop_without_an_end_names_the_limit_and_its_setting() -> None:
    with pytest.raises(PtxError) as caught:
        run_text(kernel_text(ENDLESS), {}, limit=3000)
    assert "has executed 3000 instructions" in caught.value.problem
    assert "LLMC_PTX_INSTRUCTIONS" in str(caught.value.fix)


def kept(folder: Path, content: bytes) -> EngineFiles:
    (folder / "k.ptx.gz").write_bytes(content)
    hasher = ChunkHasher()
    hasher.update(memoryview(content))
    return EngineFiles(folder, {"k.ptx.gz": hasher.record()})


def test_a_compressed_file_that_was_cut(tmp_path: Path) -> None:
    packed = gzip.compress(kernel_text(BODY).encode())
    assert read_ptx(kept(tmp_path, packed), "k.ptx.gz") == kernel_text(BODY)
    for content in (packed[: len(packed) // 2], b"", b"no gzip", gzip.compress(b"\xff\xfe")):
        with pytest.raises(EngineFormatError) as caught:
            read_ptx(kept(tmp_path, content), "k.ptx.gz")
        assert caught.value.at == str(tmp_path / "k.ptx.gz")
