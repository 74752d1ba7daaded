"""The software bill of materials (SBOM) of a release, as CycloneDX JSON: the wheel, and each package that it needs, in
the version that is installed here. ``make env`` installs those of ``constraints.txt``, with which the tests are run.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import Distribution, distribution
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCHEMA = SchemaVersion.V1_6
_LONGEST_NAME = 100  # of a license; some packages give its whole text
_NAMESPACE = uuid.UUID("8e2ab6b4-0a44-4d3a-9b5e-0d3a60f2c1c7")  # of the numbers of our bills, drawn once


def needed_packages(name: str) -> dict[str, list[str]]:
    """The packages that a package needs, directly or not, each with those that it needs itself; without extras."""
    found: dict[str, list[str]] = {}
    left = [canonicalize_name(name)]
    while left:
        if (package := left.pop()) not in found:
            requirements = map(Requirement, distribution(package).requires or ())
            needed = {canonicalize_name(each.name) for each in requirements if _applies(each)}
            found[package] = sorted(needed)
            left.extend(needed)
    return found


def describe_release(name: str, files: Mapping[str, Path], epoch: int) -> str:
    """The bill of the installed package ``name``, whose files these are, as JSON. Raises ``ValueError`` if it is not
    valid.
    """
    needed = needed_packages(name)
    parts = {package: _component(distribution(package)) for package in sorted(needed)}
    whole = parts.pop(name)
    whole.type = ComponentType.LIBRARY
    whole.components.update(
        Component(
            type=ComponentType.FILE,
            name=file,
            bom_ref=file,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(path.read_bytes()).hexdigest())],
        )
        for file, path in files.items()
    )
    bom = Bom(components=parts.values(), serial_number=_serial_number(files))
    bom.metadata.component = whole
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    for package, packages in needed.items():
        bom.register_dependency(parts.get(package, whole), [parts[each] for each in packages])
    text: str = make_outputter(bom, OutputFormat.JSON, SCHEMA).output_as_string(indent=2)
    if (error := JsonStrictValidator(SCHEMA).validate_str(text)) is not None:
        raise ValueError(f"the bill of materials is not valid: {str(error)[:1000]}")
    return text + "\n"


def _component(package: Distribution) -> Component:
    name, version = canonicalize_name(package.name), package.version.partition("+")[0]  # without "+cpu"
    given = package.metadata
    named = next((given[field] for field in ("License-Expression", "License") if field in given), "")
    short = named if len(named) < _LONGEST_NAME else ""
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=name,
        description=given["Summary"],
        licenses=[LicenseFactory().make_from_string(short)] if short else (),
        purl=PackageURL("pypi", None, name, version),
    )


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _serial_number(files: Mapping[str, Path]) -> uuid.UUID:
    """A number that is the same for the same files."""
    digests = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for _, path in sorted(files.items()))
    return uuid.uuid5(_NAMESPACE, digests)
