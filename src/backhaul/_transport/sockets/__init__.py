"""Channels over Unix sockets and TCP."""
