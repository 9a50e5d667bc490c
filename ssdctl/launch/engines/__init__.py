"""The launchers, one file each; a file's name is the value of `--launcher`."""
