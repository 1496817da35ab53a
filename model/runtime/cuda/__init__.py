"""The backend that runs the network in torch on a GPU."""
