"""Bytes <-> messages. No sockets, no autograd."""
