"""The version of an installed package, for keys of caches that depend on it."""

from importlib import metadata


def installed_version(package: str) -> str | None:
    """Return the version of a package's distribution; None if there is none of that name."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
