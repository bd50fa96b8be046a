"""Packages that the interpreter lacks, brought along as wheels where no network is. Standard library alone."""

import zipfile
from pathlib import Path


def unpack(wheels: Path, destination: Path) -> list[str]:
    """Unpack every wheel in a folder; returns their names. A wheel is a zip file of importable packages (PEP 427).

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise FileNotFoundError(f"there are no wheels in {wheels}")
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(destination)
    return [wheel.name for wheel in found]
