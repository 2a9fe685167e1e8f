"""The tables and figures of two papers, each as the commands that repeat it. `STUDIES` is the registry.

A study is declared in the file of its paper: what the paper says, which `compare` and `analyze` commands make ours, and what
its page shows of both. `noisewise reproduce` runs it.
"""

from noisewise.papers import arxiv_2405_17403, arxiv_2411_09998
from noisewise.papers.evidence import SCALES, Study

STUDIES: dict[str, Study] = {**arxiv_2411_09998.STUDIES, **arxiv_2405_17403.STUDIES}

__all__ = ["SCALES", "STUDIES", "Study"]
