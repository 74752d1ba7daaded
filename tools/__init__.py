"""What only developers of Backhaul run: fuzzing, kill tests, soak tests, the version matrix."""
