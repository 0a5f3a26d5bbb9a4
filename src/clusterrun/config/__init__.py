"""From overrides to a validated RunConfig. Nothing here imports torch or touches the cluster."""
