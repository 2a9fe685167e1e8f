"""Tests of noisewise.evaluation."""
