"""The maximum bytes of the child processes, which parent and child enforce. On Linux they limit the address
space, on Windows the committed memory."""

TEMPLATE_MEMORY = 512 << 20  # The interpreter and jinja2 take 25 MB.
# This is enough for the interpreter, Pillow, a file of 20 MB twice, and five images of 32 million pixels of 4
# bytes.
PICTURE_MEMORY = 1 << 30
GRAMMAR_MEMORY = 1 << 30  # An idle process takes 30 MB.
