"""The Opticnerve server: one vision tower behind gRPC. See README.md for the tree in the order of the data flow."""

__version__ = "0.1.0"
