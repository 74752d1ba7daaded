"""Bytes <-> messages. Knows no sockets and no autograd."""
