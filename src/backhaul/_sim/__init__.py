"""A transport and a runtime in virtual time: whole clusters in one thread at a time, repeatable from a seed."""
