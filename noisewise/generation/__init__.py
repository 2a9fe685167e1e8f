"""Images from a trained model: solvers, spacing of levels, guidance, replay, sets of images on disk."""
