"""The suites: they judge engines and know only data types and the wire."""
