"""`python -m noisewise`, for torchrun and accelerate launch."""

import sys

from noisewise.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
