"""What generated samples are worth: distances between sets of images, likelihood, held-out loss."""
