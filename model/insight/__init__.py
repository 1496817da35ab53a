"""What a checkpoint is and what its network learned: a summary, three analyses and their figures."""
