"""What is told of a checkpoint to people."""
