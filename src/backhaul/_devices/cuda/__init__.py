"""CUDA: the driver, memory that two processes share, and what torch.cuda offers."""
