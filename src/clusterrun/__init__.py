"""clusterrun: turn a described GPU cluster and a training job into a run that proves its wiring before it trains."""

__version__ = "0.1.0"
