"""The path of a batch: the engine protocol, the batch queue and the engine of one process."""
