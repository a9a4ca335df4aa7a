"""Measured times of an engine's steps, launch by launch, with the predictions of the cost model."""

from dataclasses import dataclass
from pathlib import Path

from llmc.engine_format import EngineDirectory
from llmc.errors import EngineFormatError
from llmc.prediction.rates import Rates
from llmc.prediction.step_shape import StepShape
from llmc.program import LOOP, Launch
from llmc.report.measurement_file import read_measurement

PROFILE_VERSION = 3


@dataclass(frozen=True)
class LaunchProfile:
    """A launch of one step. launch: its index in the program. start: seconds since the step began, in the step whose
    time was the median. seconds: the median over the steps; predicted: by the cost model."""

    launch: int
    kernel: str
    start: float
    seconds: float
    predicted: float


@dataclass(frozen=True)
class StepProfile:
    """A kind of step, measured `repeats` times. seconds: the median of the whole step; the launches sum to it. spread:
    (longest - shortest) / median. rates: measured right before. predicted: seconds of all launches."""

    name: str
    shape: StepShape
    repeats: int
    seconds: float
    spread: float
    predicted: float
    rates: Rates
    launches: tuple[LaunchProfile, ...]


@dataclass(frozen=True)
class Profile:
    """Measurements of `llmc profile`. threads: number of threads of a CPU engine."""

    version: int
    model: str
    target: str
    threads: int
    steps: tuple[StepProfile, ...]


def kernel_class(launch: Launch) -> str:
    """The key that decides a kernel's time: its operation and dtypes, and for a product its shape."""
    is_in_api = launch.family != LOOP and not launch.grid
    name = "_".join((launch.family, *launch.dtypes)).lower() if is_in_api else launch.kernel
    channels, rows = launch.arguments.get("in"), launch.arguments.get("out")
    return name if channels is None else f"{name} {channels} → {rows}"


def read_profile(path: Path) -> Profile:
    """A profile that `llmc profile --json` wrote. Raises EngineFormatError."""
    fix = "write it again: llmc profile ENGINE --json FILE"
    return read_measurement(Profile, path, name="profile", version=PROFILE_VERSION, fix=fix)


def check_profile(profile: Profile, directory: EngineDirectory, at: Path) -> None:
    """Raise EngineFormatError for a profile of another engine."""
    launches = directory.program.launches
    fits = all(
        timing.launch < len(launches) and launches[timing.launch].kernel == timing.kernel
        for step in profile.steps
        for timing in step.launches
    )
    if not fits or profile.target != directory.manifest.target.name:
        raise EngineFormatError(
            f"the profile is of another engine ({profile.model} for {profile.target}) than {directory.path}",
            at=at,
            fix=f"profile this one: llmc profile {directory.path} --json FILE",
        )
