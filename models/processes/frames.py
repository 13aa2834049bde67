"""The frames between a child process and its parent. A frame is a head, then bytes."""

import struct

# A head contains the number of bytes, the kind, and a number whose meaning depends on the kind.
HEAD = struct.Struct("<IIB")
# ASKED contains a request, ANSWERED the reply to it, REFUSED an error message, and ENDED the error message of
# a process that ends. READY is empty.
ASKED, READY, ANSWERED, REFUSED, ENDED = range(5)
MAX_ERROR = 1000  # characters
