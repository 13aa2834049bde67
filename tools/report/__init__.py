"""The parts of `vkbackend gpu-report`, the processes that run the parts, and the two files of results."""
