"""What travels between template_process.py and template_worker.py: frames of a head and bytes.

A conversation and its text mostly begin as the last ones did, so both sides keep those, and a frame has the
rest: a megabyte through JSON and a socket takes 20 ms, comparing it 0.2 ms.
"""

import struct

HEAD = struct.Struct("<IIB")  # bytes that follow, messages or characters of the last ones before them, kind
# A request in JSON; nothing; a text; why there is none; the same, and the process ends.
ASKED, READY, TEXT, REFUSED, ENDED = range(5)
MAX_ERROR = 1000  # characters of a reason
