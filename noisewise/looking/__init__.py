"""What training does at each noise level, before, while and after: curves of a recipe, a monitor, validation."""
