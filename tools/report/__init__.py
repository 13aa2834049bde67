"""The parts of `vkbackend gpu-report`, their processes, and the two files of results."""
