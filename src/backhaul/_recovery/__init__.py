"""Steps of a training that are made again after the loss of a worker, with each update applied exactly once."""
