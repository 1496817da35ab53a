"""What a network learned: its summary, and how far its attention reaches."""
