"""Training with a disk that fails at every single call; `python -m tests.training.chaos` (docs/checkpoints.md)."""
