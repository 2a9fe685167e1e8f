"""Makes all pictures of the pages anew, without a GPU: `make pictures`, which runs the demo before.

    python docs/make_pictures.py             from benchmarks/results, and from what is in out/: a minute
    python docs/make_pictures.py all         runs the analyses before: half an hour on two cores
    python docs/make_pictures.py gradients   runs this one

Images of runs on a GPU are kept in docs/img/runs.
"""

import sys

import make_cifar10_figures
import make_figures
import make_speed_figures
import make_study_figures


def main() -> None:
    for module in (make_figures, make_speed_figures, make_cifar10_figures):
        module.main()
    make_study_figures.main(sys.argv[1:])


if __name__ == "__main__":
    main()
