"""What a checkpoint is and what its network learned: summary, analysis and figures."""
