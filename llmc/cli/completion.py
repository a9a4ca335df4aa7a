"""Shell completion of option values: names that are known without reading a model."""


def complete_targets(incomplete: str) -> list[tuple[str, str]]:
    """Completions of targets with their descriptions; after a comma, of the last one."""
    from llmc.targets import known_targets

    done, comma, start = incomplete.rpartition(",")
    named = [("cpu", "this machine"), ("auto", "this machine's GPU, or else its CPU")]
    named += [(target.name, target.summary) for target in known_targets()]
    return [(f"{done}{comma}{name}", summary) for name, summary in named if name.startswith(start)]


def complete_executors(incomplete: str) -> list[str]:
    """The executors that can run an engine's steps."""
    from llmc.engine_format.engine_kinds import EXECUTOR_NAMES

    return [name for name in EXECUTOR_NAMES if name.startswith(incomplete)]


def complete_schemes(incomplete: str) -> list[str]:
    """Completions of quantization schemes, also after PATTERN= and after a comma."""
    from llmc.formats.schemes import NOT_QUANTIZED, SCHEMES

    cut = max(incomplete.rfind(","), incomplete.rfind("=")) + 1
    done, start = incomplete[:cut], incomplete[cut:]
    return [f"{done}{name}" for name in (*SCHEMES, "auto:4.5", NOT_QUANTIZED) if name.startswith(start)]
