"""Makes a release: sdist and wheel, checked and the same bytes each time, and the list of what they need (SBOM)."""
