"""Calls between workers: the members of the cluster, calls and their results, failures and limits."""
