"""The frames between template_process.py and template_worker.py: a head, then bytes. Both sides keep the last
conversation, and a frame has only the difference: a megabyte through JSON and a socket takes 20 ms, its
comparison 0.2 ms.
"""

import struct

# Number of bytes; messages or characters kept of the last ones; kind.
HEAD = struct.Struct("<IIB")
# Bytes: a JSON request; none; a text; a reason for no text; the same, and the process ends.
ASKED, READY, TEXT, REFUSED, ENDED = range(5)
MAX_ERROR = 1000  # characters of a reason
