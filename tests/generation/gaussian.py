"""Gaussian data with a full covariance, for which the denoiser and the probability-flow ODE are known in closed form."""

import torch

from noisewise.generation.solvers import solve, start


class Gaussian:
    """Six dimensions, a mean that is not zero, variances from 0.05 to 2 along turned axes."""

    dimensions = 6

    def __init__(self, mean=None, variances=None):
        d, generator = self.dimensions, torch.Generator().manual_seed(4)
        self.axes = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
        self.mean = torch.linspace(-1, 1.5, d, dtype=torch.float64) if mean is None else mean
        self.variances = torch.logspace(-1.3, 0.3, d, dtype=torch.float64) if variances is None else variances

    def matrix(self, eigenvalues):
        return self.axes @ torch.diag(eigenvalues) @ self.axes.T

    @property
    def covariance(self):
        return self.matrix(self.variances)

    def denoise(self, process):
        """E[x0 | x]."""

        def estimate(x, u):
            alpha, sigma = process.scales(u)
            gain = self.matrix(alpha * self.variances / (alpha**2 * self.variances + sigma**2))
            return (self.mean + (x.double() - alpha * self.mean) @ gain).to(x.dtype)

        return estimate

    def ode(self, process, first, last=None):
        """(matrix, offset) of the exact flow from level `first` to the data; by way of `last`, from where E[x0 | x] ends it."""
        alpha, sigma = process.scales(first)
        spread = alpha**2 * self.variances + sigma**2
        if last is None:
            eigenvalues = (self.variances / spread).sqrt()
        else:
            alpha_last, sigma_last = process.scales(last)
            spread_last = alpha_last**2 * self.variances + sigma_last**2
            eigenvalues = (spread_last / spread).sqrt() * alpha_last * self.variances / spread_last
        matrix = self.matrix(eigenvalues)
        return matrix, self.mean - matrix @ (alpha * self.mean)


def affine(name, process, u, denoise, d=Gaussian.dimensions, **options):
    """(matrix, offset) of a deterministic solver with a linear denoiser, from what it does to the unit vectors."""
    x = torch.cat([torch.zeros(1, d), torch.eye(d)]).double()
    y = solve(name, denoise, process, x, u, noise=no_noise, **options)
    return (y[1:] - y[0]).T, y[0]


def no_noise(step):
    raise AssertionError(f"a deterministic solver asked for noise in step {step}")


def moments(name, process, u, denoise, d=Gaussian.dimensions, **options):
    """Exact mean and covariance of what a stochastic solver generates: its answer to each unit of each step's noise."""
    noise = unit_noise(len(u), d)
    return mean_and_covariance(solve(name, denoise, process, start(process, u[0], noise(0)), u, noise=noise, **options))


def unit_noise(steps, d):
    """draw -> a batch in which one row is zero throughout and each other one has a unit of one element of one draw."""

    def noise(draw):
        z = torch.zeros(1 + d * (steps + 1), d, dtype=torch.float64)
        z[1 + d * draw : 1 + d * (draw + 1)] = torch.eye(d, dtype=torch.float64)
        return z

    return noise


def mean_and_covariance(x):
    """Of what a linear map makes of standard normals, given what it made of `unit_noise`."""
    answers = x[1:] - x[0]
    return x[0], answers.T @ answers
