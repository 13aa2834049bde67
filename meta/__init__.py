"""meta: N devices behave like one. Split states, the plan, all-reduce over pinned host memory, the mesh.

Knows no architecture, no token id and no file format.
"""
