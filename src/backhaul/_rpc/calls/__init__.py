"""Calls: the caller side, the serving side, retries and cancellation."""
