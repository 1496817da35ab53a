"""Train and fine-tune by a recipe, from labelled pictures to a checkpoint to serve."""
