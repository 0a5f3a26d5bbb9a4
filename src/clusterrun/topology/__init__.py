"""What is wired to what inside a node: frozen values, readers (text, NVML, sysfs, snapshots) and classification.

Nothing here imports torch, and importing does no work: NVML is loaded only inside functions of ``nvml``.
"""
