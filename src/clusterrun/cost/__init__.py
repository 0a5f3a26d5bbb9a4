"""What wiring costs: the hardware catalogue, and the predicted time of collectives and training steps."""
