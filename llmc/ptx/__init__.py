"""Compiled GPU code, executed and checked on a CPU: a machine for PTX (docs/ptx.md). It needs only numpy."""
