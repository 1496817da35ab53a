"""Training and fine-tuning by a recipe, from labelled pictures to a checkpoint that the service
loads.
"""
