"""Read, convert and check datasets; write the store that training reads. Torch-free."""

TOML = "dataset.toml"
