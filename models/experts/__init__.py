"""Which experts of a mixture are in device memory, if the others are in host memory."""
