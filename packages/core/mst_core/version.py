"""The one version of all six distributions."""

VERSION = "0.1.0"
