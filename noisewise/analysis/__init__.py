"""The papers' analyses for any run or preset, each a picture with its data beside it. `ANALYSES` is the registry."""

ANALYSES = {
    "gradients": "gradient variance and loss at each noise level as training goes on (Figs. 2 and 6)",
    "interdependence": "what training some noise levels does to the loss of all others (Fig. 4, and the whole matrix)",
    "density": "which noise levels each sampler trains, over t and over log SNR (Figs. 5 and 6)",
    "ablate": "one setting of the adaptive sampler at a time: |S|, f_S, |Q|, floor, target (Fig. 7)",
    "predictor": "how well the approximate gain predicts the true one, by |S| and by selection",
    "overhead": "cost of a sampler's step: predicted by the cost model, and measured",
    "optimal": "the loss of a perfect model at each noise level, and what a run has left to learn",
    "increments": "SpeeD's three areas of a noise schedule",
}
"""Each is a module of this package with `add_options(parser)` and `analyse(options, rest) -> Analysis`."""

FORMATS = ("png", "svg", "pdf")
"""Of the pictures."""
