calls: list[str] = []  # in order
environment: dict[str, str] = {}  # as it was when the bridge was imported
