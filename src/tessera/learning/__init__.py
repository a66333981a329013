"""The model on the server's side and at the clients; tables and their store need no PyTorch."""
