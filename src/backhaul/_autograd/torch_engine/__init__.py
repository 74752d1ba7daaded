"""PyTorch's own autograd engine. Every private name of torch that a backward pass uses is in this package."""
