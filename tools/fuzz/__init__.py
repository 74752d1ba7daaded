"""Feeds broken input to everything that reads bytes of a peer: frames, messages, tensors, handshakes, shared memory.

``python -m tools.fuzz --inputs 10000000`` makes that many inputs from valid ones and from a corpus (see ``--corpus``).
It flips bits, cuts, splices, changes lengths and inserts many small values, and feeds each input to one of the targets.
A target may return a value or raise a documented error, and nothing else. No target may allocate more memory than its
input and its limit allow, or make more values than it has counted.
"""
