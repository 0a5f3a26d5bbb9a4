"""What runs inside torchrun's workers. ``builtin``, ``sampler`` and ``arrays`` do not import torch."""
