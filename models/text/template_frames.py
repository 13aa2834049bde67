"""The frames that template_process.py and template_worker.py send each other: a head, then bytes.

A conversation and its text mostly begin as the last ones did. So both sides keep the last ones, and a frame
has only the rest: a megabyte through JSON and a socket takes 20 ms, to compare it takes 0.2 ms.
"""

import struct

# Bytes that follow; how many messages or characters of the last ones stay in front of them; kind.
HEAD = struct.Struct("<IIB")
# The bytes: a request in JSON; none; a text; why there is no text; the same, and the process ends.
ASKED, READY, TEXT, REFUSED, ENDED = range(5)
MAX_ERROR = 1000  # characters of a reason
