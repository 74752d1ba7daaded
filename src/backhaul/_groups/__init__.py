"""Groups of workers that are called together."""
