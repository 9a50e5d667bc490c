"""From the world to a store that training reads: fetch, check, pack. Torch-free."""
