"""What generated samples are worth: generation, distances between sets of images, likelihood."""
