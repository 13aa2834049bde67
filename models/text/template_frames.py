"""The format of frames between template_process.py and template_worker.py. A frame is a head, then bytes.
Both processes store the last conversation, and a frame has only what changed. To send 1 MB as JSON takes 20
ms; to compare 1 MB with the last conversation takes 0.2 ms.
"""

import struct

# A head has the number of bytes, the number of messages or characters that are the same as in the last frame,
# and the kind.
HEAD = struct.Struct("<IIB")
# The kinds of frames. After the head, ASKED has a JSON request, READY nothing, TEXT a text, REFUSED an error
# message, and ENDED an error message of a process that ends.
ASKED, READY, TEXT, REFUSED, ENDED = range(5)
MAX_ERROR = 1000  # characters of an error message
