"""PTX gets the instructions of a dependent launch, and only kernels whose reads they order may start early."""

from __future__ import annotations

from llmc.codegen.triton.dependent_launch import waits_for_launch_before, with_dependent_launch
from llmc.codegen.triton.kernels.launch_edge import WAIT_HERE

_HEAD = """\
.version 8.4
.target sm_90a
.visible .entry kernel(
\t.param .u64 x
)
.reqntid 128
{
\t.reg .b32 \t%r<5>;
\t.loc\t1 19 0
$L__func_begin0:

// %bb.0:
"""
_LOAD = "\tld.param.b32 \t%r1, [x];\n"


def test_a_kernel_waits_first() -> None:
    assert with_dependent_launch(f"{_HEAD}{_LOAD}\tret;\n}}\n") == (
        f"{_HEAD}\tgriddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;\n{_LOAD}\tret;\n}}\n"
    )


def test_a_kernel_waits_where_it_says() -> None:
    marked = f"\t// begin inline asm\n\t{WAIT_HERE} %r2\n\t// end inline asm\n"
    expected = marked.replace(f"{WAIT_HERE} %r2", "griddepcontrol.wait;")
    assert with_dependent_launch(f"{_HEAD}{_LOAD}{marked}\tret;\n}}\n") == (
        f"{_HEAD}\tgriddepcontrol.launch_dependents;\n{_LOAD}{expected}\tret;\n}}\n"
    )


def test_a_kernel_keeps_its_own_instructions() -> None:
    own = f"{_HEAD}{_LOAD}\tgriddepcontrol.wait;\n\tret;\n}}\n"
    assert with_dependent_launch(own) == own


def test_what_may_start_early() -> None:
    """The wait does not order copies of the asynchronous proxy after ordinary writes."""
    assert not waits_for_launch_before(f"{_HEAD}{_LOAD}\tret;\n}}\n")
    assert waits_for_launch_before(with_dependent_launch(f"{_HEAD}{_LOAD}\tret;\n}}\n"))
    copies = f"{_HEAD}{_LOAD}\tcp.async.bulk.tensor.2d.shared::cluster.global [%r1], [%r2];\n\tret;\n}}\n"
    assert not waits_for_launch_before(with_dependent_launch(copies))
