"""One profile over all workers."""
