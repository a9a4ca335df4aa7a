"""A Ray Serve application: replicas of an engine's server that Ray starts, routes to and scales with the load.

    serve run llmc.runtime.server.ray_app:build engine=/path/to/out.llmc min_replicas=1 max_replicas=4

Needs the extra `ray`. Every route of `llmc serve` is there except those of a single process (/, /live).
"""

import os
import threading
from dataclasses import dataclass, fields
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from llmc.errors import EngineFailureError, OptionError
from llmc.runtime.server.app import create_app
from llmc.runtime.server.options import ServeOptions, parsed
from llmc.runtime.server.serve import open_model

INGRESS = "llmc"
_END_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Options of the Ray Serve deployment.

    min_replicas, max_replicas: limits of the number of replicas that Ray runs.

    target_ongoing_requests: average number of requests per replica above which another replica is started.
    upscale_delay_s, downscale_delay_s: how long the load must last. num_cpus, num_gpus: numbers of CPUs and GPUs per
    replica.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 16.0
    max_ongoing_requests: int = 256
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise OptionError(
                f"there cannot be {self.min_replicas} to {self.max_replicas} replicas",
                at="min_replicas, max_replicas",
                fix="give 0 <= min_replicas <= max_replicas, and at least one at most",
            )


def build(arguments: dict[str, Any]) -> Any:
    """The application for `serve run` or a Serve config file. arguments: fields of ServeOptions and RayOptions, by
    name.

    Values of the command line are texts and are read as the field's type. Raises OptionError.
    """
    require_ray_extra()
    scaling_names = {field.name for field in fields(RayOptions)}
    scaling = RayOptions(**{k: parsed(RayOptions, k, v) for k, v in arguments.items() if k in scaling_names})
    serving = {k: parsed(ServeOptions, k, v) for k, v in arguments.items() if k not in scaling_names}
    if "engine" not in serving:
        raise OptionError("the application needs an engine", at="engine", fix="give engine=/path/to/out.llmc")
    return application(ServeOptions(**serving), scaling)


def application(options: ServeOptions, scaling: RayOptions) -> Any:
    """The Ray Serve application for an engine; `ray.serve.run` takes it."""
    require_ray_extra()
    from ray import serve

    def replica_app() -> FastAPI:
        registry = CollectorRegistry()
        model = open_model(options, registry)
        model.engine.when_dead(_end_soon)
        # Ray listens, not these options' host.
        return create_app(model, registry, options, options.allowed_hosts or None)

    # Ray makes the application in each replica, where the engine is loaded, and nowhere else.
    @serve.ingress(replica_app)
    class Replica:
        """A replica: everything is in its FastAPI application."""

    deployment = serve.deployment(
        name=INGRESS,
        autoscaling_config={
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.max_replicas,
            "target_ongoing_requests": scaling.target_ongoing_requests,
            "upscale_delay_s": scaling.upscale_delay_s,
            "downscale_delay_s": scaling.downscale_delay_s,
        },
        max_ongoing_requests=scaling.max_ongoing_requests,
        ray_actor_options={"num_cpus": scaling.num_cpus, "num_gpus": scaling.num_gpus},
        graceful_shutdown_timeout_s=options.drain_seconds,
    )(Replica)
    return deployment.bind()


def _end_soon() -> None:
    """End the replica's process after its clients got their errors; Ray starts another."""
    threading.Timer(_END_SECONDS, os._exit, (EngineFailureError.exit_code,)).start()


def require_ray_extra() -> None:
    """Raise OptionError without Ray."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise OptionError("this needs Ray, which is not installed", fix="pip install 'llmc-compiler[ray]'")
