"""A warp meets between what one of its lanes writes of a tensor map and the copy that all of them make."""

from __future__ import annotations

from llmc.codegen.triton.ordered_descriptors import with_ordered_descriptors

WRITE = "\t@%p1 tensormap.replace.tile.rank.shared::cta.b1024.b32 [ %rd1 + 0 ], 0x1;\n"
COPY = "\t@%p2 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2];\n"
BARRIER = "\tbar.warp.sync \t-1;\n"


def test_a_missing_barrier_is_added_to_the_threads_that_copy() -> None:
    added = "\t@%p2 bar.warp.sync 0xffffffff;\n"
    assert (
        with_ordered_descriptors(WRITE + WRITE + COPY + WRITE + COPY)
        == WRITE + WRITE + added + COPY + WRITE + added + COPY
    )


def test_barriers_of_the_compiler_are_enough() -> None:
    text = BARRIER + WRITE + BARRIER + COPY + WRITE + "\tadd.s64 \t%rd3, %rd2, 256;\n" + BARRIER + COPY + "\tret;\n"
    assert with_ordered_descriptors(text) == text


def test_a_barrier_before_the_writes_orders_nothing() -> None:
    assert with_ordered_descriptors(BARRIER + WRITE + COPY).count("bar.warp.sync") == 2
