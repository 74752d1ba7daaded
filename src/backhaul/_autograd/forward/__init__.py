"""Forward: records which tensors a message carries."""
