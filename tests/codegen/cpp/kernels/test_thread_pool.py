"""The thread pool, through kernels that run on it: every chunk runs exactly once, and no thread is left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from llmc.codegen.cpp.kernel_api import kernel_include_dir
from llmc.codegen.cpp.kernel_library import compile_flags, kernel_archive
from llmc.codegen.cpp.toolchain import find_toolchain, run_tool
from llmc.targets import host_target
from tests.codegen.cpp.kernel_calls import call, open_pool, pointer, rows

# Counts the runs of each chunk over loops of many lengths, with gaps that make threads park between loops.
COUNTER = """
#include <stdio.h>
#include <unistd.h>
#include <vector>
#include "thread_pool.h"
int main() {
  for (int threads : {1, 2, 3, 7}) {
    LlmcPool* pool = llmc_pool_create(threads, 100);
    for (int loop = 0; loop < 3000; loop++) {
      const int count = loop % 67;
      std::vector<int> runs(count, 0);
      llmc::parallel_for(pool, count, [&](int64_t index, void* scratch) {
        *static_cast<int64_t*>(scratch) = index;
        runs[index]++;
        if (*static_cast<int64_t*>(scratch) != index) runs[index] = 1000;
      });
      for (int r : runs) if (r != 1) return printf("threads %d loop %d: ran %d times\\n", threads, loop, r), 1;
      if (loop % 500 == 0) usleep(300);
    }
    llmc_pool_destroy(pool);
  }
  return 0;
}
"""


def build(source: str, folder: Path, *flags: str) -> Path:
    text, program = folder / "program.cpp", folder / "program"
    text.write_text(source, encoding="utf-8")
    include = kernel_include_dir()
    compiler: list[str | Path] = [*find_toolchain().compiler, "-std=c++17", "-O1", *flags, "-pthread", "-I", include]
    run_tool([*compiler, text, include / "thread_pool.cpp", "-o", program], source=text, scratch=folder)
    return program


def test_every_chunk_runs_once(tmp_path: Path) -> None:
    done = subprocess.run([build(COUNTER, tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_data_race_is_seen_by_the_thread_sanitizer(tmp_path: Path) -> None:
    program = build(COUNTER, tmp_path, "-fsanitize=thread", "-g")
    done = subprocess.run([program], capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel's memory layout")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_program_links_the_archive(tmp_path: Path) -> None:
    text, program = tmp_path / "program.cpp", tmp_path / "program"
    text.write_text(
        '#include "api.h"\nint main() { llmc_pool_destroy(llmc_pool_create(2, 64)); return 0; }\n', encoding="utf-8"
    )
    target = host_target()
    compiler: list[str | Path] = [*find_toolchain().compiler, *compile_flags(target), "-I", kernel_include_dir()]
    run_tool([*compiler, text, kernel_archive(target), "-pthread", "-o", program], source=text, scratch=tmp_path)
    assert subprocess.run([program]).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads that /proc shows")
def test_threads_end_with_the_pool() -> None:
    target = host_target()
    before = len(threads())
    with open_pool(target, 5, 64):
        assert len(threads()) == before + 4
    while len(threads()) > before:
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the states of threads from /proc")
def test_idle_threads_sleep() -> None:
    target, before = host_target(), threads()
    table, ids, y = torch.zeros(4, 8), torch.zeros(1000, dtype=torch.int32), torch.empty(1000, 8)
    values = {"tokens": 1000, "channels": 8, "ids": pointer(ids), "weight": pointer(table), "y": rows(y)}
    with open_pool(target, 4, 64) as pool:
        call(target, "embedding", [torch.float32], values, pool=pool)
        own = threads() - before
        assert len(own) == 3
        while not all(state(thread) == "S" for thread in own):
            time.sleep(0.001)


def threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def state(thread: str) -> str:
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
