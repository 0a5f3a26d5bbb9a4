"""The command line: one module per verb, each parsing its arguments, calling one function and printing.

``main`` finds the verb; ``verbs`` lists them; ``common`` has what they share; ``following`` watches a run that was
submitted.
"""

from clusterrun.cli.main import main

__all__ = ["main"]
