"""Workers end with the process that started them, also where that one is killed and they are busy."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import psutil

from llmc.processes.lifeline import Lifeline
from llmc.processes.worker_command import worker_environment
from llmc.runtime.text.chat_template import ChatTemplate
from llmc.runtime.text.template_renderer import TemplateInput, TemplateRenderer

# 7**10**8 is one call into C, which runs for minutes and lets no other thread run; with a child of its own.
BUSY = """
import os, sys
from llmc.processes.lifeline import end_with
end_with(int(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
7 ** 10 ** 8
"""
STARTER = f"""
import subprocess, sys
from llmc.processes.lifeline import Lifeline
lifeline = Lifeline()
command = [sys.executable, "-c", {BUSY!r}, str(lifeline.worker_end)]
worker = subprocess.Popen(
    command, pass_fds=(lifeline.worker_end,), process_group=0, stdout=subprocess.PIPE, text=True
)
lifeline.started()
print(worker.pid, worker.stdout.readline(), flush=True)
sys.stdin.read()
"""


def end_of(processes: list[psutil.Process]) -> None:
    """Wait until all have ended."""
    _, alive = psutil.wait_procs(processes, timeout=300)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_busy_worker_and_its_child_end_with_a_killed_starter() -> None:
    command = [sys.executable, "-P", "-c", STARTER]
    with subprocess.Popen(
        command, env=worker_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        assert len(processes) == 2
        starter.send_signal(signal.SIGKILL)
        end_of(processes)


def test_a_worker_that_starts_after_its_starter_has_ended_ends_at_once() -> None:
    lifeline = Lifeline()
    code = (
        "import sys; sys.stdin.read(); from llmc.processes.lifeline import end_with; "
        "end_with(int(sys.argv[1])); print('lives')"
    )
    command = [sys.executable, "-P", "-c", code, str(lifeline.worker_end)]
    process = subprocess.Popen(
        command,
        env=worker_environment(),
        pass_fds=(lifeline.worker_end,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    lifeline.started()
    lifeline.close()
    assert process.communicate(b"go on")[0] == b"" and process.returncode == -signal.SIGIO


def test_a_worker_outlives_the_thread_that_started_it() -> None:
    """As it would not with a parent-death signal."""
    renderer, prompts = TemplateRenderer(workers=1), []

    def ask() -> None:
        given = TemplateInput([{"role": "user", "content": "hi"}])
        prompts.append(renderer.render(ChatTemplate("{{ messages[0].content }}"), given).text)

    workers = []
    for _ in range(2):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        workers.append([child.pid for child in psutil.Process().children()])
    renderer.close()
    assert prompts == ["hi", "hi"] and workers[0] == workers[1]
