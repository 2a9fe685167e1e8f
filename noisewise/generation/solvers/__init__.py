"""Numerical solvers that turn noise into samples, for every process, prediction and spacing.

Ours, because diffusers' schedulers know DDPM's timesteps and their own flow only, hold state between steps, and draw their own
noise: here one path serves all processes, and image i depends on the seed and on i alone. Tests compare the two.

======  ============================================================  ===========================================
name    method                                                        options
======  ============================================================  ===========================================
ddpm    ancestral sampling                                            variance = fixed_small, fixed_large
ddim    deterministic to ancestral                                    eta = 0 to 1
euler   first order, deterministic; the same numbers as ddim          none
dpmpp   DPM-Solver++ 2M, second order, one evaluation a step          order = 1, 2
heun    second order, two evaluations a step, noise put back if told  S_churn, S_min, S_max, S_noise
======  ============================================================  ===========================================
"""

from noisewise.generation.solvers.path import Denoise, Level, start
from noisewise.generation.solvers.solver import SOLVERS, Solver, default_solver, solve

__all__ = ["SOLVERS", "Denoise", "Level", "Solver", "default_solver", "solve", "start"]
