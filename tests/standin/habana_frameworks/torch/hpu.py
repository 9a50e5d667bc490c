def synchronize() -> None:
    pass


def max_memory_allocated() -> int:
    return 1_000_000_000


def reset_peak_memory_stats() -> None:
    pass


def mem_get_info() -> tuple[int, int]:
    return 20_000_000_000, 32_000_000_000
