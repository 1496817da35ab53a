"""One batch's way: the engine protocol, the batch queue and the engine of one process."""
