"""The frames between template_process.py and template_worker.py: a head, then bytes. Both sides store the
last conversation, and a frame has only the difference, because a megabyte takes 20 ms through JSON and a
socket and 0.2 ms to compare.
"""

import struct

# The number of bytes; how many messages or characters are the same as in the last frame; the kind.
HEAD = struct.Struct("<IIB")
# The bytes after the head, by kind: a JSON request; none; a text; an error message; an error message of a
# process that ends.
ASKED, READY, TEXT, REFUSED, ENDED = range(5)
MAX_ERROR = 1000  # characters of an error message
