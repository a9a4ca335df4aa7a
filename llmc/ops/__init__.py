"""The llmc:: ops, one file each (or one family): importing this package registers all of them with torch."""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
