"""The files in deploy/: valid for Kubernetes, and with flags, routes and metrics that the server has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from llmc.cli.app import command_line

DEPLOY = Path(__file__).parent.parent / "deploy"
OBJECTS: list[Any] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def serve_flags() -> set[str]:
    command: Any = typer.main.get_command(command_line())
    return {name for parameter in command.commands["serve"].params for name in parameter.opts}


@pytest.mark.parametrize("found", OBJECTS, ids=lambda o: str(o["kind"]))
def test_the_manifest_follows_kubernetes_schemas(found: Any) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(found, validate.latest_version(), strict=True)


def test_the_manifest_fits_together() -> None:
    by_kind = {document["kind"]: document for document in OBJECTS}
    pod = by_kind["Deployment"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert by_kind["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert (
        by_kind["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        == by_kind["Deployment"]["metadata"]["name"]
    )
    flags = [argument.split("=")[0] for argument in container["args"] if argument.startswith("--")]
    assert set(flags) <= serve_flags()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
    drain = next(int(a.split("=")[1]) for a in container["args"] if a.startswith("--drain-seconds"))
    assert pod["spec"]["terminationGracePeriodSeconds"] > drain + 5
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > drain, "the probe would cut the drain short"


def test_the_autoscaler_reads_a_metric_that_the_server_has() -> None:
    from llmc.runtime.engine_stats import EngineStats
    from llmc.runtime.server.engine_metrics import gauges

    stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {}, ())
    names = {f"llmc_{name}" for name, _, _ in gauges(stats)}
    scaler = next(document for document in OBJECTS if document["kind"] == "HorizontalPodAutoscaler")
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] in names


def test_the_image_starts_the_server_with_flags_that_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["llmc", "serve"]' in text
    command = re.search(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert command is not None
    flags = {word for word in re.findall(r'"([^"]+)"', command[1]) if word.startswith("--")}
    assert flags <= serve_flags()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (DEPLOY.parent / name).exists(), name


def test_every_package_of_the_image_is_locked_with_its_hashes() -> None:
    """And none of a machine's own index; PyTorch's build is the one for CPUs, of the version in constraints.txt."""
    text = (DEPLOY / "Dockerfile").read_text()
    installs = re.findall(r"pip install (.+)$", text, re.MULTILINE)
    assert all(
        "--no-deps" in install and ("--require-hashes" in install or install.endswith(" .")) for install in installs
    )
    locked: dict[str, str] = {}
    for name in ("requirements.lock", "torch.lock"):
        lines = (DEPLOY / name).read_text().replace("\\\n", "").splitlines()
        entries = [line for line in lines if line and not line.lstrip().startswith("#")]
        assert entries and all("--hash=sha256:" in entry for entry in entries)
        locked |= {re.split("==| @", entry)[0].strip(): entry for entry in entries}
    assert not re.search("index-url|find-links|file:", (DEPLOY / "requirements.lock").read_text())
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    assert {re.split("[<>=]", requirement)[0].lower() for requirement in declared} <= set(locked)
    torch = re.search("torch==(.*)", (DEPLOY.parent / "constraints.txt").read_text())
    assert torch is not None and f"/whl/cpu/torch-{torch[1]}%2Bcpu-cp312" in locked["torch"]
