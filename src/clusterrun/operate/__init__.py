"""What one does with runs that are there: find, watch, cancel, requeue, clean up; and the Python API over it."""
