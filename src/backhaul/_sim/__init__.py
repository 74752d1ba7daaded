"""A transport and a runtime in virtual time. A whole cluster runs in one process, and a seed repeats the run."""
