"""The frames between template_process.py and template_worker.py: a head, then bytes. Both sides store the
last conversation, and a frame has only the difference, because a megabyte takes 20 ms through JSON and a
socket and 0.2 ms to compare.
"""

import struct

# Fields: number of bytes; number of messages or characters that are the same as last time; kind of the frame.
HEAD = struct.Struct("<IIB")
# The bytes that follow, by kind: a JSON request; none; a text; an error message; an error message after which
# the process ends.
ASKED, READY, TEXT, REFUSED, ENDED = range(5)
MAX_ERROR = 1000  # characters of an error message
