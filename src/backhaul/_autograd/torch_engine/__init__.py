"""PyTorch's own autograd engine: every private name of torch that autograd uses."""
