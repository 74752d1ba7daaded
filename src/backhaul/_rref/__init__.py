"""References to values that live on other workers."""
