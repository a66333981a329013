"""Tables of a model, row by row: specified, initialised, stored; without PyTorch."""
