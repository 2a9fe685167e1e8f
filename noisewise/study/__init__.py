"""The study: training with several samplers under the same conditions, and what came of it."""
