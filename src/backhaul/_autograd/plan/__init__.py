"""The plan of a pass and the test that it has ended. Pure."""
