"""Tests of the plugin run tiny suites through it; all else is in `suites/plugin.py`."""

pytest_plugins = ["pytester"]
