"""The format of frames between template_process.py and template_worker.py. A frame is a head, then bytes.
Both processes store the last conversation, and a frame contains only changes. Sending 1 MB as JSON takes 20
ms; comparing 1 MB with the last conversation takes 0.2 ms.
"""

import struct

# A head contains the number of bytes, the number of messages or characters unchanged since the last frame,
# and the kind.
HEAD = struct.Struct("<IIB")
# After the head, ASKED contains a JSON request, TEXT a text, REFUSED an error message, and ENDED the error
# message of a process that ends.
ASKED, READY, TEXT, REFUSED, ENDED = range(5)
MAX_ERROR = 1000  # characters
