"""Analysis of a checkpoint and its network: a summary, three analyses and their figures."""
