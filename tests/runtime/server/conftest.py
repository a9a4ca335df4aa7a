"""A real server over a real engine: `llmc serve` in a process of its own, shared by the tests that only ask it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest

MODEL = Path(__file__).parent.parent.parent.parent / "examples" / "models" / "bard-draft"
# As Hermes and Qwen write it, short.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ 'Tools: ' + tools | tojson + ' Answer with <tool_call>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('bad role') }}{% endif %}"
    "{{ '[' + message.role + '] ' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
# The same for a model that thinks, as DeepSeek's and Qwen's: the prompt opens the tag.
THINKING_TEMPLATE = (
    CHAT_TEMPLATE.replace(
        "(message.content or '') }}",
        "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '') + "
        "(message.content or '') }}",
    )
    + "{% if add_generation_prompt and enable_thinking is not false %}<think>{% endif %}"
)


@dataclass(frozen=True)
class LiveServer:
    """A server that listens, its process, what it has said on its standard error, and the thread that reads that."""

    url: str
    process: subprocess.Popen[str]
    said: list[str]
    reader: threading.Thread

    def log(self) -> str:
        """All that it has said, after its end."""
        assert self.process.poll() is not None
        self.reader.join()
        return "".join(self.said)

    def client(self, api_key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if self.url.startswith("unix:"):
            transport = httpx.HTTPTransport(uds=self.url.removeprefix("unix:"), verify=False)
            return httpx.Client(base_url="http://llmc", transport=transport, headers=headers, timeout=300)
        # Nothing is encrypted: reading the certificates of authorities takes longer than most tests.
        return httpx.Client(base_url=self.url, headers=headers, timeout=300, verify=False)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small shipped model with a chat template."""
    path = Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("chat-model") / "bard"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


@pytest.fixture(scope="session")
def engine_directory(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its engine, in fp32 so that it can be compared with transformers."""
    # Not above: compiling imports Triton, and nothing has said yet that its kernels are interpreted.
    from llmc.compiler import build

    path = tmp_path_factory.mktemp("engine") / "bard.llmc"
    build(model_directory, path, dtype="float32", max_model_len=512, max_sequences=16)
    return path


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine of the small shipped model as sentence-transformers would have saved it."""
    from llmc.compiler import build

    directory = Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("embedder") / "bard"))
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    prompts = {"prompts": {"query": "", "riddle": "What am I? "}}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    path = directory.with_suffix(".llmc")
    build(directory, path, dtype="float32", max_model_len=64, max_sequences=16)
    return path


@pytest.fixture(scope="session")
def server(engine_directory: Path) -> Iterator[LiveServer]:
    """Shared: tests must leave it as they found it."""
    with serving(engine_directory, "--trust-request-chat-template") as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as opened:
        yield opened


@pytest.fixture(scope="session")
def thinking_server(engine_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its model thinks up to the first comma; unknown fields of requests are only warned of."""
    template = tmp_path_factory.mktemp("thinking") / "template.jinja"
    template.write_text(THINKING_TEMPLATE)
    flags = ("--chat-template", str(template), "--reasoning-parser", "<think> ,", "--unknown-fields", "warn")
    with serving(engine_directory, *flags) as live:
        yield live


@pytest.fixture
def thinking(thinking_server: LiveServer) -> Iterator[httpx.Client]:
    with thinking_server.client() as opened:
        yield opened


@contextmanager
def serving(engine: Path, *flags: str, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[LiveServer]:
    """`llmc serve ENGINE` on a free port until the block ends. environment: what the process has more of."""
    command = [sys.executable, "-m", "llmc", "serve", str(engine), "--port", "0", *flags]
    whole = {**os.environ, "NO_COLOR": "1", "COLUMNS": "400", **environment}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=whole)
    try:
        said: list[str] = []
        address = address_of(process, said)
        assert process.stderr is not None
        reader = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
        reader.start()
        yield LiveServer(address, process, said, reader)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(300)
        finally:
            process.kill()


def address_of(process: subprocess.Popen[str], said: list[str] | None = None) -> str:
    """The URL that the server prints once it listens. said: gets what it prints until then."""
    assert process.stderr is not None
    said = [] if said is None else said
    for line in process.stderr:
        said.append(line)
        addresses = [word for word in line.split() if word.startswith(("http://", "unix:"))]
        if addresses:
            return addresses[0]
    raise AssertionError(f"the server ended: {''.join(said)}")


def metric(client: httpx.Client, name: str) -> float:
    """The sum of a metric's samples."""
    lines = client.get("/metrics").text.splitlines()
    samples = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    assert samples, f"no sample of {name}"
    return sum(samples)


def eventually(holds: object, seconds: float = 300.0) -> None:
    """Wait until `holds()` is true."""
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
