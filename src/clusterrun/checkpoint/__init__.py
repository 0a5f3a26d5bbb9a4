"""Checkpoints: ``store`` publishes, lists, verifies and retains, without torch; ``state`` saves and loads with DCP."""
