"""Read, convert and check datasets; write the store that training reads."""

TOML = "dataset.toml"
