"""`vkbackend gpu-report`: its parts, their processes, and the two files."""
