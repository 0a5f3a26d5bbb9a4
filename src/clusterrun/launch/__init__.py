"""From a plan to a finished run: submit, run steps on nodes, conduct, recover."""
