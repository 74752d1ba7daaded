"""The plan of a pass and the test that the pass is over; the pure parts apart from the shell."""
