"""Streams: a generator that runs on another worker, and is iterated over here."""
