"""The checks before training: each node reports what it sees, pure functions judge it, a rule chooses the nodes."""
