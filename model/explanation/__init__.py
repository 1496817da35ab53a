"""What a forward pass gives as a map of where the model looked."""
