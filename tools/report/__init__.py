"""`vkbackend gpu-report`: its parts, the process that runs them, and the two files that it writes."""
