"""The most bytes that the child processes may take, which both sides enforce: the address space on Linux, the
committed memory on Windows."""

TEMPLATE_MEMORY = 512 << 20  # The interpreter and jinja2 take 25 MB.
# Interpreter, Pillow, a file of 20 MB twice, and 32 million pixels of 4 bytes in five images.
PICTURE_MEMORY = 1 << 30
GRAMMAR_MEMORY = 1 << 30  # An idle process takes 30 MB.
