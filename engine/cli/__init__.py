"""The commands `ignition` and `flare`: options in, one clear line and an exit code out."""
