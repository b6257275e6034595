"""Presets as YAML: a default file for each domain, its sizes and its data sets."""
