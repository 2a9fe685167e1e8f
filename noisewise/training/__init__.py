"""Training: data, models, the loop, checkpoints, presets."""
