"""The memory of this machine."""


def free_memory() -> int:
    """Bytes before the system swaps or kills; very large if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 1 << 62
