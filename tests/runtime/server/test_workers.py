"""What a server's workers import and see: nothing from the directory it was started in, and none of its secrets."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from llmc.runtime.grammar.compiler import WORKER as GRAMMARS
from llmc.runtime.text.template_renderer import WORKER as TEMPLATES
from tests.runtime.server.conftest import address_of

SECRETS = {"LLMC_API_KEY": "the-servers-key", "HF_TOKEN": "hf_token", "AWS_SECRET_ACCESS_KEY": "aws-secret"}


def test_a_hostile_directory_is_served_without_running_what_is_in_it(engine_directory: Path, tmp_path: Path) -> None:
    here, marker = tmp_path / "here", tmp_path / "was-run"
    shutil.copytree(engine_directory, here)
    for name in ("jinja2", "llguidance", "tokenizers", "numpy", "json", "sitecustomize"):
        (here / f"{name}.py").write_text(f"import os\nopen({str(marker)!r}, 'a').write(repr(os.environ))\n")
    command = [str(Path(sys.executable).with_name("llmc")), "serve", ".", "--port", "0"]
    environment = {**os.environ, **SECRETS, "NO_COLOR": "1", "COLUMNS": "400"}
    process = subprocess.Popen(
        command, cwd=here, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        headers = {"Authorization": f"Bearer {SECRETS['LLMC_API_KEY']}"}
        with httpx.Client(base_url=address_of(process), headers=headers, timeout=300) as client:
            chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "guided_regex": "[ab]+"}
            assert client.post("/v1/chat/completions", json=chat).status_code == 200
        workers = {w.cmdline()[3]: w for w in psutil.Process(process.pid).children(recursive=True)}
        assert {TEMPLATES, GRAMMARS} <= set(workers)
        for worker in workers.values():
            seen = Path(f"/proc/{worker.pid}/environ").read_text()
            assert not any(secret in seen for secret in SECRETS.values())
        assert not marker.exists()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(300)
