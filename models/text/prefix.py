def n_common(a: str, b: str) -> int:
    """Return the length of the common prefix. `os.path.commonprefix` takes 100 times as long."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
