"""LangChain's and LiteLLM's clients, unmodified, against the server.

`make test-clients` runs this: it asks the package index for them, in an environment of their own.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.own_environment import environment, pip
from tests.runtime.server.conftest import LiveServer

PACKAGES = ("langchain-openai", "litellm")

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = environment(tmp_path_factory.mktemp("clients"))
    pip(made, "install", *PACKAGES)
    return made


@pytest.mark.parametrize("client", ["langchain", "litellm"])
def test_a_session(client: str, python: Path, server: LiveServer) -> None:
    script = Path(__file__).parent / "clients" / f"{client}_session.py"
    # LiteLLM has a list of models with it, and would look for a newer one.
    variables = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [str(python), "-P", str(script), f"{server.url}/v1"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr
