"""Tools for developers of Backhaul: fuzzing, simulation, kill tests, soak tests, the version matrix."""
