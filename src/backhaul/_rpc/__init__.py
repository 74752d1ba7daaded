"""Calls between workers: who is there, what runs where, what comes back."""
