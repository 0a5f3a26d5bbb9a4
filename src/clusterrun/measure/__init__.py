"""What the wiring really does: collectives, matrix products and copies, timed. The workers alone import torch."""
