"""Large language models served by the PCs an office already owns."""

__version__ = "0.1.0"
